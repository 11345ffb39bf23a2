"""How fast scenes are made, packed and drawn, in pictures per second.

python -m diffprune_lab.studies.render --device cpu --out results/render_cpu.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffprune.results import markdown_table, write_results
from diffprune_lab.scenes import make_scene, pack, render


def measure_render(device: str, batch: int, repeats: int) -> list[dict[str, Any]]:
    """One row per step of drawing a batch and one for all of them together, each the median over the repeats."""
    scenes = [make_scene("train", index) for index in range(batch)]
    packed = pack(scenes)
    steps: dict[str, Callable[[int], object]] = {
        "make scenes": lambda turn: [make_scene("train", turn * batch + index) for index in range(batch)],
        "pack": lambda turn: pack(scenes),
        "render": lambda turn: render(packed, device),
        "render with owner map": lambda turn: render(packed, device, owner=True),
        "all together": lambda turn: render(
            pack([make_scene("train", turn * batch + index) for index in range(batch)]), device
        ),
    }
    rows = []
    for name, step in steps.items():
        step(0)  # the first call builds the stores of the device
        seconds = statistics.median(_seconds(step, turn, device) for turn in range(1, repeats + 1))
        rows.append({"name": name, "batch": batch, "ours_ms": 1e3 * seconds, "images_s": batch / seconds})
    return rows


def _seconds(step: Callable[[int], object], turn: int, device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    step(turn)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the results file where one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m diffprune_lab.studies.render", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=256, help="pictures drawn together")
    parser.add_argument("--repeats", type=int, default=9, help="the median of so many is taken")
    parser.add_argument("--out", help="results file to write")
    parser.add_argument("--commit", help="commit to note where there is no git checkout")
    options = parser.parse_args(arguments)
    rows = measure_render(options.device, options.batch, options.repeats)
    print(markdown_table(rows))
    if options.out is not None:
        name = f"render_{torch.device(options.device).type}"
        notes = f"{torch.get_num_threads()} threads; scenes are made by one process"
        write_results(options.out, name=name, rows=rows, commit=options.commit, notes=notes)


if __name__ == "__main__":
    main()
