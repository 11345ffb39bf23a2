"""The throttled loss and that of dropping, on a model that has learned to read pictures."""

import pytest
import torch

from diffprune.config import make_config
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.train.frozen import load_frozen
from diffprune.train.sources import open_feed
from diffprune_lab.probes.agreement import Captions, agreement, correlation, random_rankings


@pytest.fixture(scope="module")
def nano() -> tuple[PrunedVLM, list[Captions]]:
    """The smallest reference model, which reads things and no background, and a few captions."""
    config = make_config(
        {"backbone": {"name": "scenes-nano"}, "budget": {"keep": 8}, "data": {"name": "scenes", "validation": 8}}
    )
    model, processor, _ = load_frozen(config.backbone, torch.device("cpu"))
    vlm = PrunedVLM(model.float(), processor, method="full")
    torch.manual_seed(0)
    method = build_method("diffprune", block=vlm.backbone.block, standardise=True, kept_exact=True)
    vlm = PrunedVLM(model, processor, method=method.eval())
    feed = open_feed(config.data, 42)
    samples = feed.validation()
    captions = []
    for at in (0, 4):
        some = samples[at : at + 4]
        batch, tokens = feed.encode(vlm, some)
        ids = [sample.id for sample in some]
        captions.append(Captions(batch=batch, tokens=tokens, ids=ids, seed=42, remove_below=1e-3))
    return vlm, captions


def test_nearly_hard_weights_agree_with_dropping(nano) -> None:
    vlm, captions = nano
    ((_, value),) = agreement(vlm, captions, 0.1, [0.02], rankings=8)
    assert value > 0.6
    ranked = random_rankings([one.tokens for one in captions], 8, seed=42)
    pairs = list(zip(captions, ranked, strict=True))
    hard, opposite = (
        torch.tensor([[one.loss(vlm, side * way, 0.1, tau) for way in ways] for one, ways in pairs])
        for side, tau in ((1, None), (-1, 0.02))
    )
    assert correlation(hard, opposite) < -0.4  # what throttles the other end disagrees
