"""What the demo is asked to do, and everything on its page."""

from dataclasses import dataclass
from typing import Any

from diffprune_lab.demo.examples import Example

MODEL = "scenes-nano"
BUDGETS = (32, 16, 8)  # of 144 tokens: 22, 11 and 6 %
TRAINED_BUDGETS = (3, 16)  # K is drawn from all of these: one scorer for every budget, larger ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much to do.

    Args:
        seconds: Training time of each scorer.
        questions: Scored questions of each of the ten tasks.
        steps: Most training steps of each scorer.
    """

    seconds: float = 60.0
    questions: int = 80
    seed: int = 0
    steps: int = 100_000
    batch_size: int = 16


QUICK = Settings(seconds=20.0, questions=3, steps=4, batch_size=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything on the page."""

    settings: Settings
    num_parameters: int
    num_visual: int
    num_text: float
    num_prompts: int
    rows: list[dict[str, Any]]
    chance: dict[str, float]  # by task
    losses: dict[str, list[float]]
    flops: dict[int, int]  # of the language model's prefill, by visual tokens; the first is all of them
    scorer_parameters: int
    examples: list[Example]
    larger: list[Example]
    seconds: dict[str, float]
    device: str
    versions: dict[str, str]
    command: str
