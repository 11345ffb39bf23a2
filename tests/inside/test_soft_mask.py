"""Soft masks in training: attention as a product, its gradient, and what a glimpse token may touch."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional

from diffprune.inside import loop
from diffprune.inside.layers import attention_mask
from diffprune.inside.loop import masked_states, multiply_at
from diffprune.inside.stream import Stream
from diffprune.methods.base import Card, LayerPruner
from diffprune.model import PrunedVLM
from diffprune.train.frozen import recomputing
from tests import tiny
from tests.contracts.vlm import pruned, splice_all, throttle


def stream(width: int = 4, **changes: Any) -> Stream:
    columns = torch.arange(width)[None]
    plain = Stream(
        hidden=torch.zeros(1, width, 8, dtype=torch.float64),
        positions=columns,
        valid=torch.ones(1, width, dtype=torch.bool),
        visual=torch.tensor([[False, True, True, False]]),
        source=columns,
        additions=(),
        two_way=None,
    )
    return dataclasses.replace(plain, **changes)


def by_product(logits: torch.Tensor, soft_mask: torch.Tensor) -> torch.Tensor:
    """DynamicViT's attention, word for word: exp(logit) times the weight of the key, 1 for the token itself."""
    counted = torch.where(torch.eye(4, dtype=torch.bool), 1.0, soft_mask[:, None]) * torch.ones(4, 4).tril()
    weights = logits.exp() * counted
    return weights / weights.sum(-1, keepdim=True)


def test_attention_counts_a_token_by_its_soft_mask() -> None:
    logits = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for given in ([1.0, 1.0, 1.0, 1.0], [1.0, 0.3, 0.7, 1.0], [1.0, 0.0, 1.0, 1.0]):
        soft_mask = torch.tensor([given], dtype=torch.float64)
        mask = attention_mask(None, stream(), soft_mask)
        assert mask is not None
        ours = (logits + mask[:, 0]).softmax(-1)
        torch.testing.assert_close(ours, by_product(logits, soft_mask), rtol=1e-5, atol=5e-6)


def test_a_token_that_is_masked_for_all_still_has_the_gradient_of_the_product() -> None:
    logits = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = []
    for attention in (
        lambda soft_mask: (logits + attention_mask(None, stream(), soft_mask)[:, 0]).softmax(-1),  # type: ignore[index]
        lambda soft_mask: by_product(logits, soft_mask),
    ):
        soft_mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
        (attention(soft_mask) * values).sum().backward()
        grads.append(soft_mask.grad)
    assert grads[1][0, 1].abs() > 1e-2
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_padding_stays_masked_and_both_directions_stay_open_where_they_were() -> None:
    some = stream(valid=torch.tensor([[True, True, True, False]]), two_way=torch.tensor([[True, True, False, False]]))
    mask = attention_mask(None, some, torch.tensor([[1.0, 0.5, 1.0, 1.0]], dtype=torch.float64))
    assert mask is not None
    open_to = mask[0, 0] > -100
    assert open_to[:3, 3].tolist() == [False] * 3
    assert open_to[0, 1] and not open_to[0, 2]
    assert mask[0, 0, 0, 1] == pytest.approx(-0.6931, abs=1e-3) and mask[0, 0, 1, 1] == 0.0


def test_weights_are_multiplied_at_their_columns_alone() -> None:
    values, columns = torch.tensor([[1.0, 0.5, 1.0], [1.0, 1.0, 1.0]]), torch.tensor([[1, 2], [0, -1]])
    out = multiply_at(values, columns, torch.tensor([[0.5, 0.0], [0.25, 9.0]]))
    assert out.tolist() == [[1.0, 0.25, 0.0], [0.25, 1.0, 1.0]]


class Glimpses(LayerPruner):
    """Keeps the first tokens before layer 2, with a token of its own that shouts."""

    name = "glimpses"
    card = Card(idea="for tests")
    prunes_earlier = True

    def __init__(self, loud: float) -> None:
        super().__init__()
        self.loud = loud

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        return {2: keep}

    def glimpse(self, layer: int) -> torch.Tensor | None:
        return self.loud * torch.ones(tiny.WIDTH)

    def select_at(self, state: Any, k: torch.Tensor) -> torch.Tensor:
        self.state = state
        places = torch.arange(int(k.max()))
        return torch.where(places < k[:, None], places, -1)


def test_nothing_of_a_prompt_attends_to_the_token_that_glimpses_at_it() -> None:
    texts, images = ["what is it?", "where is the small one?"], [tiny.picture(1), tiny.picture(2)]
    found = []
    for loud in (0.1, 5.0):
        vlm = pruned("llava", Glimpses(loud), keep=5)
        batch = vlm.prepare(images, texts)
        tokens = vlm.encode(batch)
        assert tokens is not None
        lm = splice_all(vlm, batch, tokens)
        with torch.no_grad():
            found.append(loop.prefill(vlm.backbone, lm, vlm.method, torch.tensor([5, 5])))  # type: ignore[arg-type]
        state = vlm.method.state  # type: ignore[union-attr]
        own = state.hidden[torch.arange(2), state.last]
        assert state.last.tolist() == lm.attention_mask.sum(-1).tolist()  # one column behind the prompt
        assert own.abs().max() > loud
    (first, cache), (second, _) = found
    assert torch.equal(first, second)
    kept = (lm.attention_mask.sum(-1) - lm.visual.sum(-1) + 5).max()
    assert cache.lengths() == [int(kept)] * 3  # no layer keeps what was dropped, nor the token
    for layer in cache.keys_values.layers:
        assert layer.keys.shape[2] == int(kept)
    assert torch.equal(cache.segments[0].next_position, cache.segments[1].next_position)


