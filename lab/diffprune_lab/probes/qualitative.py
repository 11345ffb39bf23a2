"""How alike are the tokens at the top of a ranking, and at its bottom? (paper, last figure: one picture)

The paper shows one picture and calls it illustrative. Here the figure is drawn of the first of many test pictures, and
the mean similarity within each end is taken over all of them.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from diffprune.model import PrunedVLM
from diffprune.viz import compare_ends, save_matrix
from diffprune_lab.probes.store import Row, interval
from diffprune_lab.scenes import make_scene
from diffprune_lab.scenes.encode import own_sizes, scene_images

NAME = "qualitative"
NOTE = (
    "similarity: mean cosine between different tokens within the top and the bottom of a ranking, as many in each as "
    "are kept; difference: bottom minus top by picture; lower_top: percent of pictures whose top is less alike than "
    "their bottom; test scenes"
)
PRUNER = "scenes-llava-diffprune"
RANKINGS = ("cls_attention", "feature_norm")  # without training, around the same model
SIZES = {"full": 100, "tiny": 3}  # pictures
KEEP = 64


def run(weights: str | None, count: int, device: str, figure: Path) -> tuple[list[Row], str]:
    """(rows, notes): a row for the pruner and for each ranking without training; draws the pruner's first picture."""
    pruner = weights or PRUNER
    first = PrunedVLM.from_pretrained(pruner, keep=KEEP)
    first.base.to(device)
    first.method.to(device)
    scenes = [make_scene("test", index) for index in range(count)]
    pictures = scene_images(scenes, own_sizes(first))
    save_matrix(first, pictures[0], first.select([pictures[0]], [""])[0], figure)
    others = [first.with_method(name) for name in RANKINGS]
    names = [Path(pruner).name, *RANKINGS]
    return [compare(vlm, pictures, name) for vlm, name in zip((first, *others), names, strict=True)], NOTE


def compare(vlm: PrunedVLM, pictures: Sequence, name: str) -> Row:
    """Means over pictures of the similarity within each end of the ranking, and of their difference."""
    found = [compare_ends(vlm, picture, vlm.select([picture], [""])[0])[1] for picture in pictures]
    top, bottom = ([ends[f"{end}_similarity"] for ends in found] for end in ("top", "bottom"))
    differences = [low - high for low, high in zip(bottom, top, strict=True)]
    return {
        "ranking": name,
        "keep": vlm.budget.keep,
        "pictures": len(pictures),
        "top_similarity": fmean(top),
        "bottom_similarity": fmean(bottom),
        "difference": fmean(differences),
        "ci95": interval(differences),
        "lower_top": 100 * fmean(value > 0 for value in differences),
    }
