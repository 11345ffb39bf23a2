"""FasterVLM: the [CLS]-attention rule under its paper's name."""

import torch

from diffprune.methods.options import build_method
from diffprune.registry import METHODS
from diffprune.types import VisualTokens
from tests.methods.examples import kept


def test_fastervlm_and_cls_attention_are_one_rule() -> None:
    assert METHODS.get("fastervlm") is METHODS.get("cls_attention")
    method = build_method("fastervlm")
    assert method.name == "fastervlm" and "FasterVLM" in method.card.paper
    tokens = VisualTokens(x=torch.zeros(1, 5, 2), cls_attention=torch.tensor([[0.3, 0.1, 0.3, 0.3, 0.0]]))
    assert kept(method.select(tokens, torch.tensor([2]))) == [[0, 2]]  # of equals the first
