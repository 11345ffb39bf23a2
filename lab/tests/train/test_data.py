"""Captions of scenes as training data."""

from pathlib import Path

import pytest

from diffprune.config import DataConfig
from diffprune.train.sources import open_feed
from diffprune_lab.scenes import Scene
from tests.train import runs
from tests.train.sources.test_sources import read_all


def test_scenes_never_end_and_validation_has_scenes_of_its_own_split() -> None:
    feed = open_feed(DataConfig(name="scenes", validation=3), 42)
    assert feed.per_epoch is None
    first, other = read_all(feed, 0, 3), read_all(open_feed(DataConfig(name="scenes", validation=3), 1), 0, 3)
    pictures = [sample.picture for sample in first]
    assert all(isinstance(picture, Scene) and picture.split == "train" for picture in pictures)
    assert len({sample.id for sample in [*first, *other]}) == 6
    assert [sample.picture.split for sample in feed.validation()] == ["validation"] * 3
    assert read_all(feed, 1, 3) == first[1:]


def test_scenes_are_drawn_for_any_model(disk: Path, tmp_path: Path) -> None:
    runs.train(disk, tmp_path, data={"name": "scenes", "validation": 2}, optim={"steps": 2})
    assert len(runs.losses(tmp_path)) == 2


def test_a_model_that_a_package_brings_is_no_other_one_s_weights(disk: Path, tmp_path: Path) -> None:
    for name in ("qwen2.5-vl-7b", "scenes-llava", "llava-1.5-7b", "qwen2_5_vl"):
        with pytest.raises(ValueError, match=f"the config is for {name} and scenes-nano is another model"):
            runs.train(disk, tmp_path, backbone={"name": name, "weights": "scenes-nano"})
