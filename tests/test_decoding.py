"""The decoder of a model: chosen once for its method, and the same for prompts without a picture."""

import pytest
import torch

from diffprune.decoding import LayerDecoder, StockDecoder
from tests import tiny
from tests.contracts.vlm import pruned


def test_a_model_has_the_decoder_its_method_needs() -> None:
    vlm = pruned("llava", "divprune", keep=4)
    assert isinstance(vlm.decoder, StockDecoder)
    inside = vlm.with_method("fastv", layer=1)
    assert isinstance(inside.decoder, LayerDecoder) and inside.decoder.method is inside.method


METHODS: tuple[tuple[str, dict[str, int]], ...] = (
    ("full", {}),
    ("diffprune", {}),
    ("fastv", {"layer": 1}),
    ("tome", {}),
)


@pytest.mark.parametrize("hard", [False, True])
def test_a_prompt_without_a_picture_is_the_stock_model_s(hard: bool) -> None:
    batch = pruned("llava").prepare(None, ["what is red?"], ["a star"])
    models = [pruned("llava", name, keep=4, **options) for name, options in METHODS]
    losses = [vlm.loss(batch, hard=hard) for vlm in models]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert len({vlm.generate(None, "what?", max_new_tokens=3) for vlm in models}) == 1


@pytest.mark.parametrize("name", ["diffprune", "dynamicvit", "oc_vtp", "dynamic_llava"])
def test_the_loss_gives_the_weights_it_was_made_with_where_asked(name: str) -> None:
    vlm = pruned("llava", name, keep=4)
    vlm.method.start_training()
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["red"])

    def noise() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(0)]

    loss, alpha = vlm.loss(batch, generator=noise(), return_alpha=True)
    assert torch.equal(loss, vlm.loss(batch, generator=noise()))
    assert alpha.shape[0] == 1 and bool(((alpha >= 0) & (alpha <= 1)).all())
