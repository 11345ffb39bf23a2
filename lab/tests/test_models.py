"""The reference models and their scorer: found by name, and refused where they cannot follow."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText

from diffprune import loading
from diffprune.model import PrunedVLM


def test_the_scorer_that_ships_is_loaded_by_its_name() -> None:
    vlm = PrunedVLM.from_pretrained("scenes-llava-diffprune", keep=64)
    assert vlm.method.name == "diffprune-diverse" and vlm.base.config.image_seq_length == 576


def test_a_model_without_a_shipped_scorer_has_none_by_that_name() -> None:
    with pytest.raises(ValueError, match=r"scenes-nano-diffprune.config\.json is missing"):
        PrunedVLM.from_pretrained("scenes-nano-diffprune")


def test_a_reference_model_takes_a_type_by_name_and_refuses_what_it_cannot_follow() -> None:
    model, _ = loading.load_base("scenes-nano", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="scenes-nano comes with the lab"):
        loading.load_base("scenes-nano", revision="main")


@pytest.mark.parametrize(
    "name, words",
    [
        ("scenes-nona", r"'scenes-nona' is neither .* did you mean scenes-nano"),
        ("zebra", r"'zebra' .*give a folder that is there, a hub id \(owner/name\) or one of scenes-llava"),
    ],
)
def test_a_name_that_can_be_no_model_is_answered_with_the_reference_models(name, words, monkeypatch) -> None:
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=words):
        loading.load_base(name)


def test_looking_for_a_model_imports_no_world_but_its_own() -> None:
    code = (
        "import sys; from diffprune_lab.models import SCENES\n"
        "assert SCENES.holds('scenes-llava') and SCENES.holds('scarce-llava') and not SCENES.holds('.')\n"
        "print(*(name for name in sys.modules if name.startswith(('diffprune_lab', 'transformers.models.qwen'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = set(run.stdout.split())
    # Older transformers put names of image processors there by themselves.
    worlds = ("diffprune_lab.scarce.", "diffprune_lab.scenes.qwen")
    assert not {name for name in found if ".modeling_" in name or name.startswith(worlds)}
