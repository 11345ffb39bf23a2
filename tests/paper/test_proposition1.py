"""Proposition 1: backpropagation gives the gradient of the loss that was executed; a straight-through estimator's
does not.

The whole path is run in float64 with its noise held fixed: scorer, soft top-k, noise gate, block, a small frozen head.
Autograd's derivative along random directions of the scorer's weights is compared with central differences.
"""

import pytest
import torch
from torch import Tensor

from diffprune.methods.base import TrainablePruner
from diffprune.types import VisualTokens
from tests.methods.examples import make_method, make_tokens

STEP = 2e-6


def fixed_loss(method: TrainablePruner, tau: float) -> Tensor:
    """The loss for fixed data and fixed noise: a frozen reader of all tokens, as the language model is."""
    example = make_tokens()
    tokens = VisualTokens(x=example.x.double(), mask=example.mask)
    noise = torch.Generator().manual_seed(3)
    x = method.restrict(tokens, torch.tensor([4, 3, 2]), tau=tau, generator=noise).x
    reader = torch.randn(16, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    read = (x @ reader).tanh().where(tokens.mask[..., None], 0.0).sum(1)  # [B, 5]
    return torch.nn.functional.cross_entropy(read, torch.tensor([0, 3, 1]))


def both_derivatives(method: TrainablePruner, tau: float, seed: int) -> tuple[float, float]:
    """The loss's derivative along one random direction of the scorer's weights: autograd's, and what the loss does."""
    weights = list(method.scorer.parameters())  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(seed)
    direction = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in weights]
    gradient = torch.autograd.grad(fixed_loss(method, tau), weights)
    claimed = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
    values = []
    with torch.no_grad():
        for move in (1, -2, 1):  # forth by one step, back by two, and home
            for weight, way in zip(weights, direction, strict=True):
                weight += move * STEP * way
            values.append(float(fixed_loss(method, tau)))
    return claimed, (values[0] - values[1]) / (2 * STEP)


def double_method(name: str, **options: object) -> TrainablePruner:
    method = make_method(name, **options).double()
    assert isinstance(method, TrainablePruner)
    return method


@pytest.mark.parametrize(
    "options, tau",
    [
        ({}, 2.0),
        ({}, 0.3),
        ({"response": "sigmoid"}, 0.3),
        ({"standardise": True}, 0.3),
        ({"kept_exact": True}, 0.3),
        ({"gate": "scale"}, 0.3),
        ({"attention": "global"}, 0.3),
        ({"scorer": "bilinear"}, 0.3),
    ],
    ids=str,
)
def test_diffprune_s_gradient_is_that_of_its_own_loss(options: dict[str, object], tau: float) -> None:
    method = double_method("diffprune", **options)
    for seed in range(2):
        claimed, true = both_derivatives(method, tau, seed)
        print(f"DiffPrune {options} tau={tau}: autograd {claimed:+.8f}, central difference {true:+.8f}")
        assert claimed == pytest.approx(true, rel=1e-5, abs=1e-7)
        assert abs(true) > 1e-6  # there is a slope to compare


@pytest.mark.parametrize("tau", [2.0, 0.5])
def test_gumbel_ste_s_gradient_is_not_that_of_its_own_loss(tau: float) -> None:
    method = double_method("gumbel_ste")
    for seed in range(2):
        claimed, true = both_derivatives(method, tau, seed)
        print(f"Gumbel-STE tau={tau}: autograd {claimed:+.8f}, central difference {true:+.8f}")
        assert true == 0.0  # a hard choice is flat between its jumps
        assert abs(claimed) > 1e-3
