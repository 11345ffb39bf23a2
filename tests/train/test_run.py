"""A whole run on a tiny LLaVA: what it trains, what it leaves behind, and what it refuses."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from diffprune import doors
from diffprune.config import DataConfig, OptimConfig, make_config
from diffprune.model import PrunedVLM
from diffprune.registry import BACKBONES
from diffprune.train import folder as folder_module
from diffprune.train import trainer as trainer_module
from diffprune.train.feed import Broken
from diffprune.train.folder import RunState, alone_in, note_broken
from diffprune.train.frozen import ask_hub_once, load_frozen, recomputing
from diffprune.train.objective import Objective
from diffprune.train.run import train_pruner
from diffprune.train.sources import open_feed
from tests import tiny
from tests.train import runs
from tests.train.runs import train


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_a_run_leaves_a_pruner_that_loads_and_has_the_loss_that_was_reported(disk: Path, tmp_path: Path) -> None:
    summary = train(disk, tmp_path, saving={"tensorboard": True})
    assert (summary["ended"], summary["step"], summary["broken"]) == ("finished", 6, 0)
    checked = records(tmp_path, "validation")
    assert [record["step"] for record in checked] == [3, 6]
    assert all(record["gap"] == pytest.approx(record["hard"] - record["throttled"]) for record in checked)
    assert summary["best"]["hard"] == min(record["hard"] for record in checked)
    trained = records(tmp_path, "train")
    assert set(trained[0]) >= {"loss", "tau", "lr", "entropy", "samples_s", "memory_gb"}
    assert trained[0]["tau"] == 2.0 and trained[-1]["tau"] == 0.1 and 0 < trained[-1]["entropy"] <= 4.0
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert list((tmp_path / "tensorboard").iterdir())

    vlm = PrunedVLM.from_pretrained(tmp_path)
    assert vlm.budget.keep == 4 and vlm.artefact["recipe"] == "bridge"
    config = make_config(runs.values(disk / "model", disk / "data"))
    feed = open_feed(config.data, config.seed)
    batch, tokens = feed.encode(vlm, feed.validation())
    with torch.no_grad():
        assert vlm.loss(batch, tokens=tokens, hard=True).item() == pytest.approx(summary["best"]["hard"], rel=1e-5)
        by_lot = PrunedVLM(vlm.base, vlm.processor, method="random", keep=4)
        chance = by_lot.loss(batch, tokens=tokens, hard=True).item()
    assert [record["random"] for record in checked] == pytest.approx([chance, chance], rel=1e-5)


def test_a_step_without_a_finite_gradient_is_not_taken_and_told(disk: Path, tmp_path: Path, monkeypatch) -> None:
    forward = Objective.forward

    def spoiled(self: Any, samples: Any, step: Any, *rest: Any, **options: Any) -> Any:
        loss, entropy = forward(self, samples, step, *rest, **options)
        return (loss + (0 * loss).sqrt() if step == 2 else loss), entropy  # the same loss; its gradient is NaN

    monkeypatch.setattr(Objective, "forward", spoiled)
    summary = train(disk, tmp_path / "a", saving={"every": 1})
    assert (summary["ended"], summary["step"], summary["skipped"]) == ("finished", 6, 1)
    rates = [record["lr"] for record in records(tmp_path / "a", "train")]
    assert [rate == 0 for rate in rates] == [False, False, True, False, False, False]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for later in ("000005", "000006"):  # resumed after it: still counted
        shutil.rmtree(tmp_path / "b" / f"checkpoint-{later}")
    assert train(disk, tmp_path / "b", resume=True, saving={"every": 1})["skipped"] == 1
    assert PrunedVLM.from_pretrained(tmp_path / "a").budget.keep == 4
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_only_the_method_learns(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def load(*arguments: Any) -> Any:
        loaded = load_frozen(*arguments)
        kept.append((loaded[0], {name: value.clone() for name, value in loaded[0].state_dict().items()}))
        return loaded

    monkeypatch.setattr(trainer_module, "load_frozen", load)
    train(disk, tmp_path, optim={"gradient_checkpointing": True})
    ((model, before),) = kept
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    names = {key for path in tmp_path.rglob("weights.safetensors") for key in tensor_names(path)}
    assert names and all(name.startswith(("scorer.", "throttle_")) for name in names)
    assert all(name.startswith("scorer.") for name in tensor_names(tmp_path / "model.safetensors"))


def tensor_names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("name", ["diffprune", "dynamicvit", "visionselector", "atp_llava", "oc_vtp"])
def test_the_losses_do_not_depend_on_how_a_batch_is_cut(name: str, disk: Path, tmp_path: Path) -> None:
    """Nor does a penalty, a mean over pictures that may rise with the steps: captions differ in length."""
    found = []
    for batch_size, accumulate in ((4, 1), (2, 2), (1, 4)):
        out = tmp_path / str(batch_size)
        train(
            disk,
            out,
            method={"name": name},
            optim={"batch_size": batch_size, "accumulate": accumulate, "steps": 3},
            budget={"keep": None, "range": [2, 8]},
        )
        found.append(runs.losses(out))
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)
    assert found[0][0] != found[0][1]


def test_running_layers_again_changes_no_loss(disk: Path, tmp_path: Path) -> None:
    for again in (False, True):
        train(disk, tmp_path / str(again), optim={"gradient_checkpointing": again, "steps": 3})
    assert runs.losses(tmp_path / "True") == pytest.approx(runs.losses(tmp_path / "False"), rel=1e-6)


def test_layers_really_run_again() -> None:
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    layer = vlm.backbone.language_model.layers[0]
    calls: list[int] = []
    hook = layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    batch = vlm.prepare([tiny.picture()], ["?"], ["a"])
    try:
        for enabled, expected in ((False, 1), (True, 2)):
            calls.clear()
            with recomputing(vlm.backbone, enabled=enabled):
                vlm.loss(batch).backward()
            assert len(calls) == expected
    finally:
        hook.remove()
    assert not layer.training and not layer.gradient_checkpointing


def test_matched_noise_is_calibrated_once_and_kept(disk: Path, tmp_path: Path) -> None:
    train(disk, tmp_path, method={"name": "diffprune", "noise": "matched"}, optim={"steps": 2})
    path = next(tmp_path.rglob("weights.safetensors"))
    from safetensors.torch import load_file

    spread = [value for name, value in load_file(path).items() if name.startswith("throttle_noise") and "std" in name]
    assert len(spread) == 1 and (spread[0] > 0).all()


def test_a_run_without_progress_ends_once_patience_has_run_out(disk: Path, tmp_path: Path) -> None:
    still = {"lr": 1e-60, "steps": 12, "patience": 2}  # too small a rate to move any weight
    summary = train(disk, tmp_path, optim=still, validation={"every": 2}, tau={"anneal_steps": 4})
    assert (summary["ended"], summary["step"], summary["best"]["step"]) == ("early", 8, 2)
    again = train(disk, tmp_path, optim=still, validation={"every": 2}, tau={"anneal_steps": 4}, resume=True)
    assert (again["ended"], again["step"]) == ("early", 8)


@pytest.mark.parametrize("choose_by", ["hard", "throttled"])
def test_the_best_weights_are_chosen_as_asked(choose_by: str, disk: Path, tmp_path: Path) -> None:
    summary = train(disk, tmp_path, optim={"lr": 0.03}, validation={"every": 1, "choose_by": choose_by})
    checked = records(tmp_path, "validation")
    assert summary["best"][choose_by] == min(record[choose_by] for record in checked)


def test_the_bridge_trains_through_shorter_sequences(disk: Path, tmp_path: Path) -> None:
    harder = {"tau": {"start": 2.0, "end": 1e-3, "anneal_steps": 0.5}, "optim": {"lr": 0.03}, "remove_below": 0.0}
    train(disk, tmp_path / "paper", **harder)
    train(disk, tmp_path / "bridge", **{**harder, "recipe": "bridge", "remove_below": 1e-3})
    paper, bridge = (records(tmp_path / name, "validation")[-1] for name in ("paper", "bridge"))
    assert abs(bridge["gap"]) < 1e-3 < abs(paper["gap"])  # at the end the two operators are one


def test_mixed_precision_trains_float32_weights(disk: Path, tmp_path: Path) -> None:
    AcceleratorState._reset_state()  # of other tests
    for precision in ("float32", "bfloat16", "float32"):  # one after the other in one process
        train(disk, tmp_path / str(len(list(tmp_path.iterdir()))), optim={"precision": precision, "steps": 2})
    whole, half, again = (load_file(tmp_path / name / "model.safetensors") for name in "012")
    assert {value.dtype for value in half.values()} == {torch.float32}
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    assert any(not torch.equal(whole[key], half[key]) for key in whole)


# --- rows that cannot be used -----------------------------------------------------------------------------------------


def damage(folder: Path, *numbers: int) -> Path:
    runs.save_pictures(folder)
    for number in numbers:
        (folder / f"{number}.png").write_bytes(b"")
    return folder


def test_broken_rows_are_skipped_counted_and_listed(disk: Path, tmp_path: Path) -> None:
    data = damage(tmp_path / "data", 3, 5, 7)
    out = tmp_path / "out"
    summary = train(
        disk, out, data={"name": str(data), "max_broken": 0.5}, optim={"batch_size": 1, "accumulate": 4, "steps": 6}
    )
    listed = [json.loads(line) for line in (out / "broken.jsonl").read_text().splitlines()]
    assert summary["broken"] == len(listed) and {entry["row"] for entry in listed} == {3, 5, 7}
    assert "is empty" in listed[0]["reason"] and len(runs.losses(out)) == 6


def test_a_broken_row_counts_once_however_often_it_is_read(tmp_path: Path) -> None:
    state, data = RunState(), DataConfig(name="x", max_broken=0.5)
    for _ in range(3):
        note_broken(tmp_path, state, [Broken(5, "it is empty")], data=data, read=4, write=True)
    assert state.broken == [{"row": 5, "reason": "it is empty"}]
    assert len((tmp_path / "broken.jsonl").read_text().splitlines()) == 1


def test_texts_that_make_no_prompt_of_this_model_are_broken_rows(disk: Path, tmp_path: Path) -> None:
    data = runs.save_pictures(tmp_path / "data")
    listing = next(data.glob("*.jsonl"))
    rows = [json.loads(line) for line in listing.read_text().splitlines()]
    rows[2]["caption"], rows[4]["caption"] = "a <image> of nothing", "word " * 60
    rows[6]["caption"] = "half a pair \ud800"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    assert DataConfig(name="x").max_words == 4096
    limits = {"max_broken": 0.5, "max_words": 50}
    train(disk, out, data={"name": str(data), **limits}, optim={"batch_size": 4, "steps": 10})
    reasons = {
        entry["row"]: entry["reason"] for entry in map(json.loads, (out / "broken.jsonl").read_text().splitlines())
    }
    assert (
        "stands for a picture" in reasons[2]
        and "words, more than data.max_words" in reasons[4]
        and "surrogate" in reasons[6]
    )


def test_more_than_one_broken_row_in_a_hundred_stops_the_run(disk: Path, tmp_path: Path) -> None:
    data = damage(tmp_path / "data", *range(3, 9))
    with pytest.raises(
        ValueError,
        match=r"cannot be used, more than 1 % of the 24 this run reads .data.max_broken.; the first is row \d",
    ):
        train(disk, tmp_path / "out", data={"name": str(data)})
    assert (tmp_path / "out" / "broken.jsonl").is_file()


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(disk: Path, out: Path, message: str, **changes: Any) -> None:
    with pytest.raises(ValueError) as error:
        train(disk, out, **changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_folder_with_another_run_is_refused_and_a_changed_config_is_shown(disk: Path, tmp_path: Path) -> None:
    train(disk, tmp_path, optim={"steps": 1})
    refused(disk, tmp_path, "holds this run already; go on with --resume", optim={"steps": 1})
    refused(disk, tmp_path, "holds another run (optim.steps: 1 -> 2; seed: 42 -> 1)", optim={"steps": 2}, seed=1)
    refused(disk, tmp_path, "was started with another config (budget.keep: 4 -> 5)", optim={"steps": 1},
            budget={"keep": 5}, resume=True)  # fmt: skip
    (tmp_path / "run.yaml").unlink()
    refused(disk, tmp_path, "holds a saved model or pruner already", optim={"steps": 1})


def test_a_run_beside_another_in_its_folder_is_refused(disk: Path, tmp_path: Path) -> None:
    with alone_in(tmp_path):
        refused(disk, tmp_path, "another run is writing into", optim={"steps": 1})
    assert not (tmp_path / "run.yaml").exists()


def test_a_folder_of_an_earlier_version_goes_on(disk: Path, tmp_path: Path) -> None:
    train(disk, tmp_path, optim={"steps": 1})
    written = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(written + "hardness: 0.0\nhardness_ramp: 1.0\n")  # settings that did nothing
    state = next(tmp_path.glob("checkpoint-*/state.json"))
    keys = {"step", "best", "random", "waited", "skipped", "skipped_last", "broken", "early", "warned", "seconds"}
    assert set(json.loads(state.read_text())["state"]) == keys | {
        "batch",
        "base",
        "steps",
        "anneal_steps",
        "warmup_steps",
    }
    content = json.loads(state.read_text())
    del content["state_digest"]
    content["state"]["base"] = content["state"]["base"].partition(" ")[0]  # of samples alone, as it once was
    state.write_text(json.dumps(content))
    assert train(disk, tmp_path, optim={"steps": 1}, resume=True)["ended"] == "finished"
    (tmp_path / "run.yaml").write_text(written + "hardness: 2.0\nhardness_ramp: 1.0\n")
    refused(disk, tmp_path, "hardness is 2.0: the hardness loss is no longer there", optim={"steps": 1}, resume=True)


def test_a_run_that_fails_before_its_first_checkpoint_leaves_its_folder_free(disk: Path, tmp_path: Path) -> None:
    refused(disk, tmp_path, "has no option 'noize'", method={"name": "diffprune", "noize": "unit"})
    assert not (tmp_path / "run.yaml").exists()
    data = damage(tmp_path / "data", *range(3, 9))
    refused(disk, tmp_path / "out", "more than 1 % of the 24", data={"name": str(data)})
    train(disk, tmp_path / "out", optim={"steps": 1})  # the corrected one, into the same folder
    assert (tmp_path / "out" / "run.yaml").is_file()


def test_a_full_disk_at_the_end_says_what_is_whole_and_the_run_can_be_ended_later(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:  # a mock: a disk of one's own to fill cannot be had
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(PrunedVLM, "save_pretrained", full)
        sentence = (
            r"^the trained pruner cannot be written \(No space .*checkpoint-000001 is whole: make room in .*resume"
        )
        with pytest.raises(OSError, match=sentence):
            train(disk, tmp_path, optim={"steps": 1})
    train(disk, tmp_path, optim={"steps": 1}, resume=True)
    assert (tmp_path / "model.safetensors").is_file()
    monkeypatch.setattr(folder_module, "write_text", full)
    with pytest.raises(OSError, match=r"^broken.jsonl cannot be written"):
        folder_module.write_broken(tmp_path, [])
    with pytest.raises(OSError, match=r"^run.yaml cannot be written \(No space .*make room in .* and start again$"):
        train(disk, tmp_path / "new")
    with pytest.raises(
        OSError, match=r"^run.yaml cannot be written \(No space .*checkpoint-000001 is whole: .*resume$"
    ):
        train(disk, tmp_path, optim={"steps": 2}, resume=True)
    with pytest.raises(ValueError, match=r"run.yaml/x cannot be a run's folder \(Not a directory\); choose another"):
        train(disk, tmp_path / "run.yaml" / "x")


def test_a_run_goes_on_with_its_global_batch_cut_another_way(disk: Path, tmp_path: Path) -> None:
    """As more or fewer processes cut it; sums come in another order then, so the losses agree to 1e-5."""
    same = {"saving": {"keep": 9}, "budget": {"keep": None, "range": [2, 8]}}
    best, expected = train(disk, tmp_path, **same)["best"], runs.losses(tmp_path)
    runs.forget_after(tmp_path, 2)
    written = (tmp_path / "run.yaml").read_bytes()
    refused(disk, tmp_path, "set optim.accumulate=4", optim={"batch_size": 1}, resume=True, **same)
    assert (tmp_path / "run.yaml").read_bytes() == written
    again = train(disk, tmp_path, optim={"batch_size": 1, "accumulate": 4}, resume=True, **same)
    found = runs.losses(tmp_path)
    assert found[:2] == expected[:2] and found != expected and found == pytest.approx(expected, rel=1e-5)
    assert again["best"] == pytest.approx(best, rel=1e-4, abs=1e-6)
    assert "batch_size: 1" in (tmp_path / "run.yaml").read_text()  # what the next --resume takes


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        ({"batch_size": 1}, "4 samples a step, and optim.batch_size=1 .* would be 2; set optim.accumulate=4"),
        ({"accumulate": 1}, "4 samples a step, .* optim.accumulate=1 .* 1 process would be 2; set optim.accumulate=2"),
        ({"batch_size": 3}, "4 samples a step, .* would be 6; set optim.batch_size and optim.accumulate to that"),
        ({"batch_size": 8}, "4 samples a step, .* would be 16; set optim.batch_size and optim.accumulate to that"),
    ],
)
def test_another_global_batch_is_no_way_to_resume(cut: dict[str, int], sentence: str) -> None:
    optim = replace(OptimConfig(batch_size=2, accumulate=2), **cut)
    with pytest.raises(ValueError, match=f"^the run was started with {sentence}$"):
        folder_module.RunState(batch=4).require_batch(optim, 1)


def test_a_config_for_another_backbone_is_refused(disk: Path, tmp_path: Path) -> None:
    refused(disk, tmp_path / "a", "is for qwen2_5_vl (qwen2.5-vl-7b) and", backbone={"name": "qwen2.5-vl-7b"})
    refused(disk, tmp_path / "b", "backbone.name is 'lava'; choose a family", backbone={"name": "lava"})
    refused(disk, tmp_path / "c", "backbone.weights is missing", backbone={"name": "llava", "weights": None})
    refused(disk, tmp_path / "d", "is neither a folder with a model nor", backbone={"weights": str(tmp_path / "no")})


def test_the_hub_is_asked_once_and_not_where_the_model_is_here(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def nobody(url: str) -> None:
        asked.append(url)
        raise ConnectionError("nobody answers")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", nobody)
    sentence = "backbone.weights='owner/model' is neither a folder with a model nor a model id of the hub that can be "
    refused(disk, tmp_path, sentence + "reached (nobody answers)", backbone={"weights": "owner/model"})
    assert len(asked) == 1
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *file, revision: "config.json")
    ask_hub_once("owner/model", None, "")
    assert len(asked) == 1


@pytest.mark.parametrize("family", [family for family in BACKBONES.names() if family not in ("deit", "llava")])
def test_every_family_is_trained_by_a_share(
    family: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = tiny.build(family)
    monkeypatch.setattr(trainer_module, "load_frozen", lambda config, device: (model, processor, ""))
    short = {"batch_size": 1, "accumulate": 1, "steps": 1}
    train(disk, tmp_path, budget={"keep": 0.3333}, optim=short, data={"validation": 1})
    loaded = PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)
    assert loaded.budget.keep == 0.3333 and loaded.backbone.family == family


def test_seven_billion_parameters_need_a_gpu(disk: Path, tmp_path: Path) -> None:
    from diffprune.shapes import SHAPES

    described, _ = SHAPES["llava-1.5-7b"](False)
    described.save_pretrained(tmp_path / "seven")
    big = {"weights": str(tmp_path / "seven"), "dtype": "bfloat16"}
    sentence = "has 7.1 billion parameters and there is no GPU to run it on: training needs one with 13 GiB"
    refused(disk, tmp_path / "out", sentence, backbone=big)


def test_a_run_that_cannot_learn_or_end_is_refused(disk: Path, tmp_path: Path) -> None:
    refused(disk, tmp_path / "a", "method 'random' has nothing to train", method={"name": "random"})
    doors.join(doors.DATA, "endless", "tests.train.runs:Endless")
    refused(disk, tmp_path / "b", "there is no end of endless", data={"name": "endless"}, optim={"steps": None})
    refused(disk, tmp_path / "c", "fewer than one global batch of 40", optim={"batch_size": 20, "steps": None})
    refused(disk, tmp_path / "d", "has no option 'noize'", method={"name": "diffprune", "noize": "unit"})


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"name": "diffprune-diverse"}, "it chooses by the weights of 'diffprune'; train that one"),
        ({"name": "random"}, "method 'random' has nothing to train"),
        ({"name": "diffprune", "noize": "unit"}, "has no option 'noize'"),
        ({"name": "diffprun"}, "did you mean diffprune"),
    ],
)
def test_a_method_that_cannot_learn_is_refused_before_the_model_is_loaded(
    method: dict[str, str], sentence: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffprune.train.trainer.load_frozen", None)
    refused(disk, tmp_path, sentence, method=method)


@pytest.mark.parametrize("name", ["p_mod", "oc_vtp"])
def test_a_recipe_that_removes_is_refused_before_the_model_is_loaded(
    name: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffprune.train.trainer.load_frozen", None)
    sentence = "remove_below=0.001 is for choices before the language model that learn from its loss; set it to 0"
    refused(disk, tmp_path, sentence, method={"name": name}, recipe="bridge")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tau": {"anneal_steps": 2000}}, "tau.anneal_steps is 2,000 and the run has 1 steps"),
        (
            {"optim": {"warmup": 10}},
            "optim.warmup is 10 and the run has 1 steps: its learning rate ends at 0.0003 instead",
        ),
        ({"optim": {"warmup": 1}}, ""),
    ],
)
def test_a_schedule_beyond_the_end_of_the_run_is_warned_of(
    changes: dict[str, Any], said: str, disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(runs.values(disk / "model", disk / "data", **changes), ["optim.steps=1", "data.validation=0"])
    train_pruner(config, tmp_path)
    assert said in (shown := capsys.readouterr().err)
    assert ("warning:" in shown) == bool(said)
