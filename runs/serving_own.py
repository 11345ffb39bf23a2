"""Requests per second and time to the first token of our own server, full and pruned, as rows of `serving`.

    pip install --target .venv-serve --python-version 3.12 --platform manylinux2014_x86_64 --only-binary=:all: \\
        fastapi uvicorn prometheus-client                                # where the GPU's machine has none of them
    PYTHONPATH=src:.venv-serve python runs/serving_own.py --out results/serving.json          # one GPU, 7B in size
    PYTHONPATH=src python runs/serving_own.py --loop --out results/serving.json               # without HTTP
    PYTHONPATH=src python runs/serving_own.py --tiny --seconds 2 --out out/serving.json       # a look at it on a CPU

LLaVA-1.5-7B in size with random weights, compiled path, every answer of the same length. Clients ask again as soon as
they are answered, each time about another picture; they run in a process of their own. `path` is "server", or "loop"
where requests go to the batching loop without HTTP. Rows of other paths in the file stay as they are.
"""

import argparse
import base64
import gc
import io
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

QUESTION = "What does the sign in the picture say?"
POOL = 64  # pictures that each run goes through
MIXED = (32, 64, 128)
NAME = "served"
Ask = Callable[[int], tuple[float, float]]  # number of the request -> seconds to the first token and to the last


# The clients' side ---------------------------------------------------------------------------------------------------


def closed_loop(ask: Ask, clients: int, seconds: float, warm_up: float) -> dict[str, float]:
    """What the clients together get: each asks as soon as it was answered, and the warm-up is not counted."""
    found: list[tuple[float, float, float]] = []  # when it was answered, seconds to the first token and to the last
    errors: list[str] = []
    start = time.perf_counter()
    begin, end = start + warm_up, start + warm_up + seconds

    def client(number: int) -> None:
        turn = number
        while time.perf_counter() < end:
            try:
                first, last = ask(turn)
                found.append((time.perf_counter(), first, last))
            except Exception as error:  # one that is refused is counted, and asks again
                errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.05)
            turn += clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = [entry for entry in found if begin <= entry[0] <= end]
    if not counted:
        raise RuntimeError(f"nothing was answered in {seconds} s: {errors[:1]}")
    firsts = sorted(1e3 * first for _, first, _ in counted)
    return {
        "requests_s": len(counted) / seconds,
        "ttft_ms": statistics.median(firsts),
        "ttft_p99_ms": float(np.percentile(firsts, 99)),
        "answer_ms": statistics.median(1e3 * last for _, _, last in counted),
        "requests": len(counted),
        "errors": len(errors),
    }


def pictures(side: int) -> list[Image.Image]:
    """Pictures of random pixels, none like another."""
    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(POOL)]


def as_uri(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def pruning(keeps: list[int], number: int) -> dict[str, Any]:
    return {"keep": keeps[number % len(keeps)]} if keeps else {}


def over_http(port: int, keeps: list[int], new_tokens: int, side: int) -> Ask:
    """Asks a server, by streams."""
    shown = [as_uri(picture) for picture in pictures(side)]

    def ask(number: int) -> tuple[float, float]:
        url = {"url": shown[number % POOL]}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": new_tokens,
            "stream": True,
            "diffprune": pruning(keeps, number),
        }
        start, first = time.perf_counter(), 0.0
        connection = HTTPConnection("127.0.0.1", port, timeout=300)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode()[:300])
            for line in answer:
                first = first or (time.perf_counter() if line.startswith(b"data: ") else 0.0)
        finally:
            connection.close()
        return first - start, time.perf_counter() - start

    return ask


def drive(given: argparse.Namespace) -> None:
    """The clients' process: its numbers on standard output."""
    ask = over_http(given.drive, json.loads(given.keeps), given.new_tokens, given.side)
    print(json.dumps(closed_loop(ask, int(given.clients), given.seconds, given.warm_up)))


# The server's side ---------------------------------------------------------------------------------------------------


def into_loop(worker: Any, keeps: list[int], new_tokens: int, side: int) -> Ask:
    """Asks the batching loop itself."""
    from diffprune.backbones.messages import read_talks
    from diffprune.serve.rows import Wish
    from diffprune.serve.worker import Answer, Job

    shown = pictures(side)
    content = [{"type": "image", "image": shown[0]}, {"type": "text", "text": QUESTION}]
    prompt = worker.backbone.lay_out(read_talks([{"role": "user", "content": content}])[0])

    def ask(number: int) -> tuple[float, float]:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        start, first = time.perf_counter(), 0.0
        job = {"pictures": [shown[number % POOL]], "keep": pruning(keeps, number).get("keep")}
        worker.submit(Job(tell=told.put, prompt=prompt, wish=Wish(max_tokens=new_tokens), stream=True, **job))
        while isinstance(event := told.get(), str):
            first = first or time.perf_counter()
        if not isinstance(event, Answer):
            raise event
        return first - start, time.perf_counter() - start

    return ask


@contextmanager
def served(vlm: Any, settings: Any) -> Iterator[int]:
    """The model behind HTTP, in a thread; the port."""
    import uvicorn

    from diffprune.serve.app import make_app
    from diffprune.serve.run import listen

    made, ready = listen("127.0.0.1", 0), threading.Event()
    app = make_app(vlm, settings, name=NAME, on_ready=ready.set)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [made]}, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield made.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        made.close()


