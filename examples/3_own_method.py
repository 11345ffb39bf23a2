"""A pruning method of one's own: one class, one function, and every command knows it.

python examples/3_own_method.py
diffprune --plugin examples/3_own_method.py eval --methods loudest_row,random --keep 32 --tasks gqa
"""

from pathlib import Path

from jaxtyping import Float
from torch import Tensor

import diffprune as dp
from diffprune.methods.base import Card, ScoringPruner


@dp.register("loudest_row")
class LoudestRow(ScoringPruner):
    """A token's norm, and half the mean norm of its row of the picture."""

    card = Card(idea="keeps tokens with large features, preferring rows of the picture that hold many of them")

    def score(self, tokens: dp.VisualTokens) -> Float[Tensor, "B N"]:
        norm = tokens.x.float().norm(dim=-1)
        rows, columns = tokens.grid[0]
        whole = norm.unflatten(1, (rows, columns))
        return (whole + 0.5 * whole.mean(-1, keepdim=True)).flatten(1)


def main() -> None:
    vlm = dp.load("scenes-llava", method="loudest_row", keep=32)
    picture = Path(__file__).parent / "wolf.png"
    print(vlm.generate(images=[picture], text="Which word does the sign show?", max_new_tokens=8))


if __name__ == "__main__":
    main()
