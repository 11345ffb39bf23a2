"""Benchmarks of the operators: ours beside a plain way to the same result, timed in turns in one run.

python -m diffprune_lab.studies.bench --out results/bench_cpu.json
python -m diffprune_lab.studies.bench --device cuda --out results/bench_gpu.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from diffprune.model import PrunedVLM
from diffprune.nn import Block, BlockSpec, DiagonalBlock
from diffprune.ops import soft_topk
from diffprune.results import write_results
from diffprune.speed.subject import load_subject, picture, with_method
from diffprune.speed.timing import time_ms

NOTES = (
    "Medians of runs taken in turns; operators forward and backward. ratio = reference_ms / ours_ms: above 1 ours is "
    "faster. "
    "Where the reference is torch.sort (forward, the least a closed form needs) ratio = ours_ms / reference_ms."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Two ways to one result, ready to be called.

    Args:
        ours, reference: Run once on prepared inputs.
        is_cost: The reference is a part of our work: the ratio says how many times its cost ours is.
    """

    name: str
    ours: Callable[[], object]
    reference: Callable[[], object]
    is_cost: bool = False


def soft_topk_benchmark(batch: int, num_tokens: int, k: int, device: str) -> Benchmark:
    """Soft top-k, forward and backward, against 40 steps of bisection with the same gradient."""
    logits, upstream = torch.randn(2, batch, num_tokens, device=device)
    logits.requires_grad_()
    return Benchmark(
        name=f"soft_topk [{batch}, {num_tokens}] against bisection",
        ours=lambda: torch.autograd.grad(soft_topk(logits, k, tau=0.5), logits, upstream),
        reference=lambda: torch.autograd.grad(bisection_topk(logits, k, 0.5), logits, upstream),
    )


