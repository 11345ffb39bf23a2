"""One quick demo on a tiny model, for all tests that look at what came out."""

from pathlib import Path
from typing import NamedTuple

import pytest

from diffprune_lab.demo import run
from diffprune_lab.demo.story import QUICK, Story
from lab.tests import tiny_scenes


class Demo(NamedTuple):
    folder: Path
    story: Story
    progress: list[tuple[str, int, int]]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("out") / "demo"
    progress: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load_base", lambda name: tiny_scenes.always_says("yes"))
        patch.setattr(run, "ASSETS", folder)  # the shipped pruner is for the real model
        story = run.run_demo(folder, QUICK, lambda *state: progress.append(state))
    return Demo(folder, story, progress)
