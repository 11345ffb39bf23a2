"""The splice of families with newline tokens between rows of a picture, in static shapes.

How many newlines stay depends on the choice, so a row has columns for all that may and fills as many as do: what stays
moves forward, and the columns that are not needed lie behind the prompt's end, where the causal mask hides them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffprune.backbones.base import Backbone
from diffprune.backbones.splice import held_and_newlines
from diffprune.fast.buckets import Bucket
from diffprune.fast.choice import take
from diffprune.fast.graphs import Stage
from diffprune.fast.options import NotCompiled
from diffprune.fast.pictures import Chooser, Picture


@dataclass(kw_only=True)
class NewlineSplicer:
    """Kept tokens and the newlines that stay with them between the words of a prompt, in the buffers of a bucket.

    `layout` is one integer tensor [B, ...], so that a prompt reaches the device in one copy: text ids [X], their
    positions [X], positions of the placeholders [S], text tokens before the picture [1], text tokens in all [1].
    """

    layout: Int[Tensor, "B columns"]
    staging: Int[Tensor, "B columns"]  # `layout` on the host
    num_text: int  # X, room for text
    num_slots: int  # S
    splice: Stage

    @classmethod
    def build(
        cls,
        picture: Picture,
        chooser: Chooser,
        bucket: Bucket,
        *,
        backbone: Backbone,
        num_newlines: int,
        embed: Callable[[Tensor], Tensor],
        packed: bool,
        capture: bool,
    ) -> "NewlineSplicer":
        """A splicer into that bucket; `num_newlines` of a picture may stay at most."""
        slots, newline = picture.tokens.slots, backbone.newline
        assert slots is not None and newline is not None and bucket.positions.ndim == 2
        k, tokens, device = chooser.keep.shape[1], picture.num_tokens, slots.device
        most, size = k + num_newlines, slots.shape[1]
        room = bucket.length - most
        layout = torch.zeros(bucket.batch, 2 * room + size + 2, dtype=torch.int64, device=device)
        staging = torch.zeros(layout.shape, dtype=torch.int64, pin_memory=capture)
        row_of, rules = backbone.rows_of_slots(slots), backbone.keeps_newlines
        columns, every = torch.arange(bucket.length, device=device), torch.arange(size, device=device).expand_as(slots)
        first_kept = torch.arange(len(slots), device=device)[:, None] * k

        def splice() -> None:
            ids, where_text, where_slots, first, count = layout.split([room, room, size, 1, 1], dim=1)
            held, stay = held_and_newlines(slots, chooser.keep, tokens, newlines=rules, row_of=row_of)
            place = torch.where(stay, stay.cumsum(1) - 1, most)  # what falls away goes to a column that is cut off
            slot = slots.new_zeros(len(slots), most + 1).scatter(1, place, every)[:, :most]  # placeholder at each place
            num_held = stay.sum(1, keepdim=True)
            rank = columns - first  # [B, T]
            visual = (rank >= 0) & (rank < num_held)
            word = torch.where(rank < 0, columns, columns - num_held).clamp(0, room - 1)
            at = slot.gather(1, rank.clamp(0, most - 1))  # placeholder that stands at each column
            source = held.gather(1, at)
            token = room + torch.where(source < 0, k, source - first_kept)  # behind the text; newline is the last
            kept = backbone.project(chooser.kept).to(bucket.embeds.dtype)
            end = newline.to(kept).expand(len(kept), 1, -1)
            bucket.embeds.copy_(take(torch.cat([embed(ids), kept, end], dim=1), torch.where(visual, token, word)))
            original = torch.where(visual, where_slots.gather(1, at), where_text.gather(1, word))
            bucket.positions.copy_(columns.expand_as(original) if packed else original)
            bucket.last.copy_((count + num_held - 1)[:, 0])

        return cls(layout=layout, staging=staging, num_text=room, num_slots=size, splice=Stage(splice, capture=capture))

    def lay_out(
        self,
        ids: Int[Tensor, "R T"],
        mask: Bool[Tensor, "R T"],
        positions: Int[Tensor, "R T"],
        *,
        image_token_id: int,
        pad_id: int,
    ) -> None:
        """Prompts on the host as `layout`, in one copy to the device; rows behind them hold a picture alone."""
        staging, room, size = self.staging, self.num_text, self.num_slots
        staging.zero_()
        staging[:, :room] = pad_id
        for row in range(len(ids)):
            real, where = ids[row][mask[row]], positions[row][mask[row]]
            text = real != image_token_id
            first = int((~text).nonzero()[0])
            if bool(text[first : first + size].any()):
                raise NotCompiled("the placeholders of a picture do not stand side by side")
            count = int(text.sum())
            staging[row, :count], staging[row, room : room + count] = real[text], where[text]
            staging[row, 2 * room : -2] = where[~text]
            staging[row, -2], staging[row, -1] = first, count
        self.layout.copy_(staging, non_blocking=True)
