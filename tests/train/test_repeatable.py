"""`deterministic: true`: the flags hold for the run and no longer, and the same weights come out twice."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from diffprune.train.objective import Objective
from diffprune.train.repeatable import WORKSPACE, repeatable
from tests.train.runs import train


def flags() -> tuple[bool, bool, str | None]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        os.environ.get(WORKSPACE[0]),
    )


@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_takes_repeatable_operations_where_asked_and_leaves_the_process_as_it_was(
    wanted: bool, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen, forward = flags(), [], Objective.forward
    monkeypatch.setattr(Objective, "forward", lambda *given, **more: (seen.append(flags()), forward(*given, **more))[1])
    train(disk, tmp_path / "out", deterministic=wanted, optim={"steps": 1})
    assert set(seen) == {(True, False, WORKSPACE[1]) if wanted else before} and flags() == before


@pytest.mark.parametrize("wanted", [False, True])
def test_cudnn_s_attention_is_off_inside_a_run_unless_it_is_to_be_repeatable(
    wanted: bool, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, forward = torch.backends.cuda.cudnn_sdp_enabled, Objective.forward
    seen: list[bool] = []
    monkeypatch.setattr(
        Objective, "forward", lambda *given, **more: (seen.append(allowed()), forward(*given, **more))[1]
    )
    before = allowed()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        train(disk, tmp_path / "out", deterministic=wanted, optim={"steps": 1})
        assert set(seen) == {wanted} and allowed()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_setting_of_the_user_s_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE[0], ":16:8")
    with pytest.raises(RuntimeError, match="inside"), repeatable(True):
        assert flags()[2] == ":16:8"
        raise RuntimeError("inside")
    assert flags()[2] == ":16:8" and not flags()[0]


def test_two_runs_with_one_seed_end_with_the_same_weights(disk: Path, tmp_path: Path) -> None:
    few: Any = {"optim": {"steps": 2}, "validation": {"every": 2}}
    for name in "ab":
        train(disk, tmp_path / name, deterministic=True, **few)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    train(disk, tmp_path / "c", deterministic=True, seed=7, **few)
    assert (tmp_path / "a/model.safetensors").read_bytes() != (tmp_path / "c/model.safetensors").read_bytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_too_and_every_operation_has_a_repeatable_form(disk: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*deterministic.*")
        for name in "ab":
            train(disk, tmp_path / name, deterministic=True)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
