"""Random numbers that are the same on every machine: a counter-based generator in plain integers.

The n-th word of a stream is a hash of (key, n), as in SplitMix64. A stream is named by its key, so that a scene, its
text and its pixels can each draw from a stream of their own without disturbing one another.
"""

from collections.abc import Sequence
from typing import TypeVar, no_type_check

T = TypeVar("T")

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the counter visits every word once


@no_type_check
def mix(word: int) -> int:
    """A 64-bit hash of a 64-bit word: one to one, and every input bit reaches every output bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def hash_key(*key: int | str) -> int:
    """A 64-bit hash of a key made of integers and strings, in order."""
    state = len(key)
    for part in key:
        if isinstance(part, str):
            # The leading 1 keeps "" and "\0" apart; the top bit keeps strings and small integers apart.
            number = int.from_bytes(b"\x01" + part.encode(), "big")
            while number:
                state = mix((state + _STEP) & _MASK ^ (number & _MASK) ^ (1 << 63))
                number >>= 64
        else:
            state = mix((state + _STEP) & _MASK ^ (part & _MASK))
    return state


@no_type_check  # drawn from a hundred times a scene: the checks of a test run would cost fifty times the drawing
class Rng:
    """A stream of random integers named by `key`; two streams with the same key are the same."""

    __slots__ = ("_state",)

    def __init__(self, *key: int | str) -> None:
        self._state = hash_key(*key)

    def word(self) -> int:
        """The next 64 random bits."""
        # mix() written out: this is the inner loop of making a scene.
        self._state = word = (self._state + _STEP) & _MASK
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        return word ^ (word >> 31)

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1. For n far below 2**64 the bias of this rule cannot be measured."""
        return (self.word() * n) >> 64

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[(self.word() * len(items)) >> 64]

    def weighted(self, weights: Sequence[int]) -> int:
        """An index, drawn in proportion to its integer weight."""
        left = (self.word() * sum(weights)) >> 64
        for index, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return index
        raise ValueError(f"The weights {list(weights)} leave nothing to draw: give at least one positive integer.")

    def distinct(self, n: int, k: int) -> list[int]:
        """k different integers from 0 to n - 1, in random order, out of a single word (so n**k far below 2**64)."""
        word = self.word()
        pool = list(range(n))
        picked = []
        for size in range(n, n - k, -1):
            word, place = divmod(word, size)
            picked.append(pool.pop(place))
        return picked

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """k items from different places, in random order."""
        pool = list(items)
        return [pool.pop((self.word() * len(pool)) >> 64) for _ in range(k)]

    def shuffle(self, items: list[T]) -> list[T]:
        """Shuffle a list in place (Fisher-Yates) and return it."""
        for last in range(len(items) - 1, 0, -1):
            other = (self.word() * (last + 1)) >> 64
            items[last], items[other] = items[other], items[last]
        return items
