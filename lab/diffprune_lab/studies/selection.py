"""How long each method takes to choose, on plain tensors, side by side with DiffPrune's scorer in one run.

python -m diffprune_lab.studies.selection --device cuda --out results/selection_time.json
python -m diffprune_lab.studies.selection --device cuda --methods gots,divprune --reference --out out/greedy.json
python -m diffprune_lab.studies.selection --size tiny --out out/selection_time.json
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from diffprune.fast.graphs import capturing, waits_for_device
from diffprune.methods.base import MergingPruner, Pruner
from diffprune.methods.options import build_method, split_methods
from diffprune.nn import BlockSpec
from diffprune.ops.on_gpu import reference
from diffprune.registry import METHODS
from diffprune.results import source_commit, write_results
from diffprune.speed.timing import time_ms
from diffprune.types import Grid, VisualTokens

NOTES = (
    "Selection alone, from encoder features (float16 on a GPU) to kept indices, in ms: the median of `calls` calls "
    "after a warm-up, launched from Python (pruner_ms) and replayed as a CUDA graph (graph_ms; empty where the method "
    "waits for the device on its way, or takes over 0.2 s). at_once: images that fit into the memory at a time, where "
    "fewer than the batch; the time is all of them's. launches counts GPU kernels and copies of one call. diffprune is "
    "the scorer of two blocks. steps: torch marks greedy choices made step by step by plain torch, without the kernels."
)
CALLS = 30
SECONDS = 1.0  # for the calls of one method at one shape
LONGEST_MS = 1_000.0  # a call that takes longer is made once
PATIENCE_MS = 60_000.0  # a call that would take longer, judged by its single image, is not made
LONGEST_REPLAY_MS = 200.0  # nor captured, which takes three calls
REFERENCE_MS = 4_000.0  # nor by the reference, where a kernel is measured
LAUNCH_SECONDS = 10.0  # beyond the rest, to count launches
TEXT_TOKENS = 32

# These are measured at all shapes before any slower method is, so that a short run has most of the rows.
# fmt: off
FAST = (
    "diffprune", "random", "uniform_grid", "centre", "feature_norm", "fastervlm", "holov", "prunesid", "visionselector",
    "gumbel_ste", "dynamicvit", "visionzip", "tome", "average_pool",
)
SLOW = (  # fastest first
    "diffprune-diverse", "divprune", "gots", "cdpruner", "mmtok", "text_cluster", "oc_vtp", "vispruner", "agilepruner",
)
GREEDY = ("diffprune-diverse", "divprune", "gots", "cdpruner", "mmtok")  # have kernels
# fmt: on


@dataclass(frozen=True, slots=True)
class Shape:
    """One size to measure: B images of N tokens on a grid, of which K stay."""

    batch: int
    grid: Grid
    num_kept: int

    @property
    def num_visual(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured: shapes, and the widths of the features."""

    shapes: tuple[Shape, ...]
    block: BlockSpec
    language_width: int


_GRIDS: tuple[tuple[Grid, int], ...] = (((24, 24), 64), ((48, 60), 320), ((128, 128), 1820))


def _real_size(grids: Sequence[tuple[Grid, int]]) -> Size:
    """Those grids with the widths of LLaVA-1.5-7B."""
    block = BlockSpec(width=1024, heads=16, mlp_width=4096, activation="quick_gelu")
    return Size(tuple(Shape(batch, grid, kept) for grid, kept in grids for batch in (1, 32)), block, 4096)


SIZES = {
    "full": _real_size(_GRIDS),
    "middle": _real_size(_GRIDS[:2]),
    "large": _real_size(_GRIDS[2:]),
    "tiny": Size(
        (Shape(1, (4, 6), 8), Shape(2, (6, 8), 12)),
        BlockSpec(width=16, heads=2, mlp_width=32, activation="quick_gelu"),
        24,
    ),
}


