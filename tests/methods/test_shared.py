"""What methods that rank by attention or merge promise beyond the contract."""

import dataclasses

import pytest
import torch

from diffprune.methods._key_metric import key_metric
from diffprune.methods.base import MergingPruner
from diffprune.types import VisualTokens
from tests.methods.examples import SPEC, kept, make_method, make_tokens, one_image

NAMES = ("visionzip", "holov", "prunesid", "vispruner", "agilepruner", "fastervlm", "tome", "average_pool")


def test_keys_as_wide_as_the_block_are_averaged_over_its_heads() -> None:
    keys = torch.arange(32.0).view(1, 2, 16)
    wide, narrow = (
        VisualTokens(x=torch.zeros(1, 2, 4), keys=keys),
        VisualTokens(x=torch.zeros(1, 2, 4), keys=keys[..., :8]),
    )
    torch.testing.assert_close(key_metric(wide, "tome", SPEC)[0, 0], torch.arange(8.0) + 4)
    assert torch.equal(key_metric(narrow, "tome", SPEC), keys[..., :8])
    assert torch.equal(key_metric(wide, "tome", None), keys)  # another width than the features': averaged already
    assert torch.equal(key_metric(wide, "tome", None, 2), key_metric(wide, "tome", SPEC))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), -1e4])
def test_padding_may_hold_anything(name: str, filler: float) -> None:
    method, k = make_method(name), torch.tensor([5, 4, 3])
    expected = method.select(make_tokens(), k)
    assert torch.equal(method.select(make_tokens(filler=filler), k), expected)
    if isinstance(method, MergingPruner):
        assert method.reduce(make_tokens(filler=filler), k).x.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_past_the_tokens_is_refused_by_its_number(name: str) -> None:
    with pytest.raises(ValueError, match="k=7 in row 2 is not between 0 and its 6 real tokens"):
        make_method(name).select(make_tokens(), torch.tensor([7, 7, 7]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_taken_and_given_back(name: str, dtype: torch.dtype) -> None:
    tokens = make_tokens()
    assert tokens.cls_attention is not None and tokens.keys is not None
    tokens = dataclasses.replace(
        tokens, x=tokens.x.to(dtype), cls_attention=tokens.cls_attention.to(dtype), keys=tokens.keys.to(dtype)
    )
    method, k = make_method(name), torch.tensor([5, 4, 3])
    assert [len(row) for row in kept(method.select(tokens, k))] == [5, 4, 3]
    if isinstance(method, MergingPruner):
        assert method.reduce(tokens, k).x.dtype == dtype


@pytest.mark.parametrize("name", ["visionzip", "tome", "average_pool"])
def test_merging_everything_kept_changes_nothing(name: str) -> None:
    method, tokens = make_method(name), make_tokens()
    assert isinstance(method, MergingPruner)
    merged = method.reduce(tokens, tokens.counts)
    assert torch.equal(merged.x[tokens.mask], tokens.x[tokens.mask])


@pytest.mark.parametrize("name", ["visionzip", "tome", "average_pool"])
def test_a_batch_merges_as_its_images_do_one_by_one(name: str) -> None:
    method, tokens, budget = make_method(name), make_tokens(), (7, 3, 2)
    assert isinstance(method, MergingPruner)
    together = method.reduce(tokens, torch.tensor(budget))
    for row, k in enumerate(budget):
        alone = method.reduce(one_image(tokens, row), torch.tensor([k]))
        torch.testing.assert_close(together.x[row, :k], alone.x[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(together.x[row, k:], torch.zeros_like(together.x[row, k:]))


@pytest.mark.parametrize("name", ["visionzip", "holov", "prunesid", "vispruner", "agilepruner"])
def test_a_method_that_ranks_by_attention_asks_for_it(name: str) -> None:
    tokens = dataclasses.replace(make_tokens(), cls_attention=None)
    with pytest.raises(ValueError, match=rf"{name} reads VisualTokens\.cls_attention"):
        make_method(name).select(tokens, torch.tensor([3, 3, 3]))


@pytest.mark.parametrize("name", ["visionzip", "holov", "prunesid", "vispruner", "tome"])
def test_the_native_choice_of_a_batch_is_that_of_its_images(name: str) -> None:
    drawn = {"components": "exact"} if name == "prunesid" else {}  # its release draws them for each batch anew
    method, tokens, budget = make_method(name, native=True, **drawn), make_tokens(), (9, 7, 4)
    together = kept(method.select(tokens, torch.tensor(budget)))
    in_place = kept(method.choose(tokens, torch.tensor(budget)).keep)
    assert in_place == [sorted(row) for row in together]
    assert (together == in_place) == (name == "vispruner")  # the others' releases have orders of their own
    for row, k in enumerate(budget):
        assert together[row] == kept(method.select(one_image(tokens, row), torch.tensor([k])))[0]
