"""Requests per second and time to the first token of vLLM's own server, full and pruned, as rows of `serving`.

    python runs/serving_engine.py --out results/serving.json                         # the CPU build, scenes-llava
    python runs/serving_engine.py --pruner runs/llava-k64 --out results/serving.json --engine --dtype bfloat16

Three servers are up at once: the engine's stock class with all tokens, the plug-in's class with all tokens (what the
plug-in itself costs), and the plug-in with K. They are asked in turns, round after round, so that whatever else the
machine does falls on all alike; what is stated is medians over rounds and their ratios to the stock class. `cpu_ms` is
processor time for each request, which the load of the machine hardly changes. A picture is asked about once, so no
encoder output comes from a cache. Rows of other paths in the file stay as they are.
"""

import argparse
import base64
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffprune.integrations.vllm_command import command, describe_served
from diffprune.integrations.vllm_settings import read_pruner
from diffprune.results import command_line, device_name, read_results, source_commit, write_results

PATH = "engine"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # of the CPU build, in GiB
}
QUESTION = "Which word does the sign show?"


class Server:
    """One of the servers: a process, and where it listens."""

    def __init__(self, name: str, line: Sequence[str], log: Path) -> None:
        self.name, self.log = name, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*line, "--port", str(self.port)], env=os.environ | ENVIRONMENT, stdout=file, stderr=file
            )

    def wait(self, seconds: float) -> None:
        """Until it is up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(2)
        raise RuntimeError(f"{self.name} did not start: {self.log.read_text()[-2000:]}")

    def ask(self, picture: str, num_new: int) -> tuple[float, float]:
        """Milliseconds to the first token and to the last."""
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}]
        body = {
            "model": "served",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": num_new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start, first = time.perf_counter(), None
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {") and b'"content"' in line and first is None:
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    first = time.perf_counter() if delta.get("content") else None
        end = time.perf_counter()
        return 1e3 * ((first or end) - start), 1e3 * (end - start)

    def processes(self) -> list[Path]:
        """Itself and its children, in /proc."""
        found = [Path(f"/proc/{self.process.pid}")]
        for one in found:
            for task in (one / "task").iterdir():
                found += [Path(f"/proc/{child}") for child in (task / "children").read_text().split()]
        return found

    def peak_gb(self) -> float:
        """The most memory that its processes have held; on a GPU look at the card instead."""
        lines = [line for one in self.processes() for line in (one / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20

    def cpu_ms(self) -> float:
        """What its processes have computed, whoever else had the machine meanwhile."""
        fields = [(one / "stat").read_text().rpartition(")")[2].split() for one in self.processes()]
        return 1e3 * sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def pictures(count: int, seed: int, side: int) -> list[str]:
    """Pictures of random pixels, none like another, as data URIs."""
    draw = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
        out.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    return out


def measure(
    servers: Sequence[Server], clients: int, *, requests: int, rounds: int, num_new: int, side: int
) -> dict[str, dict[str, float]]:
    """By server its numbers with that many clients, each of which asks as soon as it was answered."""
    rates: dict[str, list[float]] = {one.name: [] for one in servers}
    firsts: dict[str, list[float]] = {one.name: [] for one in servers}
    computed: dict[str, list[float]] = {one.name: [] for one in servers}
    for number in range(rounds + 1):  # the first is for warming up
        for server in servers:
            shown = pictures(max(requests, clients), 1000 * clients + number, side)
            before, start = server.cpu_ms(), time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                got = list(pool.map(lambda picture, to=server: to.ask(picture, num_new), shown))
            seconds = time.perf_counter() - start
            if number:
                rates[server.name].append(len(shown) / seconds)
                firsts[server.name] += [first for first, _ in got]
                computed[server.name].append((server.cpu_ms() - before) / len(shown))
    return {
        name: {
            "requests_s": statistics.median(rates[name]),
            "ttft_ms": statistics.median(firsts[name]),
            "ttft_p99_ms": float(np.percentile(firsts[name], 99)),
            "cpu_ms": statistics.median(computed[name]),
        }
        for name in rates
    }


def lines(pruner: str, keep: int, engine: Sequence[str]) -> dict[str, tuple[list[str], str, int | float]]:
    """By server its command line, the method in its rows and the budget."""
    served, config = describe_served(pruner), read_pruner(pruner)[1]
    method = "-".join([config["method"]["name"], *([config["choice"]["name"]] if "choice" in config else [])])
    stock = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", served.model]
    stock += ["--model-impl", "transformers", "--served-model-name", "served", "--trust-request-mm-kwargs"]
    stock += ["--chat-template", served.template] if served.template else []

    def ours(name: str, **settings: Any) -> list[str]:
        line = command(name, name="served", **settings)
        where = line.index("--port")
        return line[:where] + line[where + 2 :]

    return {
        "stock": ([*stock, *engine], "full", 1.0),
        "all tokens": ([*ours("none", model=served.model), *engine], "full", 1.0),
        f"keep {keep}": ([*ours(pruner, keep=keep), *engine], method, keep),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pruner", default="scenes-llava-diffprune")
    add("--keep", type=int, default=64)
    add("--clients", default="1,8,32")
    add("--requests", type=int, default=16, help="of a round, at least as many as there are clients")
    add("--rounds", type=int, default=5)
    add("--new-tokens", type=int, default=8)
    add("--side", type=int, default=192, help="of the square pictures, in pixels")
    add("--start", type=float, default=900, help="seconds a server may take to start")
    add("--out", type=Path, required=True)
    add("--commit", help="commit to record where there is no git checkout")
    add("--engine", nargs=argparse.REMAINDER, help="what follows goes to vLLM")
    given = parser.parse_args()
    usual = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "32"]
    planned = lines(given.pruner, given.keep, given.engine or usual)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        servers: list[Server] = []
        try:
            for name, (line, _, _) in planned.items():
                servers.append(Server(name, line, Path(folder) / f"{len(servers)}.log"))
                servers[-1].wait(given.start)
                print(f"{name}: up", flush=True)
            for clients in (int(text) for text in given.clients.split(",")):
                sizes = {"requests": given.requests, "rounds": given.rounds, "num_new": given.new_tokens}
                found = measure(servers, clients, side=given.side, **sizes)
                for server in servers:
                    _, method, keep = planned[server.name]
                    values, stock = found[server.name], found["stock"]
                    rows.append(
                        {
                            "path": PATH,
                            "engine": server.name,
                            "method": method,
                            "keep": keep,
                            "clients": clients,
                            **values,
                            "requests_ratio": values["requests_s"] / stock["requests_s"],
                            "ttft_ratio": values["ttft_ms"] / stock["ttft_ms"],
                            "cpu_ratio": values["cpu_ms"] / stock["cpu_ms"],
                            "peak_gb": server.peak_gb(),
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            for server in servers:
                server.process.terminate()
            for server in servers:
                server.process.wait(120)
    save(given.out, rows, given.commit)


def save(out: Path, rows: list[dict[str, Any]], commit: str | None) -> None:
    """The file with these rows in place of those that an engine had before."""
    about = {"commit": commit or source_commit(), "device": device_name(), "command": command_line()}
    rows = [{**row, **about} for row in rows]
    notes = "rows of path engine: three vLLM servers up at once on one machine, asked in turns; ratios are to stock"
    if out.exists():
        held = read_results(out)
        rows += [row for row in held.rows if row.get("path") != PATH]
        notes = held.notes if notes in held.notes else "; ".join(filter(None, [held.notes, notes]))
    write_results(out, name=out.stem, rows=rows, commit=commit, notes=notes)


if __name__ == "__main__":
    main()