def make_tokens(shape: Shape, size: Size, device: str, dtype: torch.dtype) -> VisualTokens:
    """Seeded random tokens with everything a method before the language model may ask for."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(shape.batch, *sizes, generator=generator, device=device, dtype=dtype)

    count, width, language_width = shape.num_visual, size.block.width, size.language_width
    return VisualTokens(
        x=drawn(count, width),
        grid=(shape.grid,) * shape.batch,
        seeds=tuple(range(shape.batch)),
        cls_attention=drawn(count).softmax(-1),
        keys=drawn(count, width),
        projected=drawn(count, language_width),
        text=drawn(TEXT_TOKENS, language_width),
    )


def make_methods(block: BlockSpec, device: str, dtype: torch.dtype, wanted: Sequence[str] = ()) -> Iterator[Pruner]:
    """Every method that chooses before the language model, learned ones with random weights; variants of one once.

    Args:
        wanted: These alone; none of them: all.
    """
    names = [name for name in METHODS.names() if not METHODS.get(name).is_inside and name != "full"]
    order = (*FAST, *SLOW)
    ranked = sorted(names, key=lambda name: order.index(name) if name in order else len(order))
    seen: set[type] = set()
    for name in ranked:
        cls = METHODS.get(name)
        if cls in seen or (wanted and name not in wanted):
            continue
        seen.add(cls)
        torch.manual_seed(0)
        method = build_method(name, block=block).eval()
        for parameter in method.parameters():
            nn.init.normal_(parameter, std=0.02)
        yield method.to(device, dtype if method.trained else torch.float32)


def selection_of(method: Pruner, parts: Sequence[VisualTokens], num_kept: int) -> Callable[[], object]:
    """One choice for each part of the images, ready to be called; a merging method makes its tokens."""
    run = method.reduce if isinstance(method, MergingPruner) else method.select

    @torch.inference_mode()
    def call() -> object:
        return [run(tokens, num_kept) for tokens in parts]

    return call


def split_images(tokens: VisualTokens, at_once: int) -> list[VisualTokens]:
    """The images in parts of at most `at_once`."""
    count = len(tokens)
    if at_once >= count:
        return [tokens]
    return [tokens.take(range(first, min(first + at_once, count))) for first in range(0, count, at_once)]


def measure(call: Callable[[], object], device: str, seconds: float) -> dict[str, Any]:
    """The median time of a call and how many were made, in about so many seconds."""
    stop = time.monotonic() + seconds
    first = time_ms(call, device)  # loads kernels and fills caches, which is little beside a long call
    if first > LONGEST_MS:
        return {"pruner_ms": first, "calls": 1}
    times = [time_ms(call, device)]
    while len(times) < CALLS and time.monotonic() < stop:
        times.append(time_ms(call, device))
    return {"pruner_ms": statistics.median(times), "calls": len(times)}


def graph_ms(call: Callable[[], object], device: str, calls: int) -> float:
    """The median time of a replay of the call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as capturing does, away from the default stream
        call()
    torch.cuda.current_stream().wait_stream(side)
    with capturing() as graph:
        call()
    graph.replay()
    return statistics.median(time_ms(graph.replay, device) for _ in range(calls))


