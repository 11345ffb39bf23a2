"""One request of a fast path: its prompts, and the static parts that it runs in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.fast.buckets import Bucket
from diffprune.fast.newlines import NewlineSplicer
from diffprune.fast.options import NotCompiled
from diffprune.fast.pictures import Chooser, Picture, Splicer
from diffprune.types import Keep, LMInputs, VisualTokens, refuse_full_budget


@dataclass(kw_only=True)
class Request:
    """One batch of prompts on its way through the stages."""

    batch: Batch
    keep: Keep
    rows: int
    host: dict[str, Tensor]  # the prompt, on the host
    picture: Picture | None = None
    chooser: Chooser | None = None
    ranking: Chooser | None = None  # of the same pictures, for its scores: every picture has a budget of its own
    splicer: Splicer | NewlineSplicer | None = None
    tokens: VisualTokens | None = None
    chosen: Tensor | None = None
    merged: Tensor | None = None  # features of the chosen tokens, where they are not simply taken
    found: Bucket | None = None
    spliced: LMInputs | None = None  # of the reference code, where that spliced
    steps: int = 0
    num_kept: tuple[int, ...] = field(default=())

    @property
    def ids(self) -> Int[Tensor, "B T"]:
        return self.host["input_ids"]

    @property
    def mask(self) -> Bool[Tensor, "B T"]:
        return self.host["attention_mask"].bool()

    @property
    def bucket(self) -> Bucket:
        if self.found is None:
            raise NotCompiled("the bucket of this request is known after splice; call the stages in order")
        return self.found

    @property
    def token(self) -> Int[Tensor, " B"]:
        """The newest token of each row, on the device."""
        return self.bucket.token[: self.rows]

    @property
    def logits(self) -> Float[Tensor, "B V"]:
        """What the newest token was chosen from."""
        return self.bucket.logits[: self.rows]

    @property
    def kept(self) -> Int[Tensor, "B K"] | None:
        """Raster indices of the kept tokens of each picture."""
        return self.chosen if self.chooser is None else self.chooser.keep[: self.batch.num_images]


def one_budget(vlm: Any, keep: Keep | None, num_images: int) -> Keep:
    """The budget that all pictures of a request share, where they do; else the list, one for each."""
    if vlm.method.name == "full" and num_images:
        refuse_full_budget(keep)
    if not isinstance(keep, Sequence):
        return vlm.budget_of(keep).keep
    if len(keep) != num_images:
        raise ValueError(f"keep={list(keep)} holds {len(keep)} budgets for {num_images} pictures; give one each")
    budgets = [vlm.budget_of(each) for each in keep]
    return budgets[0].keep if len(set(map(repr, budgets))) == 1 else [budget.keep for budget in budgets]
