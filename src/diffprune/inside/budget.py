"""How many visual tokens each decoder layer holds: the two ways to count "K tokens" of a method inside the LLM.

"exact" means K tokens after the last cut. "average" means K tokens in the mean over all layers, the full ones before
the first cut included; published tables mix both.
"""

import math
from collections.abc import Sequence

Stages = dict[int, int]  # visual tokens left from that layer on

RELEASE_DEPTH = 32  # decoder layers of the models the releases name their layers for


def scale_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers at the same depth of a model of another size, as a release names them for 32 layers."""
    return tuple(math.floor(layer * num_layers / RELEASE_DEPTH + 0.5) for layer in layers)


def check_cut(layer: int, num_layers: int, *, first: int = 1) -> int:
    """The layer, where tokens can be dropped before it."""
    if layer < first:
        raise ValueError(
            f"layer={layer} comes before any attention was paid; give {first} or more, or the method random"
        )
    if layer >= num_layers:
        raise ValueError(f"layer={layer} is past the model's {num_layers} layers; give a smaller one")
    return layer


def layer_average(stages: Stages, num_layers: int, num_visual: int) -> float:
    """Visual tokens of a layer, mean over the layers."""
    held, total = num_visual, 0
    for layer in range(num_layers):
        held = stages.get(layer, held)
        total += held
    return total / num_layers


def geometric_stages(cuts: Sequence[int], num_visual: int, keep: int) -> Stages:
    """Every cut leaves the same share of what is there, the last one `keep`."""
    if num_visual == 0:
        return dict.fromkeys(cuts, 0)
    share = min(1.0, keep / num_visual)
    counts = [math.floor(num_visual * share ** ((i + 1) / len(cuts)) + 0.5) for i in range(len(cuts))]
    return dict(zip(cuts, counts, strict=True))


def average_stages(cuts: Sequence[int], num_layers: int, num_visual: int, average: int) -> Stages:
    """Every cut leaves the same share of what is there, such that the mean over layers is `average` (to rounding)."""
    if average >= num_visual:
        return dict.fromkeys(cuts, num_visual)
    first = min(cuts)
    smallest = math.ceil((first * num_visual + num_layers - first) / num_layers)
    if average < smallest:
        raise ValueError(
            f"keep={average} cannot be the mean over {num_layers} layers: the first {first} hold all {num_visual} "
            f"tokens; give {smallest} or more, or budget='exact'"
        )
    ends = [*cuts[1:], num_layers]
    widths = [end - start for start, end in zip(cuts, ends, strict=True)]
    wanted = num_layers * average - first * num_visual  # what the layers after the first cut hold together
    if len(cuts) == 1:  # whole numbers throughout: R = (L * average - c * N) / (L - c), halves up
        return {first: (2 * wanted + widths[0]) // (2 * widths[0])}
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        held = sum(width * max(1.0, num_visual * share ** (i + 1)) for i, width in enumerate(widths))
        low, high = (low, share) if held > wanted else (share, high)
    counts = [max(1, math.floor(num_visual * low ** (i + 1) + 0.5)) for i in range(len(cuts))]
    return dict(zip(cuts, counts, strict=True))
