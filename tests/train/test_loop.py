"""The loop: a golden run, the schedules, and what it refuses."""

import math

import pytest
import torch
from torch import Tensor

from diffprune.config import OptimConfig, TauConfig
from diffprune.methods.diffprune import DiffPrune, DiffPruneOptions
from diffprune.nn import BlockSpec
from diffprune.train.loop import make_optimizer, train
from diffprune.types import VisualTokens

STEPS, NUM_TOKENS, WIDTH, CLASSES = 20, 12, 32, 4
PLAIN = DiffPruneOptions(standardise=False, kept_exact=False)  # as the golden run was recorded


class Riddle:
    """Images in which one token of twelve names the answer, and a frozen reader of all tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.names = torch.randn(CLASSES, WIDTH, generator=generator) * 0.75

    def batch(self, step: int) -> tuple[VisualTokens, Tensor, Tensor]:
        """Images, their answers, and the token that names each."""
        generator = torch.Generator().manual_seed(1000 + step)
        x = torch.randn(16, NUM_TOKENS, WIDTH, generator=generator)
        answer = torch.randint(0, CLASSES, (16,), generator=generator)
        place = torch.randint(0, NUM_TOKENS, (16,), generator=generator)
        x[torch.arange(16), place] = self.names[answer]
        return VisualTokens(x=x), answer, place

    def loss(self, method: DiffPrune, step: int, tau: float) -> Tensor:
        tokens, answer, _ = self.batch(step)
        noise = torch.Generator().manual_seed(2000 + step)
        x = method.restrict(tokens, torch.full((16,), 3), tau=tau, generator=noise).x
        read = (x @ self.names.T / WIDTH**0.5).logsumexp(1)
        return torch.nn.functional.cross_entropy(read, answer)


def run(**optim: object) -> tuple[list[float], DiffPrune]:
    torch.manual_seed(42)
    method = DiffPrune(PLAIN, block=BlockSpec(width=WIDTH, heads=4, mlp_width=64))
    riddle = Riddle()
    losses = train(
        method.parameters(),
        lambda step, tau: riddle.loss(method, step, tau),
        steps=STEPS,
        optim=OptimConfig(**({"lr": 3e-3} | optim)),
        tau=TauConfig(anneal_steps=0.8),
    )
    return losses, method


GOLDEN = [
    1.15039, 1.23138, 1.05299, 1.23288, 1.19287, 1.17643, 1.17211, 1.14530, 1.10084, 1.02138,
    0.87732, 0.73094, 0.56582, 0.51194, 0.42031, 0.34218, 0.37925, 0.38908, 0.34023, 0.35516,
]  # fmt: skip


def test_the_golden_run_is_reproduced() -> None:
    """A refactor that changes these numbers changes training; other processors differ in the last digits only."""
    losses, _ = run()
    assert losses == pytest.approx(GOLDEN, rel=1e-3)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_the_scorer_finds_the_token_that_names_the_answer() -> None:
    _, method = run()
    tokens, _, place = Riddle().batch(STEPS)  # images it has not seen
    keep = method.select(tokens, torch.full((16,), 3))
    assert (keep == place[:, None]).any(-1).float().mean() > 0.8  # a quarter would be chance


def test_frozen_weights_stay_and_the_others_move() -> None:
    torch.manual_seed(42)
    before = DiffPrune(PLAIN, block=BlockSpec(width=WIDTH, heads=4, mlp_width=64))
    _, after = run()
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        # A shift of all logits changes nothing, so the head's bias has no gradient.
        assert torch.equal(old, new) == (not old.requires_grad) or name == "scorer.head.bias", name


def test_both_schedules_are_followed() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    taus: list[float] = []

    def loss(step: int, tau: float) -> Tensor:
        taus.append(tau)
        return weight.sum()  # a constant slope: AdamW then moves by exactly the learning rate

    places: list[float] = []
    train(
        [weight],
        loss,
        steps=10,
        optim=OptimConfig(lr=0.1, warmup=2),
        tau=TauConfig(anneal_steps=5),
        on_step=lambda step, value: places.append(weight.item()),
    )
    assert taus[0] == 2.0 and taus[5:] == [0.1] * 5 and taus == sorted(taus, reverse=True)
    moves = [before - after for before, after in zip([0.0, *places], places, strict=False)]
    expected = [0.05, 0.1] + [0.1 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert moves == pytest.approx(expected, rel=1e-4)


def test_a_run_of_so_many_seconds_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    now = 0.0
    taus: list[float] = []

    def loss(step: int, tau: float) -> Tensor:
        nonlocal now
        now += 3.0 if step == 1 else 1.0  # the second step is slow
        taus.append(tau)
        return weight.sum()

    monkeypatch.setattr("diffprune.train.loop.time.perf_counter", lambda: now)
    losses = train([weight], loss, steps=1000, seconds=10.0, tau=TauConfig(anneal_steps=0.5))
    assert len(losses) == 8  # at 0, 1, 4, 5, ... 9 seconds
    assert taus[0] == 2.0 and taus[3:] == [0.1] * 5
    assert taus[1] == pytest.approx(0.1 + 0.95 * (1 + math.cos(math.pi / 5)))


def test_a_run_without_time_still_takes_one_step() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    assert len(train([weight], lambda step, tau: weight.sum(), steps=1000, seconds=1e-9)) == 1


@pytest.mark.parametrize("clip, moved", [(1.0, 1.0), (None, 100.0)])
def test_gradients_are_clipped_to_the_norm_that_is_asked_for(clip: float | None, moved: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    train([weight], lambda step, tau: 100 * weight.sum(), steps=1, optim=OptimConfig(clip=clip))
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(moved, rel=1e-4)


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"the loss is nan at step 3; lower optim\.lr"):
        train([weight], lambda step, tau: weight.sum() * (math.nan if step == 3 else 1.0), steps=5)


def _without_gradient(weight: Tensor) -> Tensor:
    """1, with a gradient that is NaN."""
    return 1 + (0 * weight.sum()).sqrt()


def test_a_step_whose_gradient_is_not_finite_is_not_taken() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    places: list[float] = []

    def loss(step: int, tau: float) -> Tensor:
        return _without_gradient(weight) if step % 2 else weight.sum()

    losses = train([weight], loss, steps=25, on_step=lambda step, value: places.append(weight.item()))
    assert losses[1] == losses[3] == 1
    assert places[1] == places[0] and places[3] == places[2] and places[4] < places[2] < places[0] < 1
    assert len(losses) == 25  # twelve were not taken, never two in a row


@pytest.mark.parametrize("clip", [1.0, None])
def test_gradients_that_are_never_finite_stop_the_run(clip: float | None) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"the gradient is nan at step 9, as at the 9 steps before it; start anew"):
        train([weight], lambda step, tau: _without_gradient(weight), steps=20, optim=OptimConfig(clip=clip))
    assert weight.item() == 1


def test_a_run_with_nothing_to_train_is_refused() -> None:
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ValueError, match="nothing to train"):
        train([frozen], lambda step, tau: frozen.sum(), steps=1)


def test_weight_decay_shrinks_weights_beside_their_gradient() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
    optimizer = make_optimizer([weight], OptimConfig(lr=0.1, weight_decay=0.5))
    weight.grad = torch.zeros(2)
    optimizer.step()
    assert weight.tolist() == pytest.approx([2.0 * 0.95, -3.0 * 0.95])
    losses = {decay: run(weight_decay=decay)[0] for decay in (0.0, 5.0)}
    assert losses[0.0] == pytest.approx(GOLDEN, rel=1e-3) and losses[5.0][-1] != pytest.approx(GOLDEN[-1], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_adamw_is_one_kernel_and_steps_as_on_a_cpu() -> None:
    stepped = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.tensor([2.0, -3.0], device=device))
        optimizer = make_optimizer([weight], OptimConfig(lr=0.1, weight_decay=0.5))
        assert optimizer.defaults["fused"] is (device == "cuda")
        weight.grad = torch.tensor([0.3, -0.1], device=device)
        optimizer.step()
        stepped.append(weight.tolist())
    assert stepped[1] == pytest.approx(stepped[0])
