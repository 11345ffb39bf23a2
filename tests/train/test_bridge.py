"""Progressive removal: between throttling and dropping, and differentiated exactly for what is run."""

from typing import Any

import pytest
import torch

from diffprune.model import PrunedVLM
from diffprune.ops import soft_topk
from diffprune.restriction import survivors
from tests import tiny
from tests.contracts.vlm import throttle

K = 5


def build(**options: Any) -> PrunedVLM:
    """A tiny LLaVA whose scorer ranks and whose throttler's block is no longer the identity."""
    torch.manual_seed(0)
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=K, **options)
    with torch.no_grad():
        for name, parameter in vlm.method.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (2.0 if "head" in name else 0.3))
    return vlm


def batch_of(vlm: PrunedVLM) -> Any:
    return vlm.prepare([tiny.picture(1), tiny.picture(2)], ["What is it?", "And this?"], ["a red ball", "nothing"])


def noise() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in (1, 2)]


def test_without_a_threshold_it_is_throttling() -> None:
    vlm = build()
    batch = batch_of(vlm)
    throttled = vlm.loss(batch, tau=1.0, generator=noise())
    below_all = vlm.loss(batch, tau=1.0, generator=noise(), remove_below=1e-30)
    assert torch.equal(vlm.loss(batch, tau=1.0, generator=noise(), remove_below=0.0), throttled)
    torch.testing.assert_close(below_all, throttled)


def test_at_a_small_temperature_it_is_dropping() -> None:
    vlm = build(kept_exact=True)
    batch = batch_of(vlm)
    removed = vlm.loss(batch, tau=1e-4, generator=noise(), remove_below=1e-3)
    torch.testing.assert_close(removed, vlm.loss(batch, hard=True), rtol=1e-4, atol=0)
    throttled = vlm.loss(batch, tau=1e-4, generator=noise())
    assert abs(throttled - removed) > 1e-2  # the slots that are still there do something


def test_a_kept_token_is_what_is_deployed_only_where_that_is_asked_for() -> None:
    vlm = build(kept_exact=False)
    batch = batch_of(vlm)
    removed = vlm.loss(batch, tau=1e-4, generator=noise(), remove_below=1e-3)
    assert abs(removed - vlm.loss(batch, hard=True)) > 1e-2


def test_the_sequence_shortens_as_the_temperature_falls() -> None:
    vlm = build()
    batch = batch_of(vlm)
    tokens = vlm.encode(batch)
    assert tokens is not None
    lengths = []
    for tau in (5.0, 0.5, 0.1, 1e-3):
        lm, _ = throttle(vlm, batch, tokens, tau=tau, generator=noise(), remove_below=0.02)
        lengths.append(lm.visual.sum(-1).max().item())
    assert lengths[0] == 16 and lengths[-1] == K and lengths == sorted(lengths, reverse=True)


def test_the_k_heaviest_survive_any_threshold_and_padding_never_does() -> None:
    alpha = torch.tensor([[0.3, 0.2, 0.1, 0.4, 0.0], [0.9, 0.05, 0.05, 0.0, 0.9]])
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    assert survivors(alpha, torch.tensor([2, 1]), mask, 0.45).tolist() == [[0, 3], [0, -1]]
    assert survivors(alpha, torch.tensor([1, 1]), mask, 0.05).tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]


@pytest.mark.parametrize(
    ("tau", "remove_below"),
    [(0.4, 0.05), (torch.tensor([0.4, 0.1], dtype=torch.float64), 1e-3)],
    ids=["one temperature", "drawn, the recipe's own threshold"],
)
def test_the_gradient_is_that_of_what_is_run(tau: Any, remove_below: float) -> None:
    """Against finite differences in float64, where a small step changes no membership of the removed set."""
    model, processor = tiny.build("llava")
    model = type(model)(model.config).double().eval()  # its own copy: the tiny models are shared
    model.load_state_dict({name: value.double() for name, value in tiny.build("llava")[0].state_dict().items()})
    vlm = PrunedVLM(model, processor, method="diffprune", keep=K, kept_exact=True)
    vlm.method.load_state_dict(build(kept_exact=True).method.state_dict())
    vlm.method.double()
    batch = batch_of(vlm)

    def loss() -> tuple[torch.Tensor, list[int]]:
        lm, restricted = throttle(vlm, batch, tokens, tau=tau, generator=noise(), remove_below=remove_below)
        return vlm.decoder.loss(lm, None, restricted)[0], lm.source[lm.visual].tolist()

    tokens = vlm.encode(batch)
    assert tokens is not None
    value, kept = loss()
    assert 2 * K < len(kept) < 2 * 16  # something is removed and something is throttled
    value.backward()
    for name in ("scorer.blocks.0.mlp.up.weight", "scorer.head.weight", "throttle_block.block.mlp.down.weight"):
        parameter = dict(vlm.method.named_parameters())[name]
        assert parameter.grad is not None
        steepest = parameter.grad / parameter.grad.norm()
        step, values = 1e-3, []
        with torch.no_grad():
            for sign in (1, -1):
                parameter += sign * step * steepest
                moved, still_kept = loss()
                parameter -= sign * step * steepest
                assert still_kept == kept
                values.append(moved.item())
        slope = (values[0] - values[1]) / (2 * step)
        # The language model's own norms round to float32, which is what bounds the agreement.
        assert parameter.grad.norm().item() == pytest.approx(slope, rel=5e-3)


def test_a_methods_penalty_is_added_with_the_batchs_share_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = build()
    batch = batch_of(vlm)
    plain = [vlm.loss(batch, generator=noise(), num_targets=number) for number in (None, 100)]
    restrict = vlm.method.restrict
    penalty = 3.0 * torch.ones(len(batch.labels))
    monkeypatch.setattr(vlm.method, "restrict", lambda *a, **b: restrict(*a, **b)._replace(penalty=penalty))
    own = (batch.labels != -100).sum()
    torch.testing.assert_close(vlm.loss(batch, generator=noise()), plain[0] + 3.0)
    torch.testing.assert_close(vlm.loss(batch, generator=noise(), num_targets=100), plain[1] + 3.0 * own / 100)
    shared = vlm.loss(batch, generator=noise(), num_targets=100, num_prompts=8)
    torch.testing.assert_close(shared, plain[1] + 3.0 * len(batch.labels) / 8)
    with pytest.raises(ValueError, match=r"num_prompts=0 .* is no number of prompts"):
        vlm.loss(batch, num_prompts=0)


def test_at_the_recipe_s_last_temperature_throttling_is_not_yet_dropping() -> None:
    """Of standardised logits at K = 8 of 576: at 0.1 weights are spread, at 1e-3 the K tokens are what is left."""
    logits = torch.randn(64, 576, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = torch.full((64,), 8)
    found = {}
    for tau in (0.1, 1e-3):
        alpha = soft_topk(logits, k, tau=tau)
        lengths = (survivors(alpha, k, torch.ones(64, 576, dtype=torch.bool), 1e-3) >= 0).sum(-1)
        found[tau] = lengths.double().mean().item(), (alpha.topk(8).values.sum(-1) / 8).mean().item()
    assert 3 * 8 < found[0.1][0] < 5 * 8 and found[0.1][1] < 0.9
    assert found[1e-3][0] < 8.5 and found[1e-3][1] > 0.99
