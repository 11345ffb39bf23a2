"""Trainable modules: the tower's own block, the scorer made of it, and the throttler's diagonal block."""

from diffprune.nn.blocks import Block, BlockSpec
from diffprune.nn.diagonal import DiagonalBlock, GlobalBlock
from diffprune.nn.scorer import BilinearScorer, Scorer, make_scorer, standardise
from diffprune.nn.statistics import FeatureStatistics

__all__ = [
    "BilinearScorer",
    "Block",
    "BlockSpec",
    "DiagonalBlock",
    "FeatureStatistics",
    "GlobalBlock",
    "Scorer",
    "make_scorer",
    "standardise",
]
