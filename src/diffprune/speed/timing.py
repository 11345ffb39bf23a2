"""How long a call takes: between events on a GPU, by the clock on a CPU; medians after a warm-up."""

import statistics
import time
from collections.abc import Callable

import torch

RUNS = 30
WARM_UP = 3
FEWEST = 10  # runs, however little time is left
WARM_UP_SECONDS = 0.5  # after which a call is warm, however few there were


def time_ms(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call: between events on a GPU, by the clock on a CPU."""
    if not device.startswith("cuda"):
        return wall_ms(call, device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def wall_ms(call: Callable[[], object], device: str) -> float:
    """Milliseconds by the clock, from an idle device until the call returns: for calls that end with a result here."""
    synchronize(device)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def times_ms(
    call: Callable[[], object],
    device: str,
    *,
    runs: int = RUNS,
    warm_up: int = WARM_UP,
    seconds: float = float("inf"),
    timer: Callable[[Callable[[], object], str], float] = time_ms,
) -> list[float]:
    """Times of `runs` calls after a warm-up; of fewer, but `FEWEST` at least, where they would take more `seconds`."""
    warm = time.monotonic() + WARM_UP_SECONDS
    for _ in range(warm_up):
        call()
        synchronize(device)
        if time.monotonic() > warm:
            break
    stop = time.monotonic() + seconds
    times: list[float] = []
    while len(times) < min(runs, FEWEST) or (len(times) < runs and time.monotonic() < stop):
        times.append(timer(call, device))
    return times


def median_ms(call: Callable[[], object], device: str, *, runs: int = RUNS) -> float:
    """Median of `runs` calls after a warm-up."""
    return statistics.median(times_ms(call, device, runs=runs))


def synchronize(device: str) -> None:
    """Wait until the device has nothing left to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def copy_bandwidth(device: str, *, size: int | None = None) -> float:
    """Bytes per second of a copy within the device's memory, reads and writes both counted."""
    size = (2**31 if device.startswith("cuda") else 2**26) if size is None else size
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (median_ms(lambda: target.copy_(source), device, runs=10) / 1e3)


def matrix_rate(device: str, dtype: torch.dtype, *, side: int | None = None) -> float:
    """Operations per second of one large matrix product."""
    side = (8192 if device.startswith("cuda") else 512) if side is None else side
    left, right = torch.randn(2, side, side, device=device).to(dtype).unbind()
    return 2 * side**3 / (median_ms(lambda: left @ right, device, runs=10) / 1e3)
