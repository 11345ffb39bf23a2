"""The maths, as pure functions of tensors. Imports torch and nothing of ours."""

from diffprune.ops.gates import linear_gate, log_weight, scale_gate, sqrt_weight, vp_noise
from diffprune.ops.greedy import (
    cosine_matrix,
    greedy_coverage,
    greedy_determinant,
    greedy_diverse,
    greedy_max_min,
    greedy_orthogonal,
    unit_range,
    wide_cosines,
)
from diffprune.ops.gumbel import gumbel_keep, gumbel_topk
from diffprune.ops.hard_topk import hard_mask, hard_topk, take_tokens
from diffprune.ops.padding import pad_rows
from diffprune.ops.rotary import rotate
from diffprune.ops.soft_topk import RESPONSES, Response, Temperature, soft_topk

__all__ = [
    "RESPONSES",
    "Response",
    "Temperature",
    "cosine_matrix",
    "greedy_coverage",
    "greedy_determinant",
    "greedy_diverse",
    "greedy_max_min",
    "greedy_orthogonal",
    "gumbel_keep",
    "gumbel_topk",
    "hard_mask",
    "hard_topk",
    "linear_gate",
    "log_weight",
    "pad_rows",
    "rotate",
    "scale_gate",
    "soft_topk",
    "sqrt_weight",
    "take_tokens",
    "unit_range",
    "vp_noise",
    "wide_cosines",
]
