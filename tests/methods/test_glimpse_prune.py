"""GlimpsePrune: what the glimpse token sees, the boxes it learns from, and caches without what was dropped."""

import dataclasses

import pytest
import torch

from diffprune.inside import loop
from diffprune.inside.layers import additive_mask, run_layer
from diffprune.inside.loop import look
from diffprune.inside.stream import entering, start, with_glimpse
from diffprune.methods.glimpse_prune import GlimpsePrune, region_loss
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.vlm import pruned, splice_all


def trained(**options: object) -> PrunedVLM:
    """On the tiny model, with every weight random and a loud glimpse token."""
    torch.manual_seed(0)
    backbone = pruned("llava").backbone
    method = build_method("glimpse_prune", block=backbone.block, language=backbone.language, **options)
    vlm = pruned("llava", method, keep=5)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, mean=0.02, std=0.2)
    return vlm


def test_the_loss_on_boxes_is_dice_and_a_tenth_of_the_cross_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0, 7.0]])
    wanted, mask = torch.tensor([[True, False, True, False]]), torch.tensor([[True, True, True, False]])
    # Shares 1/2, 1/2, 1: dice 1 - (2 * 1.5 + 1) / (2 + 2 + 1) = 0.2; cross-entropy (log 2 + log 2 + 0) / 3.
    assert region_loss(logits, wanted, mask, 0.1).item() == pytest.approx(0.2 + 0.1 * 2 * 0.6931 / 3, abs=1e-4)
    assert region_loss(torch.where(wanted, 50.0, -50.0), wanted, mask, 0.1).item() == pytest.approx(0.0, abs=1e-6)


def test_what_the_glimpse_token_looks_at_decides() -> None:
    vlm = trained()
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm, method = splice_all(vlm, batch, tokens), vlm.method
    assert isinstance(method, GlimpsePrune)
    seen = []
    for scale in (1.0, -3.0):
        method.token.data *= scale
        with torch.no_grad():
            stream, prompt = start(vlm.backbone, lm)
            stream = with_glimpse(stream, prompt, method, torch.tensor([True]))
            stack, entered = vlm.backbone.language_model, None
            for index in range(method.cut(3)):
                entered = entering(stream, method, index)
                tables = stack.rotary_emb(entered, stream.positions)
                out = run_layer(stack, index, entered, stream.positions, tables, None, None)
                stream = dataclasses.replace(stream, hidden=out)
            state = look(stack, method.cut(3), stream, prompt, entered, None)
            seen.append(method.score(state))
    assert seen[0].shape == (1, 16) and (seen[0] - seen[1]).abs().max() > 1e-3


def test_answers_hear_neither_what_was_dropped_nor_the_glimpse_in_any_layer() -> None:
    vlm = trained()
    method = vlm.method
    assert isinstance(method, GlimpsePrune)
    answer = "red"
    batch = vlm.prepare([tiny.picture(1)], ["what is it?"], [answer])
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm, k = splice_all(vlm, batch, tokens), torch.tensor([5])
    chosen: list[torch.Tensor] = []
    select = method.select_at
    method.select_at = lambda state, k: chosen.append(select(state, k)) or chosen[-1]  # type: ignore[method-assign]
    with torch.no_grad():
        ours, words, *_ = loop.dropped_states(vlm.backbone, lm, method, k)
        # The same by masks over the whole sequence: before the cut only the answer is kept from the dropped tokens.
        assert lm.labels is not None
        columns = lm.visual[0].nonzero()[:, 0]
        dropped = torch.ones(lm.input_ids.shape[1], dtype=torch.bool)
        dropped[~lm.visual[0]] = False
        dropped[columns[chosen[0][0]]] = False
        allowed = torch.ones(len(dropped), len(dropped), dtype=torch.bool).tril()
        said = lm.labels[0] != -100
        stack, hidden = vlm.backbone.language_model, lm.inputs_embeds
        tables = stack.rotary_emb(hidden, lm.position_ids)
        for index in range(3):
            blind = dropped[None] & (said[:, None] | (index >= method.cut(3)))
            mask = additive_mask((allowed & ~blind)[None, None], hidden)
            hidden = run_layer(stack, index, hidden, lm.position_ids, tables, mask, None)
        first = int(said.nonzero()[0, 0])
        wanted = stack.norm(hidden)[:, first - 1 : -1]
    assert words[0].tolist() == vlm.backbone._answer_ids(answer)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_adaptive_budgets_keep_the_likely_ones_and_never_more_than_k(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = trained(budget="adaptive")
    method = vlm.method
    assert isinstance(method, GlimpsePrune)
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm = splice_all(vlm, batch, tokens)
    text = int((~lm.visual).sum())
    for logits, keep, left in (
        (torch.tensor([1.0, -1.0] * 8), 12, 8),
        (torch.tensor([1.0, -1.0] * 8), 3, 3),
        (-torch.arange(1.0, 17.0), 5, 1),
    ):
        monkeypatch.setattr(method, "score", lambda state, own=logits: own[None])
        with torch.no_grad():
            _, cache = loop.prefill(vlm.backbone, lm, method, torch.tensor([keep]))
        assert cache.lengths() == [text + left] * 3


def test_boxes_teach_it_and_data_without_boxes_is_refused() -> None:
    vlm = trained()
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["a star"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    with pytest.raises(ValueError, match=r"this data has none; train it on data\.name=scenes, or set method\.superv"):
        vlm.loss(batch, tokens=tokens)
    regions = torch.zeros(1, 16, dtype=torch.bool)
    regions[0, 5:8] = True
    with_regions = dataclasses.replace(tokens, regions=regions)
    loss = vlm.loss(batch, tokens=with_regions)
    loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in vlm.method.parameters())
    other = vlm.loss(batch, tokens=dataclasses.replace(with_regions, regions=~regions))
    assert abs((loss - other).item()) > 1e-3


def test_the_cut_lies_at_the_release_s_depth() -> None:
    method = trained().method
    assert isinstance(method, GlimpsePrune)
    assert (
        method.stages(32, 576, 64) == {22: 64}
        and method.stages(6, 576, 32) == {4: 32}
        and method.stages(3, 9, 2) == {2: 2}
    )
    assert method.glimpse(0) is not None and method.glimpse(2) is None
    with pytest.raises(ValueError, match="width=20 does not split"):
        trained(width=20)
