"""Training: a loss, a pruner's parameters and two schedules."""

from diffprune.train.loop import train

__all__ = ["train"]
