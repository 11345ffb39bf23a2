"""What stays of a picture: tokens or a share. Apart from the other types, so that reading one does not import torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of an image stays: an int is tokens per image, a float a share of them (`1` is one token, `1.0` all).

    Args:
        keep: The tokens, or the share.
        rounding: How a share becomes a count: "nearest", halves up, or "down", as some releases do.
    """

    keep: int | float
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "down"):
            raise ValueError(f'rounding={_short(self.rounding)} is none; choose "nearest" or "down"')
        given: object = self.keep
        if isinstance(given, bool) or not _is_number(given):
            raise ValueError(
                f"keep={_short(given)} is no budget; give tokens as an int (64) or a share as a float (0.111)"
            )
        keep = int(given) if isinstance(given, Integral) else float(given)  # numpy's numbers too
        object.__setattr__(self, "keep", keep)
        if isinstance(keep, int) and keep < 1:
            raise ValueError(f"keep={_short(keep)} keeps nothing; give at least 1 token, or a share above 0.0")
        if isinstance(keep, float) and not 0.0 < keep <= 1.0:
            raise ValueError(f"keep={keep} is no share; a float lies above 0.0 and at most 1.0, tokens are an int")

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """A budget from the command line: "64" is tokens, "0.111" and "1.0" are shares."""
        if not isinstance(text, str):
            raise ValueError(f"keep={_short(text)} is no text; give tokens (64) or a share (0.111)")
        try:
            return cls(int(text))
        except ValueError as error:
            if "keep=" in str(error):
                raise
        try:
            return cls(float(text))
        except ValueError as error:
            if "keep=" in str(error):
                raise
            raise ValueError(f"keep={_short(text)} is no budget; give tokens (64) or a share (0.111)") from None

    def count(self, num_tokens: int) -> int:
        """Tokens to keep of `num_tokens`: never more than there are, and at least one."""
        if isinstance(self.keep, int):
            return min(num_tokens, self.keep)
        rise = 0.5 if self.rounding == "nearest" else 0.0
        return min(num_tokens, max(1, math.floor(self.keep * num_tokens + rise)))

    def counts(self, mask: Any) -> Any:
        """Tokens to keep in each row of a padded batch: [B] for a mask [B, N]."""
        import torch

        return torch.tensor([self.count(int(n)) for n in mask.sum(-1).cpu()], dtype=torch.int64, device=mask.device)


def _is_number(value: object) -> bool:
    return isinstance(value, Integral) or (isinstance(value, Real) and math.isfinite(value))


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse_full_budget(keep: int | float | Sequence[int | float] | None) -> None:
    """An error where a budget is given and nothing that chooses what is kept: no method, or `full`."""
    if keep is not None and not (isinstance(keep, float) and keep == 1.0):
        raise ValueError(
            f"keep={keep} needs something that chooses what is kept; name a method (divprune needs no training) or "
            "load a saved pruner"
        )


def parse_budgets(text: str) -> list[int | float]:
    """What is to be kept, from a comma-separated list of the command line, each once."""
    budgets = [Budget.parse(item).keep for item in text.split(",") if item]
    if text and not budgets:
        raise ValueError(f"keep={_short(text)} holds no budget; give tokens (64) or a share (0.111)")
    require_distinct(budgets)
    return list(dict.fromkeys(budgets))


def require_distinct(budgets: Sequence[int | float]) -> None:
    """An error where one token and all tokens are both asked for: 1 and 1.0 are the same key wherever rows have one."""
    if {type(keep) for keep in budgets if keep == 1} == {int, float}:
        raise ValueError(
            "keep=1 is one token and keep=1.0 is all of them, and results cannot distinguish the two; "
            "measure them in two runs"
        )
