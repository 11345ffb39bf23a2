"""How far logits in fewer bits are from those in 32: of the decoder at real size with random weights, on its device.

    python -m diffprune.speed.precision --backbone llava-1.5-7b --out results/fp8.json

`error` is the length of the difference over that of the logits in float32, mean over prompts; `same_first` the share of
prompts whose likeliest token is the same. What 8 bits cost is to be read beside what 16 cost already.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.fast.buckets import CacheStore
from diffprune.fast.decoder import Decoder, DecoderWeights, in_eight_bits, read_decoder
from diffprune.fast.precision import why_not_eight_bits
from diffprune.results import write_results
from diffprune.speed.subject import load_subject

NUM_PROMPTS = 16
LENGTH = 104  # 64 visual and 40 text tokens


def errors(backbone: str, *, tiny: bool, device: str) -> list[dict[str, Any]]:
    """One row for each precision: the model's 16 bits, and 8 of them."""
    subject = load_subject(backbone, random_weights=True, tiny=tiny, device=device, dtype=torch.float32)
    weights = read_decoder(subject.base, subject.backbone.language_model, fuse=False)
    generator = torch.Generator().manual_seed(0)
    scale = subject.base.get_input_embeddings().weight.std().cpu()
    embeds = torch.randn(NUM_PROMPTS, LENGTH, len(weights.final_norm), generator=generator) * scale
    axes = 1 if subject.backbone.plain_positions else 3
    positions = torch.arange(LENGTH).expand(*([3] if axes == 3 else []), NUM_PROMPTS, LENGTH).to(device)
    exact = logits(weights, embeds.to(device), positions)
    rows = []
    subject.base.to(torch.float16)
    half = read_decoder(subject.base, subject.backbone.language_model, fuse=True)
    for precision in ("float16", "fp8"):
        own = half if precision == "float16" else in_eight_bits(half)
        found = logits(own, embeds.to(device, torch.float16), positions)
        rows.append(
            {
                "backbone": backbone,
                "precision": precision,
                "error": float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()),
                "same_first": float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
                "prompts": NUM_PROMPTS,
                "num_columns": LENGTH,
            }
        )
    return rows


@torch.no_grad()
def logits(weights: DecoderWeights, embeds: Float[Tensor, "B T L"], positions: Tensor) -> Float[Tensor, "B V"]:
    """Logits after the last column of each prompt, by the decoder as functions, not compiled."""
    decoder = Decoder(weights, lambda function: function)
    store = CacheStore(decoder, embeds.device, embeds.dtype)
    batch, length = embeds.shape[:2]
    store.reserve(store.numel(batch, length))
    last = torch.full((batch,), length - 1, device=embeds.device)
    return decoder.prefill(embeds, positions, last, store.view(batch, [length] * store.num_layers)).float()


def main() -> None:
    parser = argparse.ArgumentParser(description="How far logits in 16 and in 8 bits are from those in 32.")
    parser.add_argument("--backbone", default="llava-1.5-7b")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and (reason := why_not_eight_bits(device)):
        raise SystemExit(f"nothing to compare: {reason}")
    rows = errors(given.backbone, tiny=given.size == "tiny", device=given.device)
    for row in rows:
        print(f"{row['backbone']}, {row['precision']}: error {row['error']:.2e}, same first {row['same_first']:.3f}")
    if given.out is not None:
        name = None if given.device.startswith("cuda") else "CPU"
        notes = (__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[2].replace("\n", " ").strip()
        write_results(
            given.out, name=given.out.stem, rows=rows, commit=given.commit, device=name, seeds=[0], notes=notes
        )


if __name__ == "__main__":
    main()
