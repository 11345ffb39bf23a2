"""p-MoD: the falling shares, who goes through a layer, and what becomes of the others."""

import pytest
import torch

from diffprune.inside.layers import plain_layer, run_layer, run_routed
from diffprune.inside.loop import look
from diffprune.inside.state import Cut, LayerState
from diffprune.inside.stream import drop, start
from diffprune.methods.p_mod import PMod, cosine_shares, spread
from tests import tiny
from tests.contracts.vlm import pruned, splice_all
from tests.methods.examples import make_method


def p_mod(**options: object) -> PMod:
    method = make_method("p_mod", **options)
    assert isinstance(method, PMod)
    return method


def test_the_release_keeps_54_percent_in_the_mean_whatever_k_is() -> None:
    stages = p_mod(native=True).stages(32, 576, 64)
    assert next(layer for layer, count in stages.items() if count < 576) == 8
    assert stages[31] == int(576 * 0.15) and stages[16] == int(576 * cosine_shares(32)[16])
    assert p_mod(native=True).average(32, 576, 64) / 576 == pytest.approx(0.5375, abs=1e-3)


@pytest.mark.parametrize("num_layers", [1, 3, 6, 32])
@pytest.mark.parametrize("keep", [1, 32, 64, 128, 575])
def test_k_is_the_mean_over_layers_exactly_and_no_layer_has_more_than_the_one_before(
    num_layers: int, keep: int
) -> None:
    counts = list(p_mod().stages(num_layers, 576, keep).values())
    assert sum(counts) == keep * num_layers
    assert counts == sorted(counts, reverse=True) and counts[-1] >= 1 and counts[0] <= 576


def test_counts_follow_the_cosine() -> None:
    # Shares 1, 0.75, 0.25, 0: the last gets the one token it must have, the others 15 as 4 : 3 : 1, so 7.5, 5.6, 1.9.
    assert spread(cosine_shares(4), 16, 4) == [7, 6, 2, 1]
    assert spread([1.0, 0.5, 0.0], 10, 3) == [5, 3, 1]
    assert spread([1.0, 0.5, 0.0], 10, 9) == [10, 10, 7]


def routed_state(hidden: torch.Tensor) -> LayerState:
    return LayerState(
        layer=1,
        hidden=hidden,
        attention_mask=torch.ones(2, 6, dtype=torch.bool),
        visual=torch.tensor([[1, 2, 3, 4], [0, 1, -1, -1]]),
    )


def test_the_largest_logits_go_through_and_weights_stay_near_1() -> None:
    method = p_mod()
    router = method.routers[1]
    torch.nn.init.zeros_(router.weight)  # type: ignore[arg-type]
    torch.nn.init.zeros_(router.bias)  # type: ignore[arg-type]
    router.weight.data[0, 0] = 1.0  # type: ignore[operator, union-attr]
    hidden = torch.zeros(2, 6, 24)
    hidden[0, 1:5, 0] = torch.tensor([0.5, 9.0, -9.0, 9.5])  # after a tanh in half precision the large ones would tie
    route = method.select_at(routed_state(hidden), torch.tensor([2, 2]))
    assert route.keep.tolist() == [[1, 3], [0, 1]]
    torch.testing.assert_close(route.weight[0], 1 + 0.2 * hidden[0, 1:5, 0].tanh())
    assert route.weight[1].tolist() == [1.0] * 4  # all of row 1 go through, so the layer is as ever


def test_a_layer_weighs_its_mlp_for_some_and_the_state_of_the_others() -> None:
    vlm = pruned("llava", "p_mod", keep=6)
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    stack = vlm.backbone.language_model
    with torch.no_grad():
        stream, prompt = start(vlm.backbone, splice_all(vlm, batch, tokens))
        state = look(stack, 0, stream, prompt, None, None)
        route = vlm.method.select_at(state, torch.tensor([6]))  # type: ignore[operator]
        route = route._replace(weight=torch.linspace(0.8, 1.2, 16)[None])
        out = run_routed(stack, 0, stream, state.visual, route, None).hidden
        skipped = [index for index in range(16) if index not in route.keep[0].tolist()]
        columns = state.visual[0, skipped]
        torch.testing.assert_close(out[0, columns], route.weight[0, skipped, None] * stream.hidden[0, columns])
        # Who goes through: the layer on the shortened sequence, with w = 1 the layer itself.
        short = drop(stream, state.visual, Cut(route.keep))
        tables = stack.rotary_emb(short.hidden, short.positions)
        plain = run_layer(stack, 0, short.hidden, short.positions, tables, None, None)
        block = stack.layers[0]
        half = block.self_attn(block.input_layernorm(short.hidden), attention_mask=None, position_embeddings=tables)[0]
        half = half + short.hidden
        weight = torch.ones(short.visual.shape).masked_scatter(short.visual, route.weight[0, route.keep[0]])
        expected = half + weight[..., None] * (plain - half)
        passed = torch.tensor([column for column in range(stream.valid.shape[1]) if column not in columns.tolist()])
        torch.testing.assert_close(out[0, passed], expected[0], rtol=1e-4, atol=1e-5)


def test_training_runs_what_is_deployed() -> None:
    vlm = pruned("llava", p_mod_for_llava(), keep=6)
    batch = vlm.prepare([tiny.picture(1), tiny.picture(2)], ["what?", "and where is it?"], ["a star", "left"])
    tokens = vlm.encode(batch)
    with torch.no_grad():
        learned, dropped = (vlm.loss(batch, tokens=tokens, hard=hard) for hard in (False, True))
    torch.testing.assert_close(learned, dropped, rtol=1e-5, atol=1e-5)


def p_mod_for_llava() -> PMod:
    torch.manual_seed(0)
    method = pruned("llava", "p_mod").method
    for weight in method.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    assert isinstance(method, PMod)
    return method


def test_every_router_learns() -> None:
    vlm = pruned("llava", p_mod_for_llava(), keep=6)
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["a star"])
    vlm.loss(batch).backward()
    assert len(vlm.method.routers) == 2  # type: ignore[arg-type]  # of three layers: the last two share one
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in vlm.method.parameters())


def test_layers_with_other_parts_are_refused() -> None:
    stack = pruned("llava").backbone.language_model
    block = stack.layers[0]
    block.extra_norm = torch.nn.Identity()
    try:
        with pytest.raises(ValueError, match=r"have other parts than attention.*extra_norm"):
            plain_layer(stack, 0)
    finally:
        del block.extra_norm
    with pytest.raises(ValueError, match=r"reach=1\.5 is none"):
        p_mod(reach=1.5)
