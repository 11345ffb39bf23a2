"""Static buffers of one picture shape: encoder, chosen tokens, and what splices them into a bucket."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.fast.buckets import Bucket
from diffprune.fast.choice import Choose
from diffprune.fast.graphs import Stage
from diffprune.fast.options import NotCompiled
from diffprune.fast.towers import Encoded
from diffprune.types import VisualTokens


@dataclass(kw_only=True)
class Picture:
    """A tower fixed to one picture shape and number of pictures.

    Args:
        batch: Pictures it runs at once.
        pixels: What it reads.
        encoded: What it gives, at the same address every time.
        tokens: The same as `VisualTokens`, for the methods; features are those of `encoded`.
    """

    batch: int
    pixels: Tensor
    encoded: Encoded
    tokens: VisualTokens
    encode: Stage

    @classmethod
    def build(
        cls, run: Callable[[Tensor], Encoded], pixels: Tensor, batch: int, about: dict[str, Any], *, capture: bool
    ) -> "Picture":
        pixels = pixels.clone()
        first = run(pixels)
        encoded = Encoded(
            torch.empty_like(first.x).copy_(first.x),
            *(None if part is None else torch.empty_like(part).copy_(part) for part in first[1:]),
        )

        def encode() -> None:
            for kept, new in zip(encoded, run(pixels), strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new)

        tokens = VisualTokens(x=encoded.x, cls_attention=encoded.cls_attention, keys=encoded.keys, **about)
        return cls(batch=batch, pixels=pixels, encoded=encoded, tokens=tokens, encode=Stage(encode, capture=capture))

    @property
    def num_tokens(self) -> int:
        return self.encoded.x.shape[1]

    @property
    def num_placeholders(self) -> int:
        """Of one picture in a prompt: its tokens, and newlines between them where the family has some."""
        return self.num_tokens if self.tokens.slots is None else self.tokens.slots.shape[1]


@dataclass(kw_only=True)
class Chooser:
    """The choice of K tokens of each picture: indices and features, at the same address every time.

    `prune` is None where the method cannot run on static tensors; then what it chose is copied in.
    """

    keep: Int[Tensor, "B K"]
    kept: Float[Tensor, "B K D"]
    logits: Float[Tensor, "B N"]  # zeros where the method has no ranking
    prune: Stage | None

    @classmethod
    def build(cls, picture: Picture, k: int, choose: Choose | None, *, capture: bool) -> "Chooser":
        """A chooser of k tokens by that function; without one the choice is copied in."""
        x = picture.encoded.x
        chooser = cls(
            keep=torch.arange(k, device=x.device).repeat(len(x), 1),
            kept=torch.empty(len(x), k, x.shape[-1], dtype=x.dtype, device=x.device),
            logits=torch.zeros(x.shape[:2], dtype=torch.float32, device=x.device),
            prune=None,
        )
        if choose is not None:
            into = (chooser.keep, chooser.kept, chooser.logits)
            chooser.prune = Stage(lambda: choose(x, into), capture=capture)
        return chooser


@dataclass(kw_only=True)
class Splicer:
    """Kept tokens projected and put between the words of a prompt, in the buffers of a bucket.

    `layout` is one integer tensor [B, ...], so that a prompt reaches the device in one copy: ids [T], positions
    [R * T], positions of all visual tokens [R * N], first visual column [1], last column [1].
    """

    layout: Int[Tensor, "B columns"]
    staging: Int[Tensor, "B columns"]  # `layout` on the host
    length: int
    num_tokens: int
    num_kept: int
    packed: bool  # positions count what is kept, from 0
    empty_last: int  # last column of a row without a prompt: cuts drop visual tokens before it there too
    splice: Stage

    @classmethod
    def build(
        cls,
        picture: Picture,
        chooser: Chooser,
        bucket: Bucket,
        *,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        packed: bool,
        capture: bool,
    ) -> "Splicer":
        length, tokens, k = bucket.length, picture.num_tokens, chooser.keep.shape[1]
        axes = bucket.positions.shape[0] if bucket.positions.ndim == 3 else 1
        width = length + axes * (length + tokens) + 2
        device = bucket.last.device
        layout = torch.zeros(bucket.batch, width, dtype=torch.int64, device=device)
        staging = torch.zeros(bucket.batch, width, dtype=torch.int64, pin_memory=capture)
        rows = torch.arange(bucket.batch, device=device)[:, None]
        ranks = torch.arange(k, device=device)

        def splice() -> None:
            ids, text, visual, first, last = layout.split([length, axes * length, axes * tokens, 1, 1], dim=1)
            place = first + ranks  # [B, K]
            bucket.embeds.copy_(embed(ids))
            bucket.embeds[rows, place] = project(chooser.kept).to(bucket.embeds.dtype)
            positions = text.unflatten(1, (axes, length)).transpose(0, 1).contiguous()  # [R, B, T]
            if not packed:
                where = visual.unflatten(1, (axes, tokens)).transpose(0, 1)  # [R, B, N]
                chosen = where.gather(2, chooser.keep.expand(axes, -1, -1))
                positions.scatter_(2, place.expand(axes, -1, -1), chosen)
            bucket.positions.copy_(positions if bucket.positions.ndim == 3 else positions[0])
            bucket.first.copy_(first[:, 0])
            bucket.last.copy_(last[:, 0])

        return cls(
            layout=layout,
            staging=staging,
            length=length,
            num_tokens=tokens,
            num_kept=k,
            packed=packed,
            empty_last=0 if bucket.cuts is None else bucket.cuts.num_visual,
            splice=Stage(splice, capture=capture),
        )

    @property
    def num_text(self) -> int:
        """Room for text."""
        return self.length - self.num_kept

    def lay_out(
        self,
        ids: Int[Tensor, "R T"],
        mask: Bool[Tensor, "R T"],
        positions: Int[Tensor, "*A R T"],
        *,
        image_token_id: int,
        pad_id: int,
    ) -> None:
        """Prompts on the host as `layout`, in one copy to the device; rows behind them are left empty."""
        staging, length, tokens, k = self.staging, self.length, self.num_tokens, self.num_kept
        positions = positions if positions.ndim == 3 else positions[None]  # [A, R, T]
        axes, rows = len(positions), len(ids)
        staging.zero_()
        staging[rows:, -1] = self.empty_last
        staging[:, :length] = pad_id
        for row in range(rows):
            real = ids[row][mask[row]]
            where = positions[:, row, mask[row]]  # [A, T]
            visual = (real == image_token_id).nonzero()[:, 0]
            first = int(visual[0])
            if int(visual[-1]) - first + 1 != tokens:
                raise NotCompiled("the placeholders of a picture do not stand side by side")
            stays = torch.ones(len(real), dtype=torch.bool)
            stays[first + k : first + tokens] = False
            width = int(stays.sum())
            places = staging[row, length : length + axes * length].view(axes, length)
            staging[row, :width] = real[stays]
            places[:, :width] = torch.arange(width) if self.packed else where[:, stays]
            staging[row, length * (axes + 1) : -2] = where[:, first : first + tokens].flatten()
            staging[row, -2], staging[row, -1] = first, width - 1
        self.layout.copy_(staging, non_blocking=True)


def repeat_batch(batch: Batch, times: int) -> Batch:
    """One prompt and its picture several times."""
    features = {
        key: value.repeat(times, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) else value
        for key, value in batch.features.items()
    }
    return Batch(
        features=features,
        row_of_image=tuple(range(times)),
        sizes=batch.sizes * times,
        seeds=batch.seeds * times,
    )
