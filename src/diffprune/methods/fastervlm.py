"""FasterVLM, by its paper's name: the same class as `cls_attention`, which holds the rule."""

from diffprune.methods.cls_attention import ClsAttention
from diffprune.registry import METHODS

METHODS.register("fastervlm")(ClsAttention)