def sort_benchmark(num_tokens: int, device: str) -> Benchmark:
    """Soft top-k of one long row, forward and backward, against one sort of the same row."""
    logits, upstream = torch.randn(2, 1, num_tokens, device=device)
    logits.requires_grad_()
    return Benchmark(
        name=f"soft_topk [1, {num_tokens}] against torch.sort",
        ours=lambda: torch.autograd.grad(soft_topk(logits, num_tokens // 9, tau=0.5), logits, upstream),
        reference=lambda: logits.detach().sort(dim=-1),
        is_cost=True,
    )


def diagonal_benchmark(batch: int, num_tokens: int, width: int, device: str) -> Benchmark:
    """The diagonal block, forward and backward, against the same block under an identity attention mask."""
    diagonal = DiagonalBlock(BlockSpec(width=width, heads=width // 64, mlp_width=4 * width)).to(device)
    for parameter in diagonal.parameters():  # it starts with zeros, which some hardware multiplies faster
        torch.nn.init.normal_(parameter, std=width**-0.5)
    trained = [parameter for parameter in diagonal.parameters() if parameter.requires_grad]
    x, upstream = torch.randn(2, batch, num_tokens, width, device=device)
    identity = torch.eye(num_tokens, dtype=torch.bool, device=device)
    return Benchmark(
        name=f"DiagonalBlock [{batch}, {num_tokens}, {width}] against an identity mask",
        ours=lambda: torch.autograd.grad(diagonal(x), trained, upstream),
        reference=lambda: torch.autograd.grad(masked_block(diagonal.block, x, identity), trained, upstream),
    )


def ask_benchmark(device: str, *, backbone: str = "scenes-llava", keep: int = 64, new_tokens: int = 8) -> Benchmark:
    """One question about one picture, answered with `keep` of the visual tokens, against all of them.

    Everything is in it: pixels prepared, the tower, the scorer (random weights: its choice does not matter here, its
    time does), the language model and an answer of fixed length.
    """
    full = load_subject(backbone, random_weights=False, tiny=False, device=device, dtype=torch.float32)
    pruned = with_method(full, "diffprune", keep=keep, dtype=torch.float32)
    image = picture(0, (192, 192))

    def ask(vlm: PrunedVLM) -> object:
        return vlm.generate(
            [image],
            "What is in the picture?",
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            return_ids=True,
        )

    return Benchmark(
        name=f"ask {backbone}, {keep} tokens against all, {new_tokens} new",
        ours=lambda: ask(pruned),
        reference=lambda: ask(full),
    )


def benchmarks(device: str) -> Iterator[Benchmark]:
    """Every benchmark, made just before it is run."""
    yield soft_topk_benchmark(64, 576, 64, device)
    yield soft_topk_benchmark(8, 2880, 320, device)
    yield sort_benchmark(1_000_000, device)
    yield diagonal_benchmark(1, 576, 1024, device)
    yield ask_benchmark(device)


# --- references -------------------------------------------------------------------------------------------------------


def bisection_topk(logits: Float[Tensor, "B N"], k: int, tau: float) -> Float[Tensor, "B N"]:
    """What `soft_topk` gives, with its threshold found by 40 halvings of an interval."""
    return _Bisection.apply(logits, k, tau)  # type: ignore[return-value]


class _Bisection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, tau: float) -> Tensor:
        u = (logits.double() - logits.amax(-1, keepdim=True)) / tau
        low = u.amin(-1, keepdim=True) - 20.0
        high = torch.full_like(low, 20.0)
        for _ in range(40):
            middle = 0.5 * (low + high)
            is_high = _laplace(u - middle).sum(-1, keepdim=True) > k
            low, high = torch.where(is_high, middle, low), torch.where(is_high, high, middle)
        z = u - 0.5 * (low + high)
        ctx.save_for_backward(z)
        ctx.tau = tau
        return _laplace(z).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        slope = 0.5 * (-z.abs()).exp()
        share = slope / slope.sum(-1, keepdim=True)
        (grad,) = grad_outputs
        grad_logits = slope * (grad - (share * grad).sum(-1, keepdim=True)) / ctx.tau
        return grad_logits.to(grad.dtype), None, None


def _laplace(z: Tensor) -> Tensor:
    tail = 0.5 * (-z.abs()).exp()
    return torch.where(z > 0, 1 - tail, tail)


def masked_block(block: Block, x: Float[Tensor, "B N D"], mask: Bool[Tensor, "N N"]) -> Float[Tensor, "B N D"]:
    """The block with full attention under a mask, as a stock implementation runs it."""
    attention, normed = block.attention, block.norm1(x)
    query, key, value = (
        project(normed).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for project in (attention.query, attention.key, attention.value)
    )
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    x = x + attention.out(attended.transpose(1, 2).flatten(-2))
    return x + block.mlp(block.norm2(x))


# --- timing -----------------------------------------------------------------------------------------------------------


def run(benchmark: Benchmark, device: str, seconds: float) -> dict[str, Any]:
    """One row: medians of both, timed in turns so that whatever else the machine does meets both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):  # the first calls load kernels and fill caches
        benchmark.ours()
        benchmark.reference()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[0]) < 5:
        for spent, call in zip(times, (benchmark.ours, benchmark.reference), strict=True):
            spent.append(time_ms(call, device))
    ours, reference = map(statistics.median, times)
    ratio = ours / reference if benchmark.is_cost else reference / ours
    return {"name": benchmark.name, "ours_ms": ours, "reference_ms": reference, "ratio": ratio, "runs": len(times[0])}


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """The rows as a table on the terminal."""
    table = Table("benchmark", "ours ms", "reference ms", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row["name"], *(f"{row[key]:.3f}" for key in ("ours_ms", "reference_ms", "ratio")))
    console.print(table)


def main(arguments: list[str] | None = None) -> None:
    """Run every benchmark and write the results file."""
    parser = argparse.ArgumentParser(
        prog="python -m diffprune_lab.studies.bench", description=main.__doc__, epilog=NOTES
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="results file to write, for example results/bench_cpu.json"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each benchmark (default: %(default)s)")
    parser.add_argument("--commit", help="commit to name in the file, where there is no git checkout")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; leave the option out to measure the CPU")
    torch.manual_seed(0)
    console = Console()
    rows: list[dict[str, Any]] = []
    for benchmark in benchmarks(options.device):
        console.print(f"{benchmark.name} ...")
        rows.append(run(benchmark, options.device, options.seconds))
    print_table(rows, console)
    write_results(options.out, name=options.out.stem, rows=rows, seeds=[0], commit=options.commit, notes=NOTES)
    console.print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
