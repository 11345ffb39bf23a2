"""How alike the tokens at the two ends of a ranking are, as numbers and as a figure."""

from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from diffprune.atomic import replacing
from diffprune.model import PrunedVLM
from diffprune.types import ImageSelection


def end_similarity(features: Float[Tensor, "N D"], logits: Float[Tensor, " N"], k: int) -> Float[Tensor, "M M"]:
    """Cosine similarities of [top k; bottom k] tokens of a ranking (paper, last figure); M = 2k, at most N."""
    order = logits.argsort(descending=True, stable=True)
    k = min(k, len(order) // 2)
    chosen = torch.cat([order[:k], order[-k:]])
    unit = torch.nn.functional.normalize(features[chosen].float(), dim=-1)
    return unit @ unit.T


def compare_ends(
    vlm: PrunedVLM, image: Image.Image, selection: ImageSelection
) -> tuple[Float[Tensor, "M M"], dict[str, float]]:
    """The similarity matrix of the top and bottom of a ranking, and the mean similarity within each end."""
    if selection.logits is None:
        raise ValueError(f"method {vlm.method.name!r} has no ranking, so it has no top and bottom to compare")
    tokens = vlm.encode(vlm.prepare([image], [""]))
    assert tokens is not None
    k = min(len(selection.keep), len(selection.logits) // 2)
    if k < 2:
        raise ValueError(f"keep={len(selection.keep)} leaves no two ends of at least 2 tokens to compare; keep more")
    matrix = end_similarity(tokens.x[0, : len(selection.logits)], selection.logits, k).cpu()
    off_diagonal = ~torch.eye(k, dtype=torch.bool)
    return matrix, {
        "top_similarity": float(matrix[:k, :k][off_diagonal].mean()),
        "bottom_similarity": float(matrix[k:, k:][off_diagonal].mean()),
    }


def save_matrix(vlm: PrunedVLM, image: Image.Image, selection: ImageSelection, path: Path) -> dict[str, float]:
    """Draw the similarity matrix beside the two ends of the ranking; the mean similarity within each end."""
    from matplotlib.figure import Figure

    matrix, means = compare_ends(vlm, image, selection)
    assert selection.logits is not None and selection.boxes is not None
    k = len(matrix) // 2
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(image)
    order = selection.logits.argsort(descending=True, stable=True).cpu()
    for indices, colour in ((order[:k], "red"), (order[-k:], "blue")):
        for x0, y0, x1, y1 in selection.boxes.cpu()[indices].tolist():
            left.add_patch(_rectangle(x0, y0, x1, y1, colour))
    left.set_title(f"top {k} red, bottom {k} blue")
    left.axis("off")
    shown = right.imshow(matrix.numpy(), vmin=-1, vmax=1, cmap="coolwarm")
    right.axhline(k - 0.5, color="black", linewidth=0.8)
    right.axvline(k - 0.5, color="black", linewidth=0.8)
    right.set_title(f"similarity: top {means['top_similarity']:.2f}, bottom {means['bottom_similarity']:.2f}")
    figure.colorbar(shown, ax=right)
    with replacing(path) as new:
        figure.savefig(new, dpi=150)
    return means


def _rectangle(x0: float, y0: float, x1: float, y1: float, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor=colour, alpha=0.45, edgecolor="none")
