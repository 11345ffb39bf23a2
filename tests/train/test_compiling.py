"""Compiled decoder layers, lengths filled up to a multiple, and records that are read a step late change no loss."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from diffprune.config import make_config
from diffprune.model import PrunedVLM
from diffprune.train import loop, trainer
from diffprune.train.compiling import MULTIPLE, compiled
from diffprune.train.objective import Objective
from diffprune.train.run import train_pruner
from tests import tiny
from tests.train import runs
from tests.train.runs import losses, train

FAMILIES = ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of compiled layers; the compiler is stood in for, as what it makes of a layer is the slow test's."""
    made: list[int] = []

    def counting(call: Any, **options: Any) -> Any:
        assert options == {"dynamic": True}
        return lambda *inputs, **more: (made.append(1), call(*inputs, **more))[1]

    monkeypatch.setattr(torch, "compile", counting)
    return made


def pruned(family: str = "llava") -> tuple[PrunedVLM, Any]:
    vlm = PrunedVLM(*tiny.build(family), method="diffprune", keep=4)
    return vlm, vlm.prepare([tiny.picture(0), tiny.picture(1)], ["?", "what is in it?"], ["a", "a longer answer!"])


def test_layers_are_called_as_compiled_inside_and_as_they_were_behind(calls: list[int]) -> None:
    vlm, batch = pruned()
    layers = vlm.backbone.language_model.layers
    for enabled, expected in ((False, 0), (True, 1 + len(layers))):  # one of them tried first
        with compiled(vlm, enabled=enabled) as said:
            vlm.loss(batch, hard=True)
        assert len(calls) == expected and said == ""
    with pytest.raises(RuntimeError, match="inside"), compiled(vlm, enabled=True):
        raise RuntimeError("inside")
    calls.clear()
    vlm.loss(batch, hard=True)
    assert not calls and vlm.decoder.multiple == 1


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (True, r"cannot compile the decoder layers here \(no C compiler\); they run as they are"),
        (False, r"compiled decoder layers are off by \d.*they run as they are"),
    ],
)
def test_what_cannot_be_compiled_or_is_wrong_is_said_and_not_used(
    fails: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm, batch = pruned()
    expected = vlm.loss(batch, hard=True)

    def compile_badly(call: Any, **options: Any) -> Any:
        def run(*inputs: Any, **more: Any) -> Any:
            if fails:
                raise RuntimeError("no\n C compiler")
            return 1.01 * call(*inputs, **more)

        return run

    monkeypatch.setattr(torch, "compile", compile_badly)
    with compiled(vlm, enabled=True) as said:
        assert torch.equal(vlm.loss(batch, hard=True), expected) and vlm.decoder.multiple == 1
    monkeypatch.undo()
    assert re.search(words, said) and "\n" not in said


@pytest.mark.parametrize("family", FAMILIES)
def test_a_length_filled_up_to_a_multiple_changes_no_loss(family: str) -> None:
    vlm, batch = pruned(family)
    found: list[tuple[float, torch.Tensor]] = []
    widths: list[int] = []
    hook = vlm.backbone.language_model.layers[0].register_forward_pre_hook(
        lambda _, inputs: widths.append(inputs[0].shape[1])
    )
    for multiple in (1, MULTIPLE):
        vlm.method.zero_grad()
        vlm.decoder.multiple = multiple  # type: ignore[attr-defined]
        loss = vlm.loss(batch, tau=0.5, generator=torch.Generator().manual_seed(0))
        loss.backward()
        found.append((loss.item(), vlm.method.scorer.head.weight.grad.clone()))
    hook.remove()
    (plain, gradient), (filled, other) = found
    assert filled == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-6)
    assert widths[0] % MULTIPLE and widths[1] == -(-widths[0] // MULTIPLE) * MULTIPLE


def fifty_steps(tmp_path: Path, family: str, **optim: Any) -> list[float]:
    disk = tmp_path / family
    if not disk.exists():
        runs.save_model(disk / "model", family)
        runs.save_pictures(disk / "data")
    out = tmp_path / "-".join([family, *optim])
    backbone = {"name": family, "weights": str(disk / "model"), "dtype": "float32"}
    short = {"steps": 50, "batch_size": 1, "accumulate": 1, **optim}
    saving = {"every": 50, "tensorboard": False}
    config = runs.values(
        disk / "model", disk / "data", backbone=backbone, optim=short, data={"validation": 0}, saving=saving
    )
    train_pruner(make_config(config), out, quiet=True)
    return losses(out)


@pytest.mark.usefixtures("calls")
def test_fifty_steps_at_filled_up_lengths_have_the_same_losses(tmp_path: Path) -> None:
    assert fifty_steps(tmp_path, "llava", compile=True) == pytest.approx(fifty_steps(tmp_path, "llava"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps_of_compiled_layers_have_the_same_losses(family: str, tmp_path: Path) -> None:
    assert fifty_steps(tmp_path, family, compile=True) == pytest.approx(fifty_steps(tmp_path, family), rel=1e-3)


# --- records a step late ----------------------------------------------------------------------------------------------


def test_records_read_a_step_late_are_the_same(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(disk, tmp_path / "now")
    monkeypatch.setattr(trainer.Trainer, "ahead", 1)
    train(disk, tmp_path / "late")
    runs.forget_after(tmp_path / "late", 4)
    train(disk, tmp_path / "late", resume=True)

    def plain(folder: Path) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [
            {key: one[key] for key in one if key not in ("samples_s", "memory_gb", "seconds", "time")}
            for one in records
        ]

    assert plain(tmp_path / "late") == plain(tmp_path / "now")


def test_an_optimiser_of_one_kernel_leaves_a_bad_step_out_by_itself(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, weights = Objective.forward, []

    def spoiled(self: Any, samples: Any, step: Any, *rest: Any, **options: Any) -> Any:
        loss, entropy = forward(self, samples, step, *rest, **options)
        if isinstance(step, int):
            weights.append(self.method.scorer.head.weight.detach().clone())
        return (loss + (0 * loss).sqrt() if step == 2 else loss), entropy  # the same loss; its gradient is NaN

    def one_kernel(trained: Any, optim: Any) -> Any:
        return torch.optim.AdamW(trained, lr=optim.lr, weight_decay=optim.weight_decay, fused=True)

    monkeypatch.setattr(Objective, "forward", spoiled)
    monkeypatch.setattr(trainer, "make_optimizer", one_kernel)
    monkeypatch.setattr(trainer.Trainer, "ahead", 1)
    summary = train(disk, tmp_path, optim={"accumulate": 1, "batch_size": 4})
    assert (summary["ended"], summary["skipped"]) == ("finished", 1)
    assert not torch.equal(weights[1], weights[2]) and torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[3], weights[4])
    rates = [json.loads(line).get("lr") for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [rate for rate in rates if rate is not None].index(0) == 2


def test_ten_bad_steps_in_a_row_end_a_training_whose_records_come_late() -> None:
    progress, optim = (
        loop.Progress(),
        make_config({"backbone": {"name": "llava"}, "budget": {"keep": 1}, "data": {"name": "x"}}).optim,
    )
    for step in range(loop.MOST_SKIPPED - 1):
        assert loop.account(progress, optim, step=step, loss=1.0, norm=float("inf"), lr=1.0) == 0
    with pytest.raises(ValueError, match="the gradient is inf at step 9, as at the 9 steps before"):
        loop.account(progress, optim, step=9, loss=1.0, norm=float("inf"), lr=1.0)
    with pytest.raises(ValueError, match="the loss is nan at step 3"):
        loop.account(progress, optim, step=3, loss=float("nan"), norm=1.0, lr=1.0)
