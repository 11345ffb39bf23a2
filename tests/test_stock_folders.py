"""Every family from a folder as users have it, in the environment that the README's install makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, LlamaConfig
from transformers.utils.import_utils import is_num2words_available, is_torchvision_available

import diffprune as dp
from diffprune.backbones.image_only import VIDEO
from diffprune.loading import describe_processor, load_base
from diffprune.model import PrunedVLM
from tests import stock, tiny

QUESTION = {"text": "What is it?", "max_new_tokens": 4, "do_sample": False, "return_ids": True}


def ask(vlm: PrunedVLM) -> torch.Tensor:
    return vlm.generate(images=[tiny.picture()], **QUESTION).cpu()


@pytest.mark.parametrize("family", stock.FAMILIES)
def test_every_family_loads_from_its_hub_layout_without_torchvision(family: str, tmp_path: Path) -> None:
    if is_torchvision_available():
        pytest.skip("torchvision is installed: the marked test below has it")
    vlm = dp.load(stock.save_stock(tmp_path, family), method="divprune", keep=0.5)
    assert torch.equal(ask(vlm), ask(PrunedVLM(*tiny.build(family), method="divprune", keep=0.5)))


@pytest.mark.parametrize("family", stock.FAMILIES)
def test_every_processor_loads_as_transformers_saves_it(family: str, tmp_path: Path) -> None:
    folder = stock.save_stock(tmp_path / "stock", family, layout="saved")
    processor = describe_processor(str(folder), family)
    backbone = PrunedVLM(tiny.build(family)[0], processor).backbone
    ours, theirs = (one.prepare([tiny.picture()], "What is it?") for one in (backbone, tiny_backbone(family)))
    assert ours.features.keys() == theirs.features.keys()
    for key, value in theirs.features.items():
        near = {"atol": 0.05, "rtol": 0} if is_torchvision_available() else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(ours.features[key], value, **near)
    processor.save_pretrained(tmp_path / "again")  # a stock folder again, not one of a class that only we have
    saved = json.loads((tmp_path / "again" / "processor_config.json").read_text())
    assert saved["processor_class"] == json.loads((folder / "processor_config.json").read_text())["processor_class"]


def tiny_backbone(family: str) -> Any:
    return PrunedVLM(*tiny.build(family)).backbone


@pytest.mark.gpu
@pytest.mark.parametrize("family", stock.FAMILIES)
def test_with_torchvision_every_family_has_its_stock_processor(family: str, tmp_path: Path) -> None:
    assert is_torchvision_available(), "this machine is to have torchvision"
    if family == "smolvlm" and not is_num2words_available():
        pytest.skip("SmolVLM's stock processor needs num2words")
    folder = stock.save_stock(tmp_path / "files", family)
    theirs = AutoProcessor.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "stock")
    tiny.build(family)[0].save_pretrained(tmp_path / "stock")
    model, ours = load_base(tmp_path / "stock")
    assert type(ours) is type(theirs) and hasattr(ours, VIDEO) == (family in stock.VIDEOS)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # what it is about is torchvision, which GPU images have
    vlm = PrunedVLM(model.to(device), ours, method="divprune", keep=0.5)
    assert torch.equal(ask(vlm), ask(PrunedVLM(model, theirs, method="divprune", keep=0.5)))


@pytest.mark.gpu
def test_smolvlm_loads_with_torchvision_and_without_num2words(tmp_path: Path) -> None:
    if is_num2words_available():
        pytest.skip("num2words is installed")
    vlm = dp.load(stock.save_stock(tmp_path, "smolvlm"), method="divprune", keep=0.5)
    assert ask(vlm).shape == (1, 4)


# Known before the weights are read -----------------------------------------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that reads weights."""
    monkeypatch.setattr(
        AutoModelForImageTextToText, "from_pretrained", lambda *_, **__: pytest.fail("weights were read")
    )


def spoil(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


@pytest.mark.parametrize(
    "gone, words",
    [
        (("preprocessor_config.json",), "has no image processor .preprocessor_config.json or"),
        (("tokenizer.json", "tokenizer_config.json"), r"has no tokenizer \(tokenizer.json\)"),
        (("model.safetensors",), "is only partly downloaded: model.safetensors is missing; download"),
        (("config.json",), "holds no config.json, so no model; download"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_before_its_weights(gone, words, tmp_path, no_weights) -> None:
    folder = stock.save_stock(tmp_path, "llava")
    spoil(folder, *gone)
    with pytest.raises(ValueError, match=words) as error:
        load_base(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_half_downloaded_checkpoint_names_the_shards_it_lacks(tmp_path: Path, no_weights: None) -> None:
    folder = stock.save_stock(tmp_path, "llava")
    tiny.build("llava")[0].save_pretrained(folder, max_shard_size="200KB")
    spoil(folder, "model.safetensors")
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    spoil(folder, *shards[1:])
    with pytest.raises(ValueError, match=f"partly downloaded: {shards[1]} is missing and {len(shards) - 2} more"):
        load_base(folder)


def test_a_half_downloaded_repository_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40)
    stock.save_stock(snapshot, "llava")
    spoil(snapshot, "model.safetensors")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"'owner/model' is only partly downloaded \(model\.safetensors is missing in"):
        load_base("owner/model", cache_dir=str(tmp_path))


def test_what_is_no_vision_language_model_is_told_so_and_not_what_it_lacks(tmp_path: Path, no_weights: None) -> None:
    LlamaConfig().save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="model type 'llama' is not supported; there are"):
        load_base(tmp_path / "text")
    PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4).save_pretrained(tmp_path / "pruner", base_id="a/b")
    with pytest.raises(ValueError, match=r"pruner' is a saved pruner, no base model; name it as the pruner"):
        load_base(tmp_path / "pruner")


def test_another_kind_of_model_is_refused_before_its_weights(tmp_path: Path, no_weights: None) -> None:
    folder = stock.save_stock(tmp_path, "llava")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "video_llava"}))
    with pytest.raises(ValueError, match="model type 'video_llava' is not supported; there are"):
        load_base(folder)
