"""A pruner on the Hub: uploaded, found again by branch and commit, with its base model; and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diffprune as dp
from diffprune.model import PrunedVLM
from tests import tiny
from tests.fake_hub import TOKEN, FakeHub, fake_hub
from tests.train import runs

FILES = {"config.json", "model.safetensors", "README.md"}
# What two people do, in a process of its own: the Hub's client reads its address when it is imported.
BOTH_SIDES = """
import json, torch
import diffprune as dp
from diffprune.loading import load_base
from PIL import Image

def shift(amount):
    with torch.no_grad():
        next(vlm.method.parameters()).fill_(amount)

def value(model):
    return float(next(model.method.parameters()).flatten()[0])

def told(call):
    try:
        call()
    except ValueError as error:
        return str(error)

out = {}
vlm = dp.PrunedVLM(*load_base("owner/base"), method="diffprune", keep=4)
shift(0.25)
first = vlm.push_to_hub("me/pruner", private=True, commit_message="the first")
shift(0.5)
vlm.push_to_hub("me/pruner", card_rows=[{"method": "diffprune", "keep": 4, "retention": 97.25}])
shift(0.75)
vlm.push_to_hub("me/pruner", revision="try")
vlm.push_to_hub("me/pruner", revision="try")  # the branch is there now
loaded = dp.load("me/pruner")
at_first = dp.load("me/pruner", revision=first.oid)
on_branch = dp.PrunedVLM.from_pretrained("me/pruner", revision="try")
out["values"] = [value(loaded), value(at_first), value(on_branch)]
picture = [Image.new("RGB", (40, 30), (200, 30, 30))]
shift(0.5)
ask = dict(images=picture, text="What?", max_new_tokens=4)
out["same"] = loaded.generate(**ask) == vlm.generate(**ask)
out["base"] = loaded.artefact["base"]
out["told"] = [
    told(lambda: dp.PrunedVLM.from_pretrained("me/pruner", revision="nothing")),
    told(lambda: dp.PrunedVLM.from_pretrained("me/pruner", revision="main", token="hf_wrong", cache_dir="other")),
    told(lambda: dp.PrunedVLM.from_pretrained("me/pruner", base_revision="nothing")),
    told(lambda: dp.load("me/nothing")),
]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeHub, dict[str, Any]]:
    """The Hub after two people were at it, and what they saw."""
    folder = tmp_path_factory.mktemp("shared")
    base = runs.save_model(folder / "base")
    with fake_hub() as hub:
        hub.commits["owner/base"] = {"b" * 40: {file.name: file.read_bytes() for file in base.iterdir()}}
        hub.branches["owner/base"] = {"main": "b" * 40}
        own = {**os.environ, **hub.environment, "HF_HOME": str(folder / "home")}
        done = subprocess.run([sys.executable, "-c", BOTH_SIDES], env=own, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return hub, json.loads(done.stdout.splitlines()[-1])


def test_a_revision_is_that_of_the_pruner(shared: tuple[FakeHub, dict[str, Any]]) -> None:
    hub, seen = shared
    assert seen["values"] == [0.5, 0.25, 0.75]  # main, the first commit, a branch
    assert seen["same"]
    assert seen["base"]["id"] == "owner/base" and seen["base"]["revision"] == "b" * 40
    asked = {(revision, file) for repository, revision, file in hub.downloaded if repository == "me/pruner"}
    assert {file for _, file in asked} == FILES


def test_the_pruner_alone_is_uploaded_with_a_card_that_says_how_to_serve_it(shared) -> None:
    hub, _ = shared
    assert hub.private == {"me/pruner"}
    assert len(hub.commits["me/pruner"]) == 5  # an empty one, and four uploads
    files = hub.commits["me/pruner"][hub.branches["me/pruner"]["main"]]
    assert files.keys() == FILES
    assert len(files["model.safetensors"]) < len(hub.commits["owner/base"]["b" * 40]["model.safetensors"])
    card = files["README.md"].decode()
    assert 'dp.PrunedVLM.from_pretrained("me/pruner", keep=4)' in card
    assert 'diffprune serve --pruner "me/pruner" --keep 4 --engine own' in card
    assert 'diffprune serve --pruner "me/pruner" --keep 4 --engine vllm' in card
    assert "base_model: owner/base" in card and "| diffprune | 4 | 97.25 |" in card
    assert TOKEN not in card


def test_what_is_not_there_is_one_sentence(shared: tuple[FakeHub, dict[str, Any]]) -> None:
    revision, token, base, repository = shared[1]["told"]
    assert revision.startswith("me/pruner at revision nothing is neither a local folder nor a hub repository that")
    assert "RevisionNotFound" in revision
    assert token.startswith("me/pruner at revision main is neither") and "RepositoryNotFound" in token
    assert base.startswith(
        "'owner/base' is neither a folder with a model nor a model id of the hub that can be reached"
    )
    assert repository.startswith("'me/nothing' is neither a folder with a model nor a model id")
    assert all(TOKEN not in sentence and "\n" not in sentence for sentence in (revision, token, base, repository))


def make() -> PrunedVLM:
    return PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"revision=v1 is for a repository of the hub, and .* is none; .*base_revision"
    ):
        PrunedVLM.from_pretrained(tmp_path, revision="v1")
    for call in (lambda: dp.load("owner/pruner", revision=3), lambda: dp.load(tmp_path, revision=3)):
        with pytest.raises(ValueError, match=r"revision=3 is no revision; give a branch, a tag or a commit"):
            call()


@pytest.mark.parametrize("repo_id", ["pruner", "a/b/c", "", "./pruner"])
def test_a_name_that_is_no_repository_is_refused_before_anything_is_sent(repo_id: str, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"is no name of a repository; give owner/name"):
        make().push_to_hub(repo_id, base_id="owner/base")


def test_a_pruner_whose_base_is_a_folder_here_is_not_shared(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: pytest.fail("asked the hub"))
    vlm = make()
    with pytest.raises(ValueError, match=r"the base model has no name: .* give its hub id, push_to_hub"):
        vlm.push_to_hub("me/pruner")
    for name in (str(tmp_path), "models"):
        with pytest.raises(
            ValueError, match=rf"the base model is {name}, a name of this machine: others could not load"
        ):
            vlm.push_to_hub("me/pruner", base_id=name)
