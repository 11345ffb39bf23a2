"""What every pruning method promises. A new method file is tested here without a change to this one."""

from pathlib import Path

import pytest
import torch

from diffprune.doors import import_file
from diffprune.inside.state import LayerState
from diffprune.methods.base import NEEDS, Card, LayerPruner, Pruner, TrainablePruner
from diffprune.methods.options import build_method
from diffprune.registry import METHODS
from diffprune.saving import exported_state
from tests.methods.examples import LANGUAGE, SPEC, kept, make_method, make_tokens, one_image

NAMES = METHODS.names()
TRAINABLE = [name for name in NAMES if issubclass(METHODS.get(name), TrainablePruner)]
IN_LAYERS = [name for name in NAMES if issubclass(METHODS.get(name), LayerPruner)]
BUDGETS = [(4, 4, 4), (12, 1, 5), (1, 1, 1), (12, 10, 6)]


def choosing(name: str) -> Pruner:
    """The method, or a skip where it chooses inside the language model."""
    if name in IN_LAYERS:
        pytest.skip(f"{name} chooses inside the language model")
    return make_method(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_exactly_k_distinct_real_tokens_are_kept_in_raster_order(name: str, budget: tuple[int, ...]) -> None:
    method, tokens = choosing(name), make_tokens()
    keep = method.select(tokens, torch.tensor(budget))
    wanted = (12, 10, 6) if name == "full" else budget
    assert keep.dtype == torch.int64 and keep.shape == (3, max(wanted))
    for row, (indices, k) in enumerate(zip(kept(keep), wanted, strict=True)):
        assert len(indices) == k
        assert indices == sorted(set(indices))
        assert all(tokens.mask[row, indices])
        assert keep[row, k:].eq(-1).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [1, 4])
