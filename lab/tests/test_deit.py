"""Image classifiers cut after the embedding or after a block, proved against the untouched model."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.registry import BACKBONES, METHODS
from diffprune_lab.classifier import PrunedClassifier
from diffprune_lab.deit import DeiT
from lab.tests import tiny_deit as deit
from tests import tiny
from tests.contracts.vlm import EveryOther, Moved
from tests.methods.examples import LANGUAGE

KINDS = sorted(deit.KINDS)
CUTS = [0, 1, tiny.LAYERS]


def pictures() -> list[Image.Image]:
    return [tiny.picture(1, (100, 70)), tiny.picture(2, (64, 120))]


def classifier(kind: str = "deit", method="full", **kwargs) -> PrunedClassifier:
    model, processor = deit.build(kind)
    return PrunedClassifier(model, processor, method=method, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS)
def test_keeping_everything_is_the_untouched_model(kind: str, cut: int) -> None:
    pruned = classifier(kind, cut=cut)
    batch = pruned.prepare(pictures())
    with torch.no_grad():
        stock = pruned.base(batch.pixel_values).logits
    assert stock.std() > 1e-2, "the tiny model separates pictures"
    assert (pruned.logits(batch) - stock).abs().max() < 1e-6 * max(1.0, float(stock.abs().max()))
    assert torch.equal(pruned.classify(pictures()), stock.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS)
def test_dropping_equals_masking(kind: str, cut: int) -> None:
    pruned = classifier(kind, EveryOther(), keep=5, cut=cut)
    batch = pruned.prepare(pictures())
    keep = pruned.method.select(pruned.encode(batch).tokens, torch.tensor([5, 5]))
    with torch.no_grad():
        ours, masked = pruned.logits(batch), stock_masked(pruned, batch.pixel_values, keep)
        full = pruned.base(batch.pixel_values).logits
    assert (ours - masked).abs().max() < 1e-5
    if cut < tiny.LAYERS:
        assert (ours - full).abs().max() > 1e-3, "dropping must show, else the comparison says nothing"


def stock_masked(pruned: PrunedClassifier, pixels: Tensor, keep: Tensor) -> Tensor:
    """The untouched model's own layers on all tokens, those dropped hidden from the cut on by an additive mask."""
    trunk = pruned.backbone.trunk
    hidden = trunk.embeddings(pixels)
    seen = torch.ones(hidden.shape[:2], dtype=torch.bool)
    prefix = hidden.shape[1] - 16
    seen[:, prefix:] = False
    seen.scatter_(1, keep + prefix, True)
    mask = torch.zeros(len(pixels), 1, hidden.shape[1], hidden.shape[1]).masked_fill(~seen[:, None, None], -torch.inf)
    for index, layer in enumerate(trunk.layers):
        hidden = layer(hidden, mask if index >= pruned.backbone.cut else None)
    hidden = trunk.layernorm(hidden)
    if hasattr(pruned.base, "classifier"):
        return pruned.base.classifier(hidden[:, 0])
    return (pruned.base.cls_classifier(hidden[:, 0]) + pruned.base.distillation_classifier(hidden[:, 1])) / 2


def test_rows_that_keep_different_numbers_answer_as_they_do_alone() -> None:
    pruned = classifier(method="full", cut=1)
    encoded = pruned.encode(pruned.prepare(pictures()))
    keep = torch.tensor([[0, 3, 7, 9], [2, 5, -1, -1]])
    from diffprune.ops import take_tokens

    together = pruned.backbone.logits(encoded.prefix, take_tokens(encoded.tokens.x, keep), keep >= 0)
    alone = pruned.backbone.logits(encoded.prefix[1:], encoded.tokens.x[1:, [2, 5]])
    assert (together[1:] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("place", [(0.3, 0.3), (0.5, 0.7), (0.8, 0.2)])
def test_one_bright_patch_is_kept_and_its_box_covers_it(cut: int, place: tuple[float, float]) -> None:
    black = Image.new("RGB", (112, 112))
    reference = classifier(cut=cut)
    tokens = reference.encode(reference.prepare([black])).tokens
    x, y = int(place[0] * 112), int(place[1] * 112)
    pixels = np.zeros((112, 112, 3), np.uint8)
    pixels[y - 3 : y + 3, x - 3 : x + 3] = 255
    (entry,) = classifier(method=Moved(tokens.x), keep=1, cut=cut).select([Image.fromarray(pixels)])
    x0, y0, x1, y1 = entry.boxes[entry.keep[0]].tolist()
    assert x0 - 3 <= x <= x1 + 3 and y0 - 3 <= y <= y1 + 3


@pytest.mark.parametrize("cut", [0, 1])
def test_gradients_reach_the_scorer_and_nothing_else(cut: int) -> None:
    pruned = classifier(method="diffprune", keep=5, cut=cut)
    before = {key: value.clone() for key, value in pruned.base.state_dict().items()}
    batch = pruned.prepare(pictures(), labels=[3, 7])
    pruned.loss(batch, tau=1.0, generator=torch.Generator().manual_seed(0)).backward()
    head = [parameter for name, parameter in pruned.method.named_parameters() if "head" in name and parameter.ndim > 1]
    assert head and all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in head)
    assert all(parameter.grad is None for parameter in pruned.base.parameters())
    assert all(torch.equal(value, before[key]) for key, value in pruned.base.state_dict().items())
    assert not any("deit" in key for key in pruned.state_dict()), "the frozen model is no part of what is saved"