def test_hidden_tokens_are_not_generated_from() -> None:
    vlm = pruned("llava", "gumbel_ste-masked", keep=4)
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm, restricted = throttle(vlm, batch, tokens, keep=4)
    assert lm.soft_mask is not None and restricted.soft_mask is not None
    assert (
        lm.soft_mask[lm.visual].tolist() == restricted.soft_mask[0].tolist() and (lm.soft_mask[~lm.visual] == 1).all()
    )
    with pytest.raises(ValueError, match="for training; generate drops them"):
        vlm.backbone.generate(lm, max_new_tokens=1)


def test_what_follows_each_column_is_its_target_with_padding_on_either_side() -> None:
    vlm = pruned("llava")
    batch = vlm.prepare([tiny.picture(1), tiny.picture(2)], ["what?", "a longer one, is it?"], ["red", "to the left"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    states = masked_states(vlm.backbone, splice_all(vlm, batch, tokens))
    for row, answer in enumerate(("red", "to the left")):
        said = states.targets[row][states.targets[row] != -100]
        assert said.tolist() == vlm.backbone._answer_ids(answer)


def test_a_bias_with_a_gradient_meets_queries_with_one_and_no_kernel_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool, bool]] = []
    attend = functional.scaled_dot_product_attention

    def watch(query: torch.Tensor, *states: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        needed = attn_mask is not None and attn_mask.requires_grad
        seen.append((needed, query.requires_grad, torch.backends.cuda.cudnn_sdp_enabled()))
        return attend(query, *states, attn_mask=attn_mask, **options)

    for name, options in (("dynamicvit", {}), ("dynamic_llava", {"layer": 1}), ("atp_llava", {})):
        for again in (False, True):  # and so when the layers run once more
            vlm = pruned("llava", name, keep=4, **options)
            batch = vlm.prepare([tiny.picture(1)], ["what?"], ["red"])
            tokens = vlm.encode(batch)
            before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(True)
            try:
                with monkeypatch.context() as patched, recomputing(vlm.backbone, enabled=again):
                    patched.setattr(functional, "scaled_dot_product_attention", watch)
                    seen.clear()
                    vlm.loss(batch, tokens=tokens, tau=1.0).backward()
                biased = [states for states in seen if states[0]]
                assert len(biased) >= 2 * (1 + again), name
                assert all(states == (True, True, False) for states in biased), name
                assert torch.backends.cuda.cudnn_sdp_enabled()
            finally:
                torch.backends.cuda.enable_cudnn_sdp(before)
            assert all(parameter.grad is None for parameter in vlm.base.parameters())


def test_the_gradient_of_a_soft_mask_does_not_depend_on_the_tokens_having_one() -> None:
    grads = []
    for learns in (False, True):
        vlm = pruned("llava")
        batch = vlm.prepare([tiny.picture(1)], ["what?"], ["red"])
        tokens = vlm.encode(batch)
        assert tokens is not None
        lm = splice_all(vlm, batch, tokens)
        soft_mask = torch.where(lm.visual, 0.4, 1.0).requires_grad_()
        embeds = lm.inputs_embeds.detach().requires_grad_(learns)
        states = masked_states(vlm.backbone, dataclasses.replace(lm, soft_mask=soft_mask, inputs_embeds=embeds))
        states.hidden.square().sum().backward()
        grads.append(soft_mask.grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("again", [False, True])
def test_a_soft_mask_has_its_gradient_on_a_gpu(dtype: torch.dtype, tolerance: float, again: bool) -> None:
    grads = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        model, processor = tiny.build("llava")
        vlm = PrunedVLM(copy.deepcopy(model).to(device, kind).requires_grad_(False), processor, method="full")
        batch = vlm.prepare([tiny.picture(1)], ["what?"], ["red"])
        tokens = vlm.encode(batch)
        assert tokens is not None
        lm = splice_all(vlm, batch, tokens)
        soft_mask = torch.where(lm.visual, 0.4, 1.0).requires_grad_()
        with recomputing(vlm.backbone, enabled=again):
            states = masked_states(vlm.backbone, dataclasses.replace(lm, soft_mask=soft_mask))
            states.hidden[:, -1, :4].float().sum().backward()  # not of all: their square mean is 1
        assert soft_mask.grad is not None
        grads.append(soft_mask.grad.cpu())
    scale = grads[0].abs().max().item()
    assert scale > 0
    torch.testing.assert_close(grads[1], grads[0], rtol=0.0, atol=tolerance * scale)
