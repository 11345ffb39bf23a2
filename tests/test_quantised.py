"""Bases that are quantised, adapted or offloaded: they work, or one sentence says why not."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import diffprune as dp
from diffprune.base_files import quantiser
from diffprune.config import BackboneConfig
from diffprune.fingerprint import base_fingerprint
from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from diffprune.train.frozen import load_frozen
from tests import stock, tiny

METHODS = ("divprune", "sparsevlm", "fastv")  # before and inside the language model, reading text or not


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def ask(vlm: PrunedVLM) -> torch.Tensor:
    return vlm.generate([tiny.picture()], "What?", max_new_tokens=4, do_sample=False, return_ids=True)


def learned(folder: Path) -> PrunedVLM:
    return PrunedVLM(*load_base(folder), method="diffprune", keep=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stock.save_stock(tmp_path_factory.mktemp("base"), "llava")


# Saved quantised ------------------------------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "older": {"load_in_8bit": True},
    "torchao": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    "gptq": {"quant_method": "gptq", "bits": 4},
}


def save_as(folder: Path, saved: dict[str, Any]) -> Path:
    stock.save_stock(folder, "llava")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": saved}))
    return folder


def test_how_weights_are_stored_is_read_from_any_form() -> None:
    from transformers import BitsAndBytesConfig

    assert [quantiser(saved) for saved in SAVED.values()] == ["bitsandbytes", "bitsandbytes", "torchao", "gptq"]
    assert quantiser(None) is None and quantiser({}) is None
    if importlib.util.find_spec("bitsandbytes"):
        assert quantiser(BitsAndBytesConfig(load_in_8bit=True)) == "bitsandbytes"


@pytest.mark.parametrize("kind, package", [("bitsandbytes", "bitsandbytes"), ("torchao", "torchao")])
def test_a_quantised_base_whose_package_is_missing_is_one_sentence(kind, package, tmp_path, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == package else find(name))
    folder = save_as(tmp_path, SAVED[kind])
    with pytest.raises(ValueError, match=f"quantised by {kind}, and {package} is not installed: run pip install"):
        load_base(folder)


def test_a_quantiser_that_was_never_tried_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is quantised by gptq, which is not tested here \(bitsandbytes and torchao"):
        load_base(save_as(tmp_path, SAVED["gptq"]))


def test_a_pruner_is_not_trained_on_a_quantised_base(tmp_path: Path) -> None:
    weights = str(save_as(tmp_path, SAVED["torchao"]))
    with pytest.raises(ValueError, match="is quantised by torchao, and a pruner is not trained on that; name the"):
        load_frozen(BackboneConfig(name="llava", weights=weights, dtype="float32"), torch.device("cpu"))


# Quantised while they are loaded --------------------------------------------------------------------------------------


def settings(kind: str) -> Any:
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    from transformers import BitsAndBytesConfig

    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    return BitsAndBytesConfig(**(four if kind == "4bit" else {"load_in_8bit": True}))


@pytest.mark.filterwarnings("ignore")  # of libraries that are not ours
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("4bit", marks=needs("bitsandbytes")),
        pytest.param("8bit", marks=needs("bitsandbytes")),
        pytest.param("torchao", marks=needs("torchao")),
    ],
)
def test_a_base_that_is_quantised_while_it_is_loaded(kind: str, base: Path, tmp_path: Path) -> None:
    plain = learned(base)
    plain.save_pretrained(tmp_path)
    vlm = dp.load(tmp_path, quantization_config=settings(kind))  # known by its files: not taken for another base
    weight = vlm.base.model.vision_tower.state_dict()[next(iter(linear_names(vlm)))]
    assert not weight.is_floating_point() or type(weight) not in (torch.Tensor, torch.nn.Parameter)
    assert base_fingerprint(vlm.backbone) == base_fingerprint(plain.backbone)
    for method in METHODS:
        assert ask(PrunedVLM(vlm.base, vlm.processor, method=method, keep=4)).shape == (1, 4)
    assert ask(vlm).shape == (1, 4)
    with pytest.raises(ValueError, match="the fast path needs plain weights, and these are quantised by"):
        vlm.compile(image_sizes=[(100, 70)], max_new_tokens=4)


def linear_names(vlm: PrunedVLM) -> list[str]:
    return [name for name in vlm.base.model.vision_tower.state_dict() if name.endswith("fc1.weight")]


# Adapted --------------------------------------------------------------------------------------------------------------


def adapted(model: Any, folder: Path, targets: str) -> Any:
    """A LoRA on those layers, saved, with weights that change answers."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    peft.save_pretrained(folder)
    return peft


