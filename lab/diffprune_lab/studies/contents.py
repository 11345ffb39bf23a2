"""What every visual token of a picture shows, in both worlds: its thing or its ground, and the other things' colors."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffprune_lab.scarce import draw as scarce_draw
from diffprune_lab.scarce import grounds as scarce_grounds
from diffprune_lab.scarce import masks, tokens
from diffprune_lab.scarce.world import Scene as ScarceScene
from diffprune_lab.scarce.world import make_scene as make_scarce
from diffprune_lab.scenes import atlas
from diffprune_lab.scenes import draw as scenes_draw
from diffprune_lab.scenes.world import Scene as FirstScene
from diffprune_lab.scenes.world import make_scene

NONE = -1


class Contents(NamedTuple):
    """Of each token, with C colors of things.

    Attributes:
        on_ground: Whether no pixel of it belongs to a thing or a sign.
        on_thing: Whether at least half of it is one thing.
        own: What it shows itself: the color of its thing, or on the ground what that is made of; else -1.
        others: Which colors there are among the things of the picture of which it shows no pixel.
    """

    on_ground: Bool[Tensor, "B N"]
    on_thing: Bool[Tensor, "B N"]
    own: Int[Tensor, "B N"]
    others: Bool[Tensor, "B N C"]


def first_world(scenes: Sequence[FirstScene], patch: int, device: torch.device) -> Contents:
    """Contents of tokens of `patch` pixels a side; a ground is known by the first of its two colors."""
    drawn = scenes_draw.render(scenes_draw.pack(scenes), device, owner=True)
    assert isinstance(drawn, tuple)
    owner = tokens.patches(drawn[1].to(torch.int16), patch).long()  # [B, N, P]; things have the first numbers
    colors = [[[thing.color] for thing in scene.things] for scene in scenes]
    counts, others = _things(owner, colors, len(atlas.COLORS))
    ground = torch.tensor([scene.ground[1] for scene in scenes], device=device)[:, None].expand(counts.shape[:2])
    return _contents(owner, counts, colors, torch.zeros_like(ground), ground, others)


def second_world(scenes: Sequence[ScarceScene], patch: int, device: torch.device) -> Contents:
    """Contents of this world's tokens; a ground is known by the texture in the token's middle."""
    assert patch == tokens.PATCH
    _, labels, regions = scarce_draw.render(scarce_draw.pack(scenes), device)
    owner = tokens.patches(labels).long() // scarce_draw.PARTS
    colors = [[[thing.top, thing.bottom] for thing in scene.things] for scene in scenes]
    counts, others = _things(owner, colors, len(masks.COLORS))
    textures = torch.tensor([[region[0] for region in scene.regions] for scene in scenes], device=device)
    ground = textures.gather(1, tokens.patches(regions)[:, :, patch * (patch + 1) // 2].long())
    return _contents(owner, counts, colors, tokens.read_tokens(labels).lower.long(), ground, others)


class World(NamedTuple):
    """How scenes are made, what their tokens show, and how many colors and grounds there are."""

    make: Callable[..., Any]
    contents: Callable[[Sequence[Any], int, torch.device], Contents]
    colors: int
    grounds: int


WORLDS = {
    "scenes": World(make_scene, first_world, len(atlas.COLORS), len(atlas.GROUND_COLORS)),
    "scarce": World(make_scarce, second_world, len(masks.COLORS), scarce_grounds.TEXTURES),
}

Colors = Sequence[Sequence[Sequence[int]]]  # of the parts of each thing of each picture


def _things(
    owner: Int[Tensor, "B N P"], colors: Colors, num_colors: int
) -> tuple[Int[Tensor, "B N T"], Bool[Tensor, "B N C"]]:
    """Pixels of each thing in each token, and the colors of the things of which there is none."""
    most = max(len(things) for things in colors)
    shown = torch.zeros(len(colors), most, num_colors, dtype=torch.bool)
    for row, things in enumerate(colors):
        for place, some in enumerate(things):
            shown[row, place, list(some)] = True
    counts = torch.stack([(owner == place + 1).sum(-1) for place in range(most)], -1)
    others = torch.einsum("bnt,btc->bnc", (counts == 0).float(), shown.to(owner.device).float())
    return counts, others > 0


def _contents(
    owner: Int[Tensor, "B N P"],
    counts: Int[Tensor, "B N T"],
    colors: Colors,
    part: Int[Tensor, "B N"],
    ground: Int[Tensor, "B N"],
    others: Bool[Tensor, "B N C"],
) -> Contents:
    """All of it from the pixels of each thing, the part of it that each token shows, and the ground under it."""
    parts, most = len(colors[0][0]), counts.shape[-1]
    table = torch.tensor([[*chain.from_iterable(row), *[0] * parts * (most - len(row))] for row in colors])
    pixels, mine = counts.max(-1)
    on_thing, on_ground = 2 * pixels >= owner.shape[-1], (owner == 0).all(-1)
    color = table.to(owner.device).gather(1, parts * mine + part)
    own = torch.where(on_ground, ground, torch.where(on_thing, color, NONE))
    return Contents(on_ground=on_ground, on_thing=on_thing, own=own, others=others)
