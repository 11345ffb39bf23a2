"""Nominal numbers of common cards, one line each; a card that is not here is given by hand.

`tflops` is dense float16 or bfloat16 matrix work with float32 accumulation (no sparsity), `bandwidth` of the memory in
GB/s, `memory` in GB, all decimal. Published figures for Ada cards (L40S, L4, RTX 6000 Ada) differ by a factor of two,
and those of the B200's memory by a tenth: check yours, and give it with --tflops or --memory where it differs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card by its nominal numbers."""

    name: str
    tflops: int | float
    bandwidth: int | float
    memory: int | float


GPUS: dict[str, Gpu] = {
    "b200": Gpu("NVIDIA B200", 2250.0, 8000.0, 180.0),
    "h200": Gpu("NVIDIA H200", 989.5, 4800.0, 141.0),
    "h100": Gpu("NVIDIA H100 SXM", 989.5, 3350.0, 80.0),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 756.0, 2000.0, 80.0),
    "a100-80": Gpu("NVIDIA A100 80 GB", 312.0, 2039.0, 80.0),
    "a100-40": Gpu("NVIDIA A100 40 GB", 312.0, 1555.0, 40.0),
    "l40s": Gpu("NVIDIA L40S", 362.0, 864.0, 48.0),
    "rtx-6000-ada": Gpu("NVIDIA RTX 6000 Ada", 364.2, 960.0, 48.0),
    "a6000": Gpu("NVIDIA RTX A6000", 154.8, 768.0, 48.0),
    "rtx-5090": Gpu("NVIDIA GeForce RTX 5090", 209.5, 1792.0, 32.0),
    "rtx-4090": Gpu("NVIDIA GeForce RTX 4090", 165.2, 1008.0, 24.0),
    "rtx-3090": Gpu("NVIDIA GeForce RTX 3090", 71.0, 936.0, 24.0),
    "a10": Gpu("NVIDIA A10", 125.0, 600.0, 24.0),
    "l4": Gpu("NVIDIA L4", 121.0, 300.0, 24.0),
    "v100": Gpu("NVIDIA V100 SXM 32 GB", 125.0, 900.0, 32.0),
    "t4": Gpu("NVIDIA T4", 65.0, 320.0, 16.0),
}


# Words of a card's name that do not distinguish it from others.
IGNORED_WORDS = frozenset([
    "nvidia", "geforce", "tesla", "gpu", "generation", "tensor", "core", "gb", "hbm3",
    "sxm", "sxm2", "sxm3", "sxm4", "sxm5",
])  # fmt: skip


def find_gpu(
    name: str | None,
    *,
    tflops: int | float | None = None,
    bandwidth: int | float | None = None,
    memory: int | float | None = None,
) -> Gpu:
    """The card of that name, with any number replaced by the one given; all three given need no known name."""
    numbers = (tflops, bandwidth, memory)
    if any(number is not None and number <= 0 for number in numbers):
        raise ValueError("a card's numbers are above 0; give --tflops, --bandwidth (GB/s) and --memory (GB) as it has")
    keys = [] if name is None else keys_of(name)
    if len(keys) == 1:
        known = GPUS[keys[0]]
    elif None in numbers:
        raise ValueError(
            f"{unknown(name, keys)}; there are {', '.join(GPUS)}, or give its datasheet with --tflops, --bandwidth "
            "(GB/s) and --memory (GB)"
        )
    else:
        known = Gpu(name or "the card given", 1.0, 1.0, 1.0)
    return Gpu(
        known.name,
        known.tflops if tflops is None else tflops,
        known.bandwidth if bandwidth is None else bandwidth,
        known.memory if memory is None else memory,
    )


def keys_of(name: str) -> list[str]:
    """The cards that a name may mean: the one that has all its words, else those that have all its words and more.

    "RTX4090", "H200 SXM" and "NVIDIA A100 80GB" are one card each, "A100" may be two. Words for a maker or a
    socket do not count; any other word that a card has not ("H200 NVL", "RTX 4090 Laptop", "A100 80GB PCIe") makes it
    another card.
    """
    words = words_of(name)
    whole = [
        key
        for key, gpu in GPUS.items()
        if words >= set(key.split("-")) and words <= {*key.split("-"), *words_of(gpu.name), f"{gpu.memory:g}"}
    ]
    return whole or [key for key in GPUS if words and words < set(key.split("-"))]


def words_of(name: str) -> set[str]:
    """The words of a card's name that distinguish it from others: rtx4090 is rtx and 4090, 80GB is 80."""
    found = re.findall(r"[a-z0-9]+", re.sub(r"rtx(?=\d)", "rtx ", name.lower()))
    return {word.removesuffix("gb") for word in found} - IGNORED_WORDS


def unknown(name: str | None, keys: Sequence[str]) -> str:
    """The beginning of a sentence about a name that is no one card."""
    if name is None:
        return "no card was named"
    squeezed = {key.replace("-", ""): key for key in GPUS}
    close = get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), squeezed, n=3)
    near = list(keys) or [squeezed[key] for key in close]
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"the card {name!r} is {'more than one' if keys else 'not known'}{meant}"


def gpu_of_device(device: str) -> str | None:
    """The key of the card that a results file names, or None: "NVIDIA A100-SXM4-80GB" is a100-80."""
    return next((key for key in keys_of(device) if words_of(device) >= set(key.split("-"))), None)