def test_a_batch_chooses_as_its_images_do_one_by_one(name: str, group: int) -> None:
    method, tokens, budget = choosing(name), make_tokens(group=group), (5, 3, 2)
    together = kept(method.select(tokens, torch.tensor(budget)))
    alone = [kept(method.select(one_image(tokens, row), torch.tensor([k])))[0] for row, k in enumerate(budget)]
    assert together == alone


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_choice(name: str) -> None:
    choosing(name)
    first, second = (make_method(name).select(make_tokens(), torch.tensor([5, 5, 5])) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_all_tokens_keeps_all(name: str) -> None:
    tokens = make_tokens()
    keep = choosing(name).select(tokens, tokens.counts)
    assert kept(keep) == [list(range(count)) for count in (12, 10, 6)]


@pytest.mark.parametrize("name", NAMES)
def test_choosing_leaves_the_tokens_as_they_were(name: str) -> None:
    tokens, untouched = make_tokens(), make_tokens()
    choosing(name).select(tokens, torch.tensor([3, 3, 3]))
    for field in ("x", "mask", "cls_attention", "keys", "projected", "text"):
        assert torch.equal(getattr(tokens, field), getattr(untouched, field))


@pytest.mark.parametrize("name", NAMES)
def test_the_card_and_the_needs_are_filled_in(name: str) -> None:
    cls = METHODS.get(name)
    assert isinstance(cls.card, Card) and cls.card.idea
    assert cls.card.certainty in ("own", "formula", "release read", "unofficial")
    assert cls.needs <= NEEDS
    assert bool(cls.card.paper) == (cls.card.year is not None)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_answered_with_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="has no option 'no_such_option'"):
        build_method(name, block=SPEC, no_such_option=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_can_be_asked_to_be_as_it_was_released(name: str) -> None:
    assert build_method(name, block=SPEC, language=LANGUAGE, native=True).name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_built_method_knows_the_name_it_was_asked_for_by(name: str) -> None:
    assert build_method(name, block=SPEC, language=LANGUAGE).name == name


@pytest.mark.parametrize("name", IN_LAYERS)
def test_a_method_inside_the_llm_says_so_and_keeps_k_visual_tokens(name: str) -> None:
    method = make_method(name)
    assert isinstance(method, LayerPruner)
    with pytest.raises(ValueError, match="inside the language model"):
        method.select(make_tokens(), torch.tensor([3, 3, 3]))
    stages = method.stages(num_layers=32, num_visual=576, keep=64)
    assert stages and all(0 <= layer < 32 for layer in stages)
    counts = [stages[layer] for layer in sorted(stages)]
    assert counts == sorted(counts, reverse=True)
    assert 64 <= method.average(32, 576, 64) < 576
    assert counts[-1] == 64 or method.average(32, 576, 64) == 64  # K is what is left, or exactly what a layer holds
    assert set(method.stages(32, 576, 576).values()) == {576} and set(method.stages(32, 0, 0).values()) == {0}
    if "llm_attention" in method.needs:
        pytest.skip(f"{name} reads attention, which only a model gives")
    torch.manual_seed(0)
    visual = torch.tensor([[2, 3, 5, 6], [1, 4, -1, -1]])
    state = LayerState(
        layer=2, hidden=torch.randn(2, 8, 24), attention_mask=torch.ones(2, 8, dtype=torch.bool), visual=visual
    )
    chosen = method.select_at(state, torch.tensor([3, 1]))
    rows = kept(chosen if isinstance(chosen, torch.Tensor) else chosen.keep)
    assert [len(row) for row in rows] == [3, 1]
    assert all(row == sorted(set(row)) and (visual[i, row] >= 0).all() for i, row in enumerate(rows))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_method_it_deploys_tokens_and_their_places_in_raster_order(name: str, native: bool) -> None:
    options = {"relevance": "llm_embed"} if name == "cdpruner" else {}  # a text tower of its own is attached elsewhere
    method, tokens, k = make_method(name, native=native, **options), make_tokens(), torch.tensor([7, 6, 5])
    torch.manual_seed(0)  # some releases draw
    x, index = method.deploy(tokens, k)
    assert x.shape[:2] == index.shape and x.dtype == tokens.x.dtype
    rows = kept(index)
    assert all(row == sorted(set(row)) for row in rows)
    if method.is_inside:
        assert rows == [torch.where(mask)[0].tolist() for mask in tokens.mask]
    else:
        torch.manual_seed(0)
        assert rows == [sorted(row) for row in kept(method.choose(tokens, k).keep)]
        assert [len(row) for row in rows] == k.tolist() or native or not method.is_exact
    if not method.is_merging:
        for image, row in enumerate(rows):
            assert torch.equal(x[image, : len(row)], tokens.x[image, row])


# --- methods that learn -----------------------------------------------------------------------------------------------


def trainable(name: str) -> TrainablePruner:
    method = make_method(name)
    assert isinstance(method, TrainablePruner)
    return method


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_the_weights_of_a_training_step_sum_to_k(name: str, budget: tuple[int, ...]) -> None:
    tokens = make_tokens()
    method = trainable(name)
    restricted = method.restrict(tokens, torch.tensor(budget), tau=0.7)
    if method.exact_in_training:
        torch.testing.assert_close(restricted.alpha.sum(-1), torch.tensor(budget, dtype=torch.float32))
    else:
        assert restricted.penalty is not None  # it holds the sum near K
    assert (restricted.alpha[~tokens.mask] == 0).all()
    assert restricted.x.shape == tokens.x.shape and restricted.x.dtype == tokens.x.dtype
    assert restricted.x.isfinite().all()


@pytest.mark.parametrize("name", TRAINABLE)
def test_gradients_reach_every_weight_that_learns(name: str) -> None:
    method, tokens = trainable(name), make_tokens(filler=float("nan"))
    restricted = method.restrict(tokens, torch.tensor([4, 3, 2]), tau=0.7, generator=torch.Generator().manual_seed(0))
    # What is hidden from attention leaves the tokens as they are; its weights carry the gradient.
    carries = (
        restricted.x if restricted.soft_mask is None else restricted.soft_mask[..., None] * (1 + tokens.x.nan_to_num())
    )
    carries[tokens.mask].sin().sum().backward()
    # A shift of every logit changes nothing, so what only shifts them learns nothing, but for rounding.
    shifts = {"scorer.head.bias", "scorer.query.bias"}
    learned = {n: p.grad for n, p in method.named_parameters() if p.requires_grad and n not in shifts}
    assert all(grad is not None and grad.isfinite().all() for grad in learned.values())
    assert [n for n, grad in learned.items() if grad is not None and grad.abs().max() == 0] == []


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_training_step_does_not_depend_on_the_batch_around_an_image(name: str) -> None:
    method, tokens, budget = trainable(name), make_tokens(), (5, 3, 2)
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 8, 9)]
    together = method.restrict(tokens, torch.tensor(budget), tau=0.7, generator=generators)
    for row, seed in enumerate((7, 8, 9)):
        own = [torch.Generator().manual_seed(seed)]
        alone = method.restrict(one_image(tokens, row), torch.tensor(budget[row : row + 1]), tau=0.7, generator=own)
        real = tokens.mask[row]
        torch.testing.assert_close(together.x[row, real], alone.x[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.alpha[row, real], alone.alpha[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_same_generator_gives_the_same_step(name: str) -> None:
    method, tokens, k = trainable(name), make_tokens(), torch.tensor([4, 3, 2])
    steps = (method.restrict(tokens, k, tau=0.7, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    first, second, other = (torch.cat([step.x.flatten(), step.alpha.flatten()]) for step in steps)
    assert torch.equal(first, second)
    draws_nothing = getattr(method.options, "gate", "") == "scale"
    assert torch.equal(first, other) == draws_nothing


@pytest.mark.parametrize("name", TRAINABLE)
def test_an_export_leaves_the_throttler_out_and_ranks_the_same(name: str) -> None:
    method, tokens = trainable(name), make_tokens()
    state = exported_state(method.state_dict())
    assert state and not [entry for entry in state if "throttle" in entry]
    fresh = build_method(name, block=SPEC, language=LANGUAGE)
    missing, unexpected = fresh.load_state_dict(state, strict=False)
    assert not unexpected and all(entry.startswith("throttle_") for entry in missing)
    k = torch.tensor([4, 3, 2])
    assert torch.equal(fresh.eval().select(tokens, k), method.select(tokens, k))


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_learned_method_says_what_it_is_built_of(name: str) -> None:
    with pytest.raises(ValueError, match=r"block=BlockSpec\.from_config"):
        build_method(name)


# --- one file, and it is there ----------------------------------------------------------------------------------------

OWN_METHOD = '''
"""Keep the first tokens."""

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.methods.base import Card, ScoringPruner
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@METHODS.register("first_tokens")
class FirstTokens(ScoringPruner):
    card = Card(idea="keeps the first K tokens")

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        return -torch.arange(tokens.x.shape[1], dtype=torch.float32).expand(tokens.mask.shape)
'''


def test_a_method_in_a_file_of_one_s_own_works_like_the_built_in_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS, "_found", dict(METHODS._found))
    (tmp_path / "first_tokens.py").write_text(OWN_METHOD)
    import_file(tmp_path / "first_tokens.py")
    assert "first_tokens" in METHODS.names()
    assert kept(build_method("first_tokens").select(make_tokens(), torch.tensor([3, 2, 1]))) == [[0, 1, 2], [0, 1], [0]]


def test_a_misspelt_method_is_answered_with_the_near_one() -> None:
    with pytest.raises(ValueError, match="did you mean diffprune"):
        METHODS.get("difprune")
