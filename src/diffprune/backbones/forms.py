"""Forms in which a picture can be given to a model: as it is, or smaller, so that it becomes fewer tokens.

A family with native resolution or tiles takes a picture of fewer pixels; one that scales every picture to the same
number of tiles has a setting of its image processor for it, the one that its users turn.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from diffprune.backbones.processors import limits


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a picture.

    Attributes:
        size: (width, height) to which it is scaled.
        num_visual: Tokens that it then becomes.
        setting: Name and value of an attribute of the image processor; None leaves it as it is.
    """

    size: tuple[int, int]
    num_visual: int
    setting: tuple[str, Any] | None = None


def smaller_sizes(size: tuple[int, int], count: Callable[[tuple[int, int]], int]) -> Iterator[Form]:
    """The picture as it is, then scaled down pixel by pixel of its longer edge.

    Args:
        count: Tokens of a picture of (width, height).
    """
    longest = max(size)
    for edge in range(longest, 0, -1):
        width, height = (max(1, round(side * edge / longest)) for side in size)
        if edge < longest and max(width, height) > limits.max_aspect * min(width, height):
            continue  # rounding has made it a line, which no model takes
        yield Form((width, height), count((width, height)))


def with_setting(processor: Any, name: str, value: Any) -> Any:
    """A processor that differs in one setting of its image processor; the given one stays as it is."""
    changed = copy.copy(processor)
    changed.image_processor = copy.copy(processor.image_processor)
    setattr(changed.image_processor, name, value)
    return changed