def count_launches(call: Callable[[], object]) -> int:
    """Kernels and copies of one call on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(str(event.device_type).endswith("CUDA") for event in profile.events() or ())


class Run:
    """The rows of one run, written as they come."""

    def __init__(
        self,
        size: Size,
        device: str,
        seconds: float,
        save: Callable[[list[dict[str, Any]]], None],
        *,
        methods: Sequence[str] = (),
        compare: bool = False,
    ) -> None:
        self.size = size
        self.device = device
        self.dtype = torch.float16 if device == "cuda" else torch.float32
        self.deadline = time.monotonic() + seconds
        self.save = save
        self.rows: list[dict[str, Any]] = []
        self.captures = device == "cuda"  # until a capture fails, after which the allocator is not to be trusted
        self.compare = compare  # greedy choices without their kernels as well
        self.methods = list(make_methods(size.block, device, self.dtype, methods))

    def run(self) -> list[dict[str, Any]]:
        fast = [method for method in self.methods if method.name in FAST]
        slow = [method for method in self.methods if method.name not in FAST]
        for methods, shape in itertools.product((fast, slow), self.size.shapes):
            tokens = make_tokens(shape, self.size, self.device, self.dtype)
            for method in methods:
                self.rows.append(self.row(method, tokens, shape))
                self.save(self.rows)
                if self.compare and method.name in GREEDY:
                    with reference():
                        self.rows.append(self.row(method, tokens, shape, steps="torch"))
                    self.save(self.rows)
            del tokens
            self.free()
        if self.device == "cuda":
            self.add_launches()
            self.save(self.rows)
        return self.rows

    def row(self, method: Pruner, tokens: VisualTokens, shape: Shape, **marks: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "method": method.name,
            "num_visual": shape.num_visual,
            "num_kept": shape.num_kept,
            "batch": shape.batch,
            "calls": 0,
            **marks,
        }
        if time.monotonic() > self.deadline:
            return row | {"skipped": "no time was left"}
        if (reason := self.too_long(row)) is not None:
            return row | {"skipped": reason}
        at_once = shape.batch
        while at_once:
            call = selection_of(method, split_images(tokens, at_once), shape.num_kept)
            try:
                row |= measure(call, self.device, seconds=SECONDS)
            except torch.OutOfMemoryError:
                at_once //= 2
                self.free()
                continue
            except RuntimeError as error:  # one method's limits are no reason to lose the others
                return row | {"skipped": str(error).partition("\n")[0][:120]}
            if at_once < shape.batch:
                row["at_once"] = at_once
            if self.captures:
                row["graph_ms"] = self.captured(call, row)
            self.free()
            return row
        return row | {"skipped": "the GPU's memory is too small"}

    def too_long(self, planned: dict[str, Any]) -> str | None:
        """Why a batch need not be tried: its single image was far too slow, too large, or not measured at all."""

        def key(row: dict[str, Any]) -> tuple[Any, ...]:
            return row["method"], row.get("steps"), row["num_visual"]

        single = next((row for row in self.rows if key(row) == key(planned) and row["batch"] == 1), None)
        if single is None or planned["batch"] == 1:
            return None
        if "skipped" in single:
            return f"for one image: {single['skipped']}"
        patience = REFERENCE_MS if "steps" in planned else PATIENCE_MS
        if single["pruner_ms"] * planned["batch"] > patience * 4:  # a batch is some times as fast as its images
            return f"one image alone takes {single['pruner_ms'] / 1e3:.1f} s"
        return None

    def captured(self, call: Callable[[], object], row: dict[str, Any]) -> float | None:
        """The time of a replay; None where the call waits for the device, takes long, or has no room for a copy."""
        if row["pruner_ms"] > LONGEST_REPLAY_MS:
            return None
        self.free()
        try:
            replays = max(1, min(10, int(2 * LONGEST_REPLAY_MS / row["pruner_ms"])))
            return None if waits_for_device(call) else graph_ms(call, self.device, replays)
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            self.captures = False
            Console(stderr=True).print(f"{row['method']}: no graph, and none is tried from here on: {error}")
            return None

    def add_launches(self) -> None:
        """Counted at the end and for the first shape only: the profiler slows everything behind it."""
        shape = self.size.shapes[0]
        tokens = make_tokens(shape, self.size, self.device, self.dtype)
        own = {row["method"]: row for row in reversed(self.rows)}  # of each method the first row, at the first shape
        for method in self.methods:
            row = own[method.name]
            if time.monotonic() > self.deadline + LAUNCH_SECONDS or "pruner_ms" not in row:
                continue
            try:
                row["launches"] = count_launches(selection_of(method, [tokens], shape.num_kept))
            except RuntimeError as error:
                Console(stderr=True).print(f"launches are not counted: {error}")
                return

    def free(self) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    """Measure every method at every size and write the results file."""
    parser = argparse.ArgumentParser(
        prog="python -m diffprune_lab.studies.selection", description=main.__doc__, epilog=NOTES
    )
    parser.add_argument("--out", type=Path, required=True, help="results file, for example results/selection_time.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--seconds", type=float, default=90.0, help="time for all of it (default: %(default)s)")
    parser.add_argument("--methods", default="", help="comma-separated: these alone (default: all)")
    parser.add_argument("--reference", action="store_true", help="measure greedy choices without their kernels as well")
    parser.add_argument("--commit", help="commit to name in the file, where there is no git checkout")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; leave the option out to measure the CPU")
    wanted = split_methods(options.methods)
    for name in wanted:
        if METHODS.get(name).is_inside or name == "full":
            parser.error(f"--methods: {name} chooses nothing before the language model; leave it out")
    commit = options.commit or source_commit()

    def save(rows: list[dict[str, Any]]) -> None:
        write_results(options.out, name=options.out.stem, rows=rows, seeds=[0], commit=commit, notes=NOTES)

    size = SIZES[options.size]
    rows = Run(size, options.device, options.seconds, save, methods=wanted, compare=options.reference).run()
    console = Console()
    for row in rows:
        shape = f"{row['num_visual']:6} x {row['batch']:<3}{row.get('steps', '')}"
        took = row.get("skipped") or f"{row['pruner_ms']:9.3f} ms, graph {row.get('graph_ms')}"
        console.print(f"{row['method']:18} {shape:18} {took}")
    console.print(f"wrote {len(rows)} rows to {options.out}")


if __name__ == "__main__":
    main()
