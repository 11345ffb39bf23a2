"""A source of questions held in memory, about pictures of random pixels: what the library's own tests ask."""

from collections.abc import Sequence
from typing import ClassVar

from diffprune.evaluate.sources import Questions
from diffprune.evaluate.task import METRICS, Question, Task
from tests import tiny

SIZES = ((100, 70), (56, 56), (60, 120))
PICTURES = tuple(tiny.picture(seed, size) for seed, size in enumerate(SIZES))


def letters(count: int) -> Task:
    """Multiple choice, A right first and then B, about one picture after the other."""
    questions = [
        Question(
            id=f"letters-{index}",
            images=(PICTURES[index % len(PICTURES)],),
            prompt=f"Which is number {index}?\nA. this\nB. that",
            answer="AB"[index % 2],
            choices=("this", "that"),
        )
        for index in range(count)
    ]
    return Task("letters", questions, METRICS["choice"])


def words(count: int) -> Task:
    """Open questions about one picture, about two and about none, in turn."""
    shown = ((PICTURES[0],), (PICTURES[1], PICTURES[2]), (), (PICTURES[2], PICTURES[2]))
    questions = [
        Question(id=f"words-{index}", images=shown[index % 4], prompt="What " * (index + 1), answer="zebra")
        for index in range(count)
    ]
    return Task("words", questions, METRICS["exact"])


class Memory:
    """The source `memory`, with the tasks `letters` and `words`."""

    tasks: ClassVar = {"letters": letters, "words": words}

    def names(self) -> tuple[str, ...]:
        return tuple(self.tasks)

    def build(self, names: Sequence[str], *, split: str = "test", count: int = 500, sizes: str = "") -> Questions:
        if split != "test" or sizes:
            raise ValueError(f"memory has no split {split!r} and no sizes {sizes!r}; leave both out")
        return Questions(tuple(self.tasks[name](count) for name in names))


MEMORY = Memory()