def measure(vlm: Any, given: argparse.Namespace, keeps: list[int]) -> list[dict[str, Any]]:
    """Numbers by the number of clients."""
    from diffprune.serve.settings import Settings
    from diffprune.serve.worker import Worker

    counts = [int(text) for text in given.clients.split(",")]
    settings = Settings(batch=max(counts), queue=4 * max(counts), max_new_tokens=given.new_tokens, timeout=300.0)
    rows = []
    if given.loop:
        worker = Worker(vlm, settings)
        ask = into_loop(worker, keeps, given.new_tokens, given.side)
        for clients in counts:
            rows.append({"clients": clients, **closed_loop(ask, clients, given.seconds, given.warm_up)})
        worker.stop()
        return rows
    with served(vlm, settings) as port:
        for clients in counts:
            options = {
                "drive": port,
                "keeps": json.dumps(keeps),
                "clients": clients,
                "seconds": given.seconds,
                "warm-up": given.warm_up,
                "new-tokens": given.new_tokens,
                "side": given.side,
                "out": given.out,
            }
            line = [
                sys.executable,
                __file__,
                *(part for key, value in options.items() for part in (f"--{key}", str(value))),
            ]
            done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"clients": clients, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--clients", default="1,8,32")
    add("--seconds", type=float, default=12.0, help="counted, of each number of clients")
    add("--warm-up", type=float, default=3.0, help="seconds before that")
    add("--new-tokens", type=int, default=32)
    add("--side", type=int, default=336, help="of the square pictures, in pixels")
    add("--loop", action="store_true", help="ask the batching loop without HTTP")
    add("--tiny", action="store_true", help="a small model, for a look on a CPU")
    add("--eager", action="store_true", help="do not compile")
    add("--commit", help="commit to record where there is no git checkout")
    add("--drive", type=int, default=0, help=argparse.SUPPRESS)
    add("--keeps", default="[]", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(given)
        return
    from diffprune.extras import missing_modules
    from diffprune.speed.profile import forget_graphs, release
    from diffprune.speed.subject import load_subject, with_method

    if missing_modules("serve") and not given.loop:
        print(f"{missing_modules('serve')} are missing: the loop is measured without HTTP", file=sys.stderr)
        given.loop = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    subject = load_subject("llava-1.5-7b", random_weights=True, tiny=given.tiny, device=device, dtype=dtype)
    subject.base.generation_config.eos_token_id = None  # every answer has the same length
    sizes = tuple(int(text) for text in given.clients.split(","))
    rows: list[dict[str, Any]] = []
    first: Any = None
    for method, compiled_for, runs in (
        ("full", None, {"all tokens": []}),
        ("diffprune", MIXED, {"keep 64": [64], "mixed": list(MIXED)}),
    ):
        vlm = with_method(subject, method, keep=1.0 if method == "full" else 64, dtype=dtype)
        if not given.eager:
            if first is not None:
                forget_graphs(first)
                release(device)
            start = time.monotonic()
            options: dict[str, Any] = {} if compiled_for is None else {"keep": compiled_for}
            options |= {} if first is None else {"share": first}
            room = {"batch_sizes": sizes, "text_buckets": (96,), "max_new_tokens": given.new_tokens}
            vlm.compile(image_sizes=((given.side, given.side),), **room, **options)
            first = first or vlm.fast
            print(f"{method}: compiled in {time.monotonic() - start:.0f} s", flush=True)
        for setting, keeps in runs.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found = measure(vlm, given, keeps)
            peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
            for row in found:
                budget = {"keep": 1.0} if method == "full" else {"keep": 64} if len(keeps) == 1 else {"keeps": keeps}
                one = {
                    "path": "loop" if given.loop else "server",
                    "engine": setting,
                    "method": method,
                    "backbone": "llava-1.5-7b",
                    **budget,
                    **row,
                    "to_one_client": row["requests_s"] / found[0]["requests_s"],
                    **({} if peak is None else {"peak_gb": peak}),
                }
                rows.append(one)
                print(json.dumps(one), flush=True)
            gc.collect()
    save(given, rows)


def save(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The file with these rows in place of those that our own server had before."""
    from diffprune.results import command_line, device_name, read_results, source_commit, write_results

    compiled = "not compiled" if given.eager else "compiled"
    notes = (
        f"rows of path server and loop: our own server, {compiled}, random weights, {given.new_tokens} new tokens, "
        "clients that ask as soon as they are answered; to_one_client is requests_s over that of one client"
    )
    about = {"commit": given.commit or source_commit(), "device": device_name(), "command": command_line()}
    rows = [{**row, **about} for row in rows]
    if not given.out.exists():
        write_results(given.out, name=given.out.stem, rows=rows, commit=given.commit, notes=notes)
        return
    held = read_results(given.out)
    kept: dict[str, Any] = {
        key: getattr(held, key) for key in ("name", "command", "commit", "device", "seeds", "date", "versions")
    }
    others = [row for row in held.rows if row.get("path") not in ("server", "loop")]
    said = held.notes if notes in held.notes else "; ".join(filter(None, [held.notes, notes]))
    write_results(given.out, rows=[*others, *rows], notes=said, **kept)


if __name__ == "__main__":
    main()
