"""What a saved pruner says of itself: budgets, revision, measured rows; and who may read it."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from diffprune import loading
from diffprune.model import PrunedVLM
from tests import tiny
from tests.train import runs


def make(**options: Any) -> PrunedVLM:
    return PrunedVLM(*tiny.build("llava"), method="diffprune", **{"keep": 4, **options})


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_the_budgets_trained_for_outlive_loading_with_another_one(tmp_path: Path) -> None:
    vlm = make()
    vlm.trained_for = (2, 8)
    vlm.save_pretrained(tmp_path / "a", base_id="x/y")
    model, processor = tiny.build("llava")
    loaded = PrunedVLM.from_pretrained(tmp_path / "a", base=model, processor=processor)
    assert loaded.budget.keep == 8  # the largest, where none is asked for
    other = PrunedVLM.from_pretrained(tmp_path / "a", keep=3, base=model, processor=processor)
    assert other.budget.keep == 3
    other.save_pretrained(tmp_path / "b")
    assert config_of(tmp_path / "b")["budgets"] == [2, 8]
    assert "trained for keep = 2 to 8" in (tmp_path / "b" / "README.md").read_text()


def test_the_recipe_outlives_loading_and_saving_and_stands_in_the_card(tmp_path: Path) -> None:
    vlm = make()
    assert "recipe" not in vlm.artefact
    vlm.artefact = {"recipe": "paper"}
    vlm.save_pretrained(tmp_path / "a", base_id="x/y")
    model, processor = tiny.build("llava")
    PrunedVLM.from_pretrained(tmp_path / "a", base=model, processor=processor).save_pretrained(tmp_path / "b")
    assert config_of(tmp_path / "b")["recipe"] == "paper"
    assert "trained for keep = 4, recipe paper; positions" in (tmp_path / "b" / "README.md").read_text()


def test_measured_rows_are_a_table_of_the_card(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path, card_rows=[{"method": "diffprune", "keep": 64, "retention": 97.25}])
    assert "| diffprune | 64 | 97.25 |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_the_weights_have_the_mode_of_any_other_file(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        make().save_pretrained(tmp_path / "pruner")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "pruner").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors", "README.md"), mode)


def test_the_revision_is_kept_and_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = runs.save_model(tmp_path / "base")
    vlm = make()
    monkeypatch.setattr(vlm.base.config, "_commit_hash", "abc123", raising=False)
    vlm.save_pretrained(tmp_path / "pruner", base_id=str(base))
    assert config_of(tmp_path / "pruner")["base"]["revision"] == "abc123"
    asked: list[Any] = []
    load = loading.load_base

    def watch(name: str, **kwargs: Any) -> Any:
        asked.append(kwargs)
        return load(name, **kwargs)

    monkeypatch.setattr(loading, "load_base", watch)
    PrunedVLM.from_pretrained(tmp_path / "pruner")
    PrunedVLM.from_pretrained(tmp_path / "pruner", revision="other")
    assert asked == [{"revision": "abc123"}, {"revision": "other"}]


def test_offloaded_embeddings_or_tower_are_refused_in_one_sentence(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "pruner")
    model, processor = runs_copy()
    cpu_offload(model, execution_device=torch.device("cpu"))
    for load in (
        lambda: PrunedVLM(model, processor, method="diffprune"),
        lambda: PrunedVLM.from_pretrained(tmp_path / "pruner", base=model, processor=processor),
    ):
        with pytest.raises(ValueError, match="device_map has offloaded the model's embeddings, vision tower"):
            load()


def runs_copy() -> tuple[Any, Any]:
    """A tiny model of its own, which may be spoilt."""
    import importlib

    return importlib.import_module("tests.tiny.llava").build()


def test_a_name_without_a_shipped_scorer_is_an_absent_folder() -> None:
    with pytest.raises(ValueError, match=r"llava-1\.5-7b-diffprune.config\.json is missing"):
        PrunedVLM.from_pretrained("llava-1.5-7b-diffprune")


@pytest.mark.parametrize(
    "name, words",
    [
        ("llava-1.5-8b", "did you mean .*llava-1.5-7b"),
        ("zebra", r"'zebra' .*give a folder that is there, a hub id \(owner/name\) or one of .*llava-1\.5-7b"),
        ("/no/such/folder", "'/no/such/folder' .*give a folder that is there"),
    ],
)
def test_a_name_that_can_be_no_model_is_refused_before_the_hub_is_asked(name, words, monkeypatch) -> None:
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=words):
        loading.load_base(name)


def test_a_hub_id_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(ValueError, match=r"^'owner/nothing' is neither .* that can be reached \(We couldn't connect"):
        loading.load_base("owner/nothing")


def test_a_full_disk_while_a_model_is_fetched_is_not_taken_for_the_hub(monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", full)
    with pytest.raises(OSError, match="No space left"):
        loading.load_base("owner/nothing")


def test_a_tokenizer_that_is_json_and_no_tokenizer_is_found(tmp_path: Path) -> None:
    base = runs.save_model(tmp_path / "base")
    assert loading.damaged_file(base) is None
    (base / "tokenizer.json").write_text("{}")
    assert loading.damaged_file(base) == base / "tokenizer.json"


def test_an_order_that_was_saved_is_raster_order_or_refused(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    assert "order" not in config_of(tmp_path)
    model, processor = tiny.build("llava")
    for order in ("raster", "native"):
        (tmp_path / "config.json").write_text(json.dumps({**config_of(tmp_path), "order": order}))
        if order == "raster":
            assert PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor).method.name == "diffprune"
            continue
        with pytest.raises(ValueError, match="saved with order='native', which is no longer an option; change it to"):
            PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)