@needs("peft")
@pytest.mark.filterwarnings("ignore")
def test_a_lora_of_the_language_model_works_and_its_base_is_known(base: Path, tmp_path: Path) -> None:
    plain = learned(base)
    plain.save_pretrained(tmp_path / "pruner", base_id=str(base))
    model, processor = load_base(base)
    peft = adapted(model, tmp_path / "lora", r".*language_model.*\.(q_proj|v_proj|up_proj)")
    vlm = PrunedVLM(peft, processor, method="divprune", keep=4)
    assert type(vlm.base).__name__ == "LlavaForConditionalGeneration"
    reference = PrunedVLM(*load_base(base), method="divprune", keep=4)
    batch = vlm.prepare([tiny.picture()], "What?")
    assert not torch.allclose(vlm.logits(batch)[0], reference.logits(batch)[0], atol=1e-3)  # the adapter is at work
    assert ask(vlm).shape == (1, 4)
    assert PrunedVLM.from_pretrained(tmp_path / "pruner", base=peft, processor=processor)
    with pytest.raises(ValueError, match="the fast path does not know the language model"):
        vlm.compile(image_sizes=[(100, 70)], max_new_tokens=4)
    loaded = dp.load(tmp_path / "lora", method="divprune", keep=4)  # its folder names the base
    assert torch.equal(loaded.logits(batch)[0], vlm.logits(batch)[0])


@needs("peft")
@pytest.mark.filterwarnings("ignore")
def test_a_lora_of_the_tower_is_another_base(base: Path, tmp_path: Path) -> None:
    learned(base).save_pretrained(tmp_path / "pruner")
    model, processor = load_base(base)
    peft = adapted(model, tmp_path / "lora", r".*vision_tower.*\.(q_proj|v_proj)")
    with pytest.raises(ValueError, match="their vision weights differ"):
        PrunedVLM.from_pretrained(tmp_path / "pruner", base=peft, processor=processor)


def test_an_adapter_without_peft_or_without_a_base_is_one_sentence(base: Path, tmp_path: Path, monkeypatch) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"adapter_config.json names no base model; load it yourself"):
        load_base(tmp_path)
    config.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base)}))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "peft" else find(name))
    with pytest.raises(ValueError, match=f"is an adapter for {base}, and peft is not installed: run pip install peft"):
        load_base(tmp_path)


# Offloaded ------------------------------------------------------------------------------------------------------------

HERE = {"model.vision_tower": "cpu", "model.multi_modal_projector": "cpu", "model.language_model.embed_tokens": "cpu"}
PLACES = {
    "cpu": {"": "cpu"},
    "disk": HERE | {"model.language_model.layers": "disk", "model.language_model.norm": "cpu", "lm_head": "cpu"},
    "some": HERE
    | {"model.language_model.layers.0": "cpu", "model.language_model.norm": "cpu", "lm_head": "cpu"}
    | {f"model.language_model.layers.{layer}": "disk" for layer in (1, 2)},
}


def device_map(place: str) -> dict[str, str]:
    """With the names of modules without parameters, which a map must cover too."""
    return PLACES[place] | ({"model.language_model.rotary_emb": "cpu"} if place != "cpu" else {})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", ["divprune", "fastv", "sparsevlm"])
def test_decoder_layers_on_the_disk_answer_as_those_in_memory(place, method, base: Path, tmp_path: Path) -> None:
    there = {"device_map": device_map(place), "offload_folder": str(tmp_path / "offload")}
    vlm = dp.load(base, method=method, keep=4, **there)
    on_disk = {parameter.device.type for parameter in vlm.base.parameters()} & {"meta"}
    assert bool(on_disk) == (place != "cpu")
    assert torch.equal(ask(vlm), ask(dp.load(base, method=method, keep=4)))


def test_a_saved_pruner_loads_onto_an_offloaded_base_and_is_not_compiled(base: Path, tmp_path: Path) -> None:
    learned(base).save_pretrained(tmp_path / "pruner")
    there = {"device_map": device_map("disk"), "offload_folder": str(tmp_path / "offload")}
    vlm = dp.load(tmp_path / "pruner", **there)
    assert torch.equal(ask(vlm), ask(dp.load(tmp_path / "pruner")))
    with pytest.raises(ValueError, match="the fast path needs plain weights, and these are offloaded"):
        vlm.compile(image_sizes=[(100, 70)], max_new_tokens=4)
