"""What a saved pruner says of itself: budgets, revision, measured rows; and who may read it."""

import copy
import errno
import json
import os
import re
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForImageTextToText, PreTrainedConfig

import diffprune as dp
from diffprune import api, loading, saved_pruners
from diffprune.cli import main as cli
from diffprune.config import BackboneConfig
from diffprune.fingerprint import sampled_fingerprint, vision_state
from diffprune.integrations.vllm_command import describe_served
from diffprune.model import PrunedVLM
from diffprune.speed import plan
from diffprune.train.frozen import load_frozen
from tests import stock, tiny
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

    monkeypatch.setattr(saved_pruners, "load_base", watch)
    PrunedVLM.from_pretrained(tmp_path / "pruner")
    PrunedVLM.from_pretrained(tmp_path / "pruner", base_revision="other")
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


# The base that a pruner was made for ---------------------------------------------------------------------------------


def changed_processor(processor: Any, **changes: Any) -> Any:
    other = copy.deepcopy(processor)
    for key, value in changes.items():
        setattr(other.image_processor, key, value)
    return other


def test_features_of_another_layer_are_another_base(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path, base_id="x/y")
    assert config_of(tmp_path)["features"]["layer"] == -2
    model, processor = runs_copy()
    model.load_state_dict(tiny.build("llava")[0].state_dict())
    model.config.vision_feature_layer = -1
    with pytest.raises(ValueError, match=r"'x/y' with other settings: .* of layer -2, and here of layer -1; load its"):
        PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)
    assert PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor, allow_other_base=True)
    config = config_of(tmp_path)
    config["features"]["layer"] = "é" * 2000  # damaged
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"of layer 'é{76}\.\.\., and here of layer -1; load its"):
        PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)


@pytest.mark.parametrize("key, word", [("image_mean", "mean"), ("image_std", "deviation")])
def test_pictures_on_another_scale_are_another_base(key: str, word: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    model, processor = tiny.build("llava")
    other = changed_processor(processor, **{key: [0.5, 0.5, 0.5]})
    with pytest.raises(ValueError, match=rf"scaled by a {word} of \[0\..*\], and here by one of \[0.5, 0.5, 0.5\]"):
        PrunedVLM.from_pretrained(tmp_path, base=model, processor=other)
    nearly = changed_processor(processor, **{key: [value + 1e-7 for value in getattr(processor.image_processor, key)]})
    assert PrunedVLM.from_pretrained(tmp_path, base=model, processor=nearly)


def test_a_pruner_saved_before_all_values_were_hashed_still_loads(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    config = config_of(tmp_path)
    assert config["base"]["fingerprint"].startswith("all:")
    model, processor = tiny.build("llava")
    state = vision_state(make().backbone)
    old = {"layer": -2, "before": "projector"}
    for print_, fits in ((sampled_fingerprint(state.items()), True), ("0" * 32, False)):
        base = config["base"] | {"fingerprint": print_}
        (tmp_path / "config.json").write_text(json.dumps(config | {"base": base, "features": old}))
        if fits:
            assert PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)
            continue
        with pytest.raises(ValueError, match="their vision weights differ"):
            PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)


def test_one_changed_weight_anywhere_in_the_tower_is_another_base(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    model, processor = runs_copy()
    model.load_state_dict(tiny.build("llava")[0].state_dict())
    weight = max(model.model.vision_tower.parameters(), key=lambda one: one.numel())
    assert weight.numel() > 4096
    projected = max(model.model.multi_modal_projector.parameters(), key=lambda one: one.numel())
    for one in (weight, projected):
        with torch.no_grad():
            one.view(-1)[1] += 1.0  # between the values that were once sampled
        with pytest.raises(ValueError, match="their vision weights differ"):
            PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)
        with torch.no_grad():
            one.view(-1)[1] -= 1.0


# A name that is no folder --------------------------------------------------------------------------------------------


def test_a_base_named_from_where_the_training_ran_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    base = runs.save_model(project / "models" / "base")
    monkeypatch.chdir(project)
    pruner = project / "runs" / "pruner"
    PrunedVLM(*loading.load_base("models/base"), method="diffprune", keep=4).save_pretrained(pruner)
    assert config_of(pruner)["base"]["id"] == "models/base"
    monkeypatch.chdir(elsewhere)
    assert dp.load(pruner, keep=4).base.config._name_or_path == str(base)
    assert describe_served(str(pruner), keep=4).model == str(base)
    shutil.copytree(pruner, elsewhere / "pruner")
    with pytest.raises(ValueError, match=r"'models/base' is neither a folder"):
        dp.load(elsewhere / "pruner", keep=4)