def test_the_hard_loss_is_the_cross_entropy_of_the_deployed_path() -> None:
    pruned = classifier(method="feature_norm", keep=5, cut=1)
    batch = pruned.prepare(pictures(), labels=[3, 7])
    expected = torch.nn.functional.cross_entropy(pruned.logits(batch), batch.labels)
    assert torch.equal(pruned.loss(batch, hard=True), expected)
    assert torch.equal(pruned.logits(batch.pixel_values), pruned.logits(batch)), "plain pixels do as well"


def test_needs_are_given_after_a_block_and_refused_before_any() -> None:
    pruned = classifier(cut=2)
    pixels = pruned.prepare(pictures()).pixel_values
    tokens = pruned.backbone.encode(pixels, frozenset({"cls_attention", "keys"})).tokens
    assert tokens.cls_attention.shape == (2, 16) and tokens.keys.shape == (2, 16, tiny.WIDTH)
    model, processor = deit.build()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(pixels, output_attentions=True).attentions[1].mean(1)[:, 0, 2:]
    assert (tokens.cls_attention - weights).abs().max() < 1e-5
    with pytest.raises(ValueError, match="cut=1 or more"):
        DeiT(model, processor, cut=0).encode(pixels, frozenset({"keys"}))
    with pytest.raises(ValueError, match="cut=1 or more"):
        classifier(method="cls_attention", cut=0)


def test_every_method_that_asks_for_no_language_runs_on_a_classifier() -> None:
    ran = []
    for name in METHODS.names():
        method = build_method(name, block=classifier().backbone.block, language=LANGUAGE)
        if method.needs - DeiT.provides or method.place != "before the LLM":
            with pytest.raises(ValueError, match="cannot give"):
                classifier(method=method, cut=1)
            continue
        logits = classifier(method=method, keep=4, cut=1).logits(classifier().prepare(pictures()))
        assert logits.shape == (2, deit.CLASSES)
        ran.append(name)
    assert {"diffprune", "random", "feature_norm", "cls_attention"} <= set(ran)


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    model, processor = deit.build()
    with pytest.raises(ValueError, match="cut=9"):
        PrunedClassifier(model, processor, cut=9)
    with pytest.raises(ValueError, match="is an image classifier"):
        PrunedVLM(model, processor)
    with pytest.raises(ValueError, match="no classification head"):
        DeiT(model.deit, processor)
    with pytest.raises(ValueError, match="'llava'"):
        PrunedClassifier(*tiny.build("llava"))
    with pytest.raises(ValueError, match="no labels"):
        classifier(method="diffprune").loss(classifier().prepare(pictures()))
    with pytest.raises(ValueError, match="1 labels for 2 images"):
        classifier().prepare(pictures(), labels=[1])
    with pytest.raises(ValueError, match="nothing to train"):
        classifier(method="random").loss(classifier().prepare(pictures(), labels=[1, 2]))
    with pytest.raises(ValueError, match="image processor"):
        PrunedClassifier(model).prepare(pictures())


def test_the_family_is_listed_with_its_presets() -> None:
    assert BACKBONES.get("deit") is DeiT
    assert {"deit-tiny", "deit-small", "deit-base"} <= set(DeiT.presets)


def test_the_rounding_reaches_a_classifier() -> None:
    model, processor = deit.build()
    for native, rise in ((True, 0), (False, 1)):
        classifier = PrunedClassifier(model, processor, method="visionselector", native=native)
        num = int(classifier.encode(classifier.prepare([tiny.picture(1)])).tokens.counts[0])
        assert len(classifier.select([tiny.picture(1)], keep=2.75 / num)[0].keep) == 2 + rise


def test_the_classifier_is_still_found_where_it_was_with_a_warning():
    import diffprune as dp

    with pytest.warns(DeprecationWarning, match=r"PrunedClassifier has moved to diffprune_lab\.classifier"):
        assert dp.PrunedClassifier is PrunedClassifier
