"""One budget for all images, known beforehand: the same choice, without a look at the device."""

import dataclasses

import pytest
import torch

from diffprune.fast.graphs import waiting_refused
from diffprune.methods.base import LayerPruner, MergingPruner, ScoringPruner
from diffprune.registry import METHODS
from diffprune.types import VisualTokens
from tests.methods.examples import make_method, make_tokens
from tests.methods.looks import LooksRefused, never_looking

NAMES = [name for name in METHODS.names() if not issubclass(METHODS.get(name), LayerPruner)]
# These look at their own intermediate results, or draw on the CPU.
WAITING = {"agilepruner", "full", "random"}


def without_mask(tokens: VisualTokens) -> VisualTokens:
    """These tokens, all of them real, as a backbone without padding gives them."""
    given = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    return VisualTokens(**{name: value for name, value in given.items() if name not in ("mask", "made_mask")})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 4, 5])
def test_one_number_for_all_is_that_number_for_each(name: str, k: int) -> None:
    method = make_method(name)
    for tokens in (make_tokens((12, 10, 6)), without_mask(make_tokens((12, 12)))):
        each = torch.full((len(tokens),), k)
        assert torch.equal(method.select(tokens, k), method.select(tokens, each))
        if isinstance(method, MergingPruner):
            torch.testing.assert_close(method.reduce(tokens, k).x, method.reduce(tokens, each).x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 5, 12])
def test_tokens_without_a_mask_are_tokens_with_a_mask_of_ones(name: str, k: int) -> None:
    method, tokens = make_method(name), make_tokens((12, 12))
    assert without_mask(tokens).is_full and not tokens.is_full
    assert torch.equal(method.select(without_mask(tokens), k), method.select(tokens, k))


@pytest.mark.parametrize("crops", [1, 5, 7, 12])
def test_runs_that_do_not_divide_evenly_are_the_same_either_way(crops: int) -> None:
    method, tokens = make_method("holov", crops=crops), make_tokens((12, 12))
    assert torch.equal(method.select(without_mask(tokens), 5), method.select(tokens, 5))


def test_a_new_mask_may_hold_padding_again() -> None:
    tokens = without_mask(make_tokens((12, 12)))
    assert tokens.padding_mask is None
    masked = dataclasses.replace(tokens, mask=torch.arange(12).expand(2, -1) < 6)
    assert not masked.is_full and masked.padding_mask is masked.mask
    assert tokens.take([1]).is_full and not masked.take([1]).is_full


@pytest.mark.parametrize("name", [name for name in NAMES if issubclass(METHODS.get(name), ScoringPruner)])
def test_a_choice_comes_with_the_scores_it_went_by(name: str) -> None:
    method, tokens = make_method(name), make_tokens()
    assert isinstance(method, ScoringPruner)
    keep, logits = method.choose(tokens, torch.tensor([4, 3, 2]))
    assert torch.equal(keep, method.select(tokens, torch.tensor([4, 3, 2])))
    assert logits is not None and torch.equal(logits, method.score(tokens))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WAITING])
def test_nothing_looks_at_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, tokens = make_method(name), without_mask(make_tokens((12, 12)))
    with torch.inference_mode():
        expected = method.select(tokens, 5)  # tables that are kept are made once
        with never_looking(monkeypatch):
            keep = method.select(tokens, 5)
    assert torch.equal(keep, expected)


@pytest.mark.parametrize("name", ["agilepruner", "prunesid"])
def test_a_look_is_noticed(name: str) -> None:
    method, tokens = make_method(name), without_mask(make_tokens((12, 12)))
    with LooksRefused(), pytest.raises(RuntimeError, match="waits for the device"):
        method.select(tokens, 5)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_cuda(tokens: VisualTokens) -> VisualTokens:
    moved = {
        field.name: value.cuda()
        for field in dataclasses.fields(tokens)
        if isinstance(value := getattr(tokens, field.name), torch.Tensor)
    }
    return without_mask(dataclasses.replace(tokens, **moved))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_chooses_what_the_cpu_chooses(name: str) -> None:
    method, tokens = make_method(name), without_mask(make_tokens((12, 12)))
    expected = method.select(tokens, 5)
    assert torch.equal(method.cuda().select(on_cuda(tokens), 5).cpu(), expected)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WAITING])
def test_nothing_waits_for_the_device(name: str) -> None:
    method, tokens = make_method(name).cuda(), on_cuda(without_mask(make_tokens((12, 12))))
    with torch.inference_mode():
        method.select(tokens, 5)  # tables that are kept are made once
        with waiting_refused():
            method.select(tokens, 5)