def test_the_hub_is_not_asked_for_a_folder_without_saying_so(caplog: pytest.LogCaptureFixture) -> None:
    for load in (loading.load_base, PrunedVLM.from_pretrained, loading.is_pruner):
        caplog.clear()
        with (
            pytest.raises(ValueError, match=r"runs/llava-k64.* is neither")
            if load is not loading.is_pruner
            else nullcontext()
        ):
            load("runs/llava-k64")
        assert "there is no folder runs/llava-k64 here: asking the hub" in caplog.text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("It is off. To go there set 'HF_HUB_OFFLINE=0' " + "as a variable " * 14, "as a variable)"),
        ("Max retries exceeded " * 50, "exceeded [...])"),
    ],
)
def test_what_the_hub_said_is_not_cut_in_the_middle_of_a_word(
    said: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(said)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"^me/pruner is neither") as error:
        PrunedVLM.from_pretrained("me/pruner")
    assert str(error.value).endswith(told)


def test_nothing_is_said_of_the_hub_where_its_files_lie_in_a_cache_of_the_user_s(tmp_path: Path, caplog) -> None:
    base = runs.save_model(tmp_path / "base")
    cache = tmp_path / "cache" / "models--owner--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc123")
    shutil.copytree(base, cache / "snapshots" / "abc123")
    loading.load_base("owner/model", cache_dir=tmp_path / "cache")
    loading.say_hub_is_asked("owner/model", cache_dir=tmp_path / "cache")
    assert "asking the hub" not in caplog.text
    loading.say_hub_is_asked("owner/model")
    assert "asking the hub" in caplog.text
    (cache / "snapshots" / "abc123" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is only partly downloaded \(model\.safetensors is missing in .*abc123"):
        loading.load_base("owner/model", cache_dir=tmp_path / "cache")


def test_only_the_files_of_a_pruner_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save_pretrained(tmp_path)
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model, processor = tiny.build("llava")
    PrunedVLM.from_pretrained("owner/pruner", base=model, processor=processor)
    files = ["config.json", "model.safetensors", "README.md"]
    assert asked == [("owner/pruner", {"revision": None, "allow_patterns": files})]


# A budget and what chooses -------------------------------------------------------------------------------------------

NOTHING_CHOOSES = r"keep=4 needs something that chooses what is kept; name a method \(divprune .* load a saved pruner"


def test_a_budget_without_a_method_is_an_error_in_python(tmp_path: Path) -> None:
    model, processor = tiny.build("llava")
    full = PrunedVLM(model, processor)
    batch = [tiny.picture()]
    for give in (
        lambda: PrunedVLM(model, processor, keep=4),
        lambda: full.generate(batch, "What?", keep=4, max_new_tokens=1),
        lambda: full.select(batch, keep=4),
        lambda: dp.load("llava-1.5-7b", keep=4),
        lambda: dp.load("llava-1.5-7b", method="full", keep=4),
    ):
        with pytest.raises(ValueError, match=NOTHING_CHOOSES):
            give()
    assert PrunedVLM(model, processor, keep=1.0).method.name == "full"


def test_a_budget_that_is_none_is_refused_before_a_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    make().save_pretrained(tmp_path / "pruner", base_id="owner/model")
    for module in (api, saved_pruners):
        monkeypatch.setattr(module, "load_base", lambda *_, **__: pytest.fail("the model is loaded"))
    for give in (
        lambda: dp.load("llava-1.5-7b", method="divprune", keep=0),
        lambda: dp.load(tmp_path / "pruner", keep=0),
        lambda: PrunedVLM.from_pretrained(tmp_path / "pruner", keep=0),
    ):
        with pytest.raises(ValueError, match="keep=0 keeps nothing"):
            give()


@pytest.mark.parametrize("command", ["ask", "show"])
def test_a_budget_without_a_method_is_an_error_on_the_command_line(command: str, tmp_path: Path, capsys) -> None:
    tiny.picture().save(tmp_path / "a.png")
    question = ["What?"] if command == "ask" else ["--out", str(tmp_path / "b.png")]
    method = [] if command == "ask" else ["--method", "full"]  # `show` draws with feature_norm where none is named
    code = cli._run([command, "--image", str(tmp_path / "a.png"), "--keep", "4", *method, *question])
    printed = capsys.readouterr().err
    assert code == 2 and re.search(NOTHING_CHOOSES, printed.splitlines()[-1])


@pytest.mark.parametrize("command", ["ask", "show", "eval"])
def test_a_base_model_beside_a_saved_pruner_is_not_ignored(command, tmp_path: Path, capsys) -> None:
    tiny.picture().save(tmp_path / "a.png")
    question = ["What?"] if command == "ask" else ["--out", str(tmp_path / "b.png")]
    image = [] if command == "eval" else ["--image", str(tmp_path / "a.png")]
    code = cli._run([command, *image, "--pruner", "p", "--model", "random", *question])
    printed = capsys.readouterr().err
    assert code != 0 and "--pruner p brings its own base model, so --model random would be ignored" in printed


def test_a_method_beside_a_saved_pruner_is_taken_or_refused_and_not_ignored(tmp_path: Path, capsys) -> None:
    tiny.picture().save(tmp_path / "a.png")
    pruner = tmp_path / "pruner"
    make().save_pretrained(pruner, base_id=str(runs.save_model(tmp_path / "base")))
    asked = ["ask", "--image", str(tmp_path / "a.png"), "--pruner", str(pruner), "--device", "cpu", "--json", "What?"]
    assert cli._run([*asked, "--method", "random"]) == 2
    assert "random" in capsys.readouterr().err.splitlines()[-1]
    assert cli._run([*asked, "--method", "diffprune-diverse"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "diffprune-diverse"
    loaded = api.load_vlm(str(pruner), method="diffprune-diverse", device="cpu")
    assert loaded.method.name == "diffprune-diverse"


# Code beside a model -------------------------------------------------------------------------------------------------


ODD: dict[str, dict[str, str]] = {  # by file what makes transformers look for a class in the folder's own code
    "config": {"model_type": "planted"},
    "preprocessor_config": {"image_processor_type": "Planted"},
    "processor_config": {"processor_class": "Planted"},
}


def plant_code(folder: Path, mark: Path, odd: str = "") -> None:
    """A model's folder whose every part names Python of its own, which would leave a mark.

    Args:
        odd: The file, without its ending, whose class transformers does not know.
    """
    names = {"AutoConfig": "C", "AutoModelForImageTextToText": "M", "AutoProcessor": "P", "AutoImageProcessor": "I"}
    (folder / "planted.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nclass C: pass\nclass M: pass\nclass P: pass\nclass I: pass\n"
    )
    maps = {key: f"planted.{name}" for key, name in names.items()} | {"AutoTokenizer": ["planted.T", "planted.T"]}
    for file in ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            found = json.loads((folder / file).read_text())
            more = ODD[odd] if file.removesuffix(".json") == odd else {}
            (folder / file).write_text(json.dumps(found | {"auto_map": maps} | more))


@pytest.mark.parametrize("odd", ["", *ODD])
def test_code_beside_a_model_is_neither_run_nor_asked_about(odd: str, tmp_path: Path, monkeypatch) -> None:
    folder = stock.save_stock(tmp_path / "model", "llava")
    plant_code(folder, tmp_path / "mark", odd)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    train = lambda: load_frozen(BackboneConfig(name="llava", weights=str(folder), dtype="float32"), torch.device("cpu"))  # noqa: E731
    for load in (lambda: loading.load_base(folder), train, lambda: plan.describe(str(folder))):
        if odd == "config":
            with pytest.raises(ValueError, match="model type 'planted' is not supported"):
                load()
        else:
            with suppress(ValueError):  # a class that is not known may be refused
                load()
    if odd == "preprocessor_config":
        with pytest.raises(ValueError, match=r"^the processor of .* needs code that lies beside it, and no such code"):
            loading.load_base(folder)
    with pytest.raises(ValueError, match=r"trust_remote_code=True would run code from .*; it is not needed"):
        loading.load_base(folder, trust_remote_code=True)
    assert not (tmp_path / "mark").exists()
