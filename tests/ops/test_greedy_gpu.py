"""Greedy choices on a GPU: the kernels pick what the reference picks, wait for nothing, and can be captured."""

import logging
import sys

import pytest
import torch
from torch import Tensor

from diffprune.fast.graphs import Stage, waiting_refused
from diffprune.ops import (
    cosine_matrix,
    greedy_coverage,
    greedy_determinant,
    greedy_max_min,
    greedy_orthogonal,
    wide_cosines,
)
from diffprune.ops.on_gpu import load_kernels, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
# Tokens and rows of each draw: 8 draws of 25 rows, so 200 cases a rule. The last is split over programs.
SIZES = {7: 25, 40: 50, 200: 50, 576: 50, 1200: 25}
ROWS = 25
RULES = ("determinant", "diverse", "orthogonal", "orthogonal in half", "max_min", "coverage")


def draw_rows(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Whole numbers, so that every product is exact: features, which are alike in places, worth, budgets, and a mask.

    The first features come from fewer ones, by the index that is given as well.
    """
    generator = torch.Generator().manual_seed(seed)
    width = 16 if seed % 3 == 0 else 96  # the first has a small rank
    base = torch.randint(-9, 10, (ROWS, num_tokens, width), generator=generator)
    same = torch.arange(num_tokens).repeat(ROWS, 1)
    if seed % 2:
        same = torch.randint(0, max(1, num_tokens * 2 // 3), (ROWS, num_tokens), generator=generator)
    worth = torch.randint(-8, 9, (ROWS, num_tokens), generator=generator).gather(1, same) / 4
    counts = torch.randint(1, num_tokens + 1, (ROWS,), generator=generator)
    counts[::2] = num_tokens
    budgets = torch.minimum(torch.randint(0, min(num_tokens, 96) + 1, (ROWS,), generator=generator), counts)
    mask = torch.arange(num_tokens) < counts[:, None]
    return base.double().to(DEVICE), same.to(DEVICE), worth.to(DEVICE), budgets.to(DEVICE), mask.to(DEVICE)


def gathered(base: Tensor, same: Tensor) -> Tensor:
    return base.gather(1, same.unsqueeze(-1).expand_as(base))


def run(rule: str, x: Tensor, worth: Tensor, k: int | Tensor, mask: Tensor | None) -> Tensor:
    if rule == "determinant":
        return greedy_determinant(x @ x.transpose(1, 2), k, mask)
    if rule == "diverse":
        return greedy_determinant(x @ x.transpose(1, 2), k, mask, worth=worth.to(x.dtype))
    if rule.startswith("orthogonal"):
        return greedy_orthogonal(x.half() if "half" in rule and x.dtype == torch.float32 else x, k, mask)
    square = x.square().sum(-1)
    if rule == "max_min":
        return greedy_max_min(square.unsqueeze(2) + square.unsqueeze(1) - 2 * x @ x.transpose(1, 2), k, mask)
    similarity = (x @ x.transpose(1, 2)).clamp(min=0) / 1024
    return greedy_coverage(similarity if mask is None else similarity.masked_fill(~mask[..., None], 0), k, mask)


def decided_rows(rule: str, base: Tensor, same: Tensor, worth: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Rows whose choice in float64 stays the same where all features are a little longer or shorter.

    Minima, maxima and sums of such numbers are exact, so those rules are decided everywhere.
    """
    if rule in ("max_min", "coverage"):
        return torch.ones(len(base), dtype=torch.bool, device=base.device)
    generator = torch.Generator().manual_seed(0)
    wanted, decided = run(rule, gathered(base, same), worth, k, mask), True
    for _ in range(3):
        noise = 1e-5 * torch.randn(base.shape[:2], generator=generator).to(base).unsqueeze(-1)
        decided = decided & (run(rule, gathered(base * (1 + noise), same), worth, k, mask) == wanted).all(-1)
    return torch.as_tensor(decided)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_the_kernels_pick_what_the_reference_picks(rule: str, num_tokens: int) -> None:
    compared, seed = 0, 0
    while compared < SIZES[num_tokens]:
        base, same, worth, k, mask = draw_rows(num_tokens, seed)
        seed += 1
        assert seed < 40, "hardly a row is decided"
        rows = decided_rows(rule, base, same, worth, k, mask)
        x = gathered(base, same).float()
        with reference():
            wanted = run(rule, x, worth, k, mask)
        found = run(rule, x, worth, k, mask)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert torch.equal(found[rows], wanted[rows])
        compared += int(rows.sum())


@pytest.mark.parametrize("rule", RULES)
def test_rows_without_padding_and_one_budget_give_the_same(rule: str) -> None:
    for num_tokens in (64, 1200):
        base, _, worth, _, mask = draw_rows(num_tokens, 2)
        x, budgets = base.float(), torch.full((ROWS,), 24, device=DEVICE)
        plain = run(rule, x, worth, 24, None)
        assert torch.equal(plain, run(rule, x, worth, budgets, torch.ones_like(mask)))
        assert torch.equal(plain[3:4], run(rule, x[3:4], worth[3:4], 24, None))  # whatever else is in the batch


@pytest.mark.parametrize("rule", RULES)
def test_more_than_the_rank_is_kept_by_worth_or_length(rule: str) -> None:
    base, _, worth, _, _ = draw_rows(40, 1)
    x = base[..., :3].float()
    keep = run(rule, x, worth, 40, None)
    assert torch.equal(keep, torch.arange(40, device=DEVICE).expand(ROWS, -1))
    with reference():
        assert torch.equal(run(rule, x, worth, 0, None), keep[:, :0])
    assert run(rule, x, worth, 0, None).shape == (ROWS, 0)


@pytest.mark.parametrize("num_tokens", [576, 1200])  # not a loop: an older graph that dies in a capture ends it
@pytest.mark.parametrize("rule", RULES)
def test_nothing_waits_for_the_device_and_a_graph_gives_the_same(rule: str, num_tokens: int) -> None:
    base, _, worth, _, _ = draw_rows(num_tokens, 4)
    x = base.float()
    wanted = run(rule, x, worth, 16, None)
    with waiting_refused():
        run(rule, x, worth, 16, None)
    found = torch.empty_like(wanted)

    def pick() -> None:
        found.copy_(run(rule, x, worth, 16, None))

    stage = Stage(pick, capture=True)
    stage.warm_up()
    found.zero_()
    stage()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rule", RULES)
def test_nan_stays_within_its_row(rule: str) -> None:
    for num_tokens in (40, 1200):
        base, _, worth, _, _ = draw_rows(num_tokens, 6)
        x = base.float()
        wanted = run(rule, x, worth, 8, None)
        x[1, ::3] = torch.nan
        found = run(rule, x, worth, 8, None)
        others = torch.arange(ROWS, device=DEVICE) != 1
        assert torch.equal(found[others], wanted[others])
        assert ((found >= -1) & (found < num_tokens)).all()


def test_half_precision_is_multiplied_in_full() -> None:
    x = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    x[0, 5] = 0
    found, wanted = wide_cosines(x), cosine_matrix(x.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)
    distance = (1 - wanted).half()
    with reference():
        expected = greedy_max_min(distance, 40)
    assert torch.equal(greedy_max_min(distance, 40), expected)


def test_a_gpu_without_triton_falls_back_and_says_so_once(monkeypatch, caplog) -> None:
    base, _, worth, _, _ = draw_rows(40, 2)
    wanted = run("max_min", base.float(), worth, 8, None)
    load_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "diffprune.ops.greedy_kernels", None)
    monkeypatch.delattr("diffprune.ops.greedy_kernels", raising=False)
    try:
        with caplog.at_level(logging.WARNING, logger="diffprune"):
            for _ in range(2):
                assert torch.equal(run("max_min", base.float(), worth, 8, None), wanted)
    finally:
        load_kernels.cache_clear()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "greedy choices run step by step on this GPU"
    ]
