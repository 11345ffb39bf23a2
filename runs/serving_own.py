"""Requests per second and time to the first token of our own server, full and pruned, as rows of `serving`.

A GPU's machine may have neither FastAPI nor a network. What the server imports then travels in a folder, made here for
its Python 3.12 (11 MiB):

    python -m pip install --no-compile --target out/site312 --python-version 3.12 --only-binary=:all: \\
        --platform manylinux2014_x86_64 fastapi uvicorn prometheus-client
    PYTHONPATH=src:out/site312 python3 runs/serving_own.py --within 145 --out results/serving.json    # there

    PYTHONPATH=src python3 runs/serving_own.py --loop --within 145 --out results/serving.json         # without HTTP
    PYTHONPATH=src python3 runs/serving_own.py --tiny --seconds 2 --out out/serving.json              # small, on a CPU

LLaVA-1.5-7B in size with random weights, compiled path, every answer of the same length. Clients ask again as soon as
they are answered, each time about another picture; they run in a process of their own. `path` is "server", or "loop"
where requests go to the batching loop without HTTP: so it is where the server cannot be imported or does not answer.
Rows are saved as they come, rows of other paths in the file stay as they are, and with `--within` the run is over after
so many seconds, whatever is then missing.
"""

import argparse
import base64
import io
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np  # and no torch: the clients' process has to be there at once
from PIL import Image

STARTED = time.monotonic()
QUESTION = "What does the sign in the picture say?"
POOL = 64  # pictures that each run goes through
MIXED = (32, 64, 128)
NAME = "served"
LEAST = 1.5  # seconds of measuring, below which a row says nothing
OVERHEAD = 1.5  # seconds beside the measuring of a row: the clients' process, the last answers
Ask = Callable[[int], tuple[float, float, str]]  # number of the request -> seconds to the first and last token, path


# The clients' side ---------------------------------------------------------------------------------------------------


def closed_loop(ask: Ask, clients: int, seconds: float, warm_up: float) -> dict[str, float]:
    """What the clients together get: each asks as soon as it was answered, and the warm-up is not counted."""
    found: list[tuple[float, float, float, str]] = []  # when it was answered, seconds to first and last token, path
    errors: list[str] = []
    start = time.perf_counter()
    begin, end = start + warm_up, start + warm_up + seconds

    def client(number: int) -> None:
        turn = number
        while time.perf_counter() < end:
            try:
                timed = ask(turn)
                found.append((time.perf_counter(), *timed))
            except Exception as error:  # one that is refused is counted, and asks again
                errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.05)
            turn += clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.sort()
    # Answers come by batches: counted from the end of a batch to the end of another, however the seconds cut them.
    before = [entry[0] for entry in found if entry[0] < begin]
    since = before[-1] if before else start
    counted = [entry for entry in found if since < entry[0] <= end]
    if not counted:  # a first batch that takes longer than all the seconds
        since, counted = start, found
    if not counted:
        raise RuntimeError(f"nothing was answered in {seconds:.1f} s: {errors[:1]}")
    firsts = sorted(1e3 * first for _, first, _, _ in counted)
    return {
        "requests_s": len(counted) / (counted[-1][0] - since),
        "ttft_ms": statistics.median(firsts),
        "ttft_p99_ms": float(np.percentile(firsts, 99)),
        "answer_ms": statistics.median(1e3 * last for _, _, last, _ in counted),
        "requests": len(counted),
        "on_fast_path": statistics.fmean(path == "fast" for _, _, _, path in counted),
        "errors": len(errors),
    }


def pictures(side: int) -> list[Image.Image]:
    """Pictures of smooth random colours, none like another."""
    draw = np.random.default_rng(0)
    small = [Image.fromarray(draw.integers(0, 255, (24, 24, 3), dtype=np.uint8)) for _ in range(POOL)]
    return [one.resize((side, side), Image.Resampling.BICUBIC) for one in small]


def as_uri(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def pruning(keeps: list[int], number: int) -> dict[str, Any]:
    return {"keep": keeps[number % len(keeps)]} if keeps else {}


def over_http(port: int, keeps: list[int], new_tokens: int, side: int) -> Ask:
    """Asks a server, by streams."""
    shown = [as_uri(picture) for picture in pictures(side)]

    def ask(number: int) -> tuple[float, float, str]:
        url = {"url": shown[number % POOL]}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": new_tokens,
            "stream": True,
            "diffprune": pruning(keeps, number),
        }
        start, first, path = time.perf_counter(), 0.0, "eager"
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode()[:300])
            for line in answer:
                first = first or (time.perf_counter() if line.startswith(b"data: ") else 0.0)
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(line.decode()[:300])
                path = "fast" if b'"path": "fast"' in line else path
        finally:
            connection.close()
        return first - start, time.perf_counter() - start, path

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

    def ask(number: int) -> tuple[float, float, str]:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        start, first = time.perf_counter(), 0.0
        job = {"pictures": [shown[number % POOL]], "keep": pruning(keeps, number).get("keep")}
        worker.submit(Job(tell=told.put, prompt=prompt, wish=Wish(max_tokens=new_tokens), stream=True, **job))
        while isinstance(event := told.get(), str):
            first = first or time.perf_counter()
        if not isinstance(event, Answer):
            raise event
        return first - start, time.perf_counter() - start, event.path

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
    try:
        if not ready.wait(10):
            raise RuntimeError("the server was not ready within 10 s")
        yield made.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        made.close()


class Clock:
    """Seconds that are left of the run, shared out among the rows that are still to be measured.

    Args:
        within: Seconds of the whole run; 0: no limit.
        rows: That are to be measured.
    """

    def __init__(self, within: float, rows: int) -> None:
        self.within, self.rows = within, rows

    @property
    def left(self) -> float:
        return self.within - (time.monotonic() - STARTED) if self.within else float("inf")

    def seconds(self, most: float, warm_up: float) -> float | None:
        """For the next row, `most` at most; None where too little is left."""
        share = self.left / max(1, self.rows) - warm_up - OVERHEAD
        self.rows -= 1
        return None if share < LEAST else min(most, share)


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


def drive_clients(port: int, keeps: list[int], clients: int, seconds: float, given: argparse.Namespace) -> Any:
    """What a process of clients measured."""
    options = {
        "drive": port,
        "keeps": json.dumps(keeps),
        "clients": clients,
        "seconds": seconds,
        "warm-up": given.warm_up,
        "new-tokens": given.new_tokens,
        "side": given.side,
        "out": given.out,
    }
    words = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    line = [sys.executable, __file__, *words]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, timeout=seconds + given.warm_up + 60)
    return json.loads(done.stdout.splitlines()[-1])


def measure(vlm: Any, given: argparse.Namespace, keeps: list[int], clock: Clock) -> Iterator[dict[str, Any]]:
    """Numbers by the number of clients, as they come."""
    from diffprune.serve.settings import Settings
    from diffprune.serve.worker import Worker

    counts = [int(text) for text in given.clients.split(",")]
    settings = Settings(batch=max(counts), queue=4 * max(counts), max_new_tokens=given.new_tokens, timeout=60.0)

    @contextmanager
    def in_loop() -> Iterator[Callable[[int, float], Any]]:
        worker = Worker(vlm, settings)
        ask = into_loop(worker, keeps, given.new_tokens, given.side)
        try:
            yield lambda clients, seconds: closed_loop(ask, clients, seconds, given.warm_up)
        finally:
            worker.stop()

    @contextmanager
    def in_server() -> Iterator[Callable[[int, float], Any]]:
        with served(vlm, settings) as port:
            yield lambda clients, seconds: drive_clients(port, keeps, clients, seconds, given)

    with in_loop() if given.loop else in_server() as asked:
        for clients in counts:
            seconds = clock.seconds(given.seconds, given.warm_up)
            if seconds is None:
                say(f"{clients} clients are not measured: {clock.left:.0f} s are left")
                continue
            path = "loop" if given.loop else "server"
            yield {"path": path, "clients": clients, **asked(clients, seconds)}


def num_text(vlm: Any, side: int) -> int:
    """Text tokens of the prompt, in eights."""
    features = vlm.prepare([pictures(side)[0]], [QUESTION]).features
    count = int((features["input_ids"][0] != vlm.backbone.image_token_id).sum())
    return -(-count // 8) * 8


def compiled(vlm: Any, given: argparse.Namespace, keep: tuple[int, ...] | None, share: Any) -> None:
    """Compile for the numbers of clients; a model that cannot be compiled is measured as it is, and its rows say so."""
    options: dict[str, Any] = {} if keep is None else {"keep": keep}
    options |= {} if share is None else {"share": share}
    sizes = tuple(int(text) for text in given.clients.split(","))
    room = {"batch_sizes": sizes, "text_buckets": (num_text(vlm, given.side),), "max_new_tokens": given.new_tokens}
    try:
        vlm.compile(image_sizes=((given.side, given.side),), **room, **options)
        say(f"{vlm.method.name} is compiled: {vlm.fast.report.buckets}")
    except Exception:
        traceback.print_exc()
        say(f"{vlm.method.name} is not compiled; it is measured as it is")


def can_serve() -> bool:
    """Whether the server's packages load; one that is found may still be built for another Python."""
    try:
        import uvicorn  # noqa: F401

        import diffprune.serve.app  # noqa: F401
    except Exception as error:
        say(f"without HTTP, as the server cannot be imported: {type(error).__name__}: {error}")
        return False
    return True


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--clients", default="1,8,32")
    add("--seconds", type=float, default=8.0, help="counted, of each number of clients, at most")
    add("--within", type=float, default=0.0, help="seconds of the whole run; what does not fit is left out")
    add("--warm-up", type=float, default=1.5, help="seconds before that")
    add("--new-tokens", type=int, default=32)
    add("--side", type=int, default=336, help="of the square pictures, in pixels")
    add("--loop", action="store_true", help="ask the batching loop without HTTP")
    add("--tiny", action="store_true", help="a small model, for a look on a CPU")
    add("--eager", action="store_true", help="do not compile")
    add("--commit", help="commit to record where there is no git checkout")
    add("--drive", type=int, default=0, help=argparse.SUPPRESS)
    add("--keeps", default="[]", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    if given.drive:
        drive(given)
        return
    if given.within:  # a compilation cannot be cut short otherwise; rows so far are saved
        end = threading.Timer(given.within, lambda: (say("time is up"), os._exit(3)))
        end.daemon = True
        end.start()
    import torch

    from diffprune.speed.profile import forget_graphs, release
    from diffprune.speed.subject import load_subject, with_method

    given.loop = given.loop or not can_serve()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    subject = load_subject("llava-1.5-7b", random_weights=True, tiny=given.tiny, device=device, dtype=dtype)
    subject.base.generation_config.eos_token_id = None  # every answer has the same length
    say("the model is there")
    plan = (
        ("full", None, {"all tokens": []}),
        ("diffprune", (64, max(MIXED)), {"keep 64": [64], "mixed": list(MIXED)}),  # 32 runs in what 64 was compiled for
    )
    clock = Clock(given.within, len(given.clients.split(",")) * sum(len(runs) for *_, runs in plan))
    clock.within -= 0.25 * given.within  # for the second compilation, given back when it is over
    rows: list[dict[str, Any]] = []
    first: Any = None
    for method, keep, runs in plan:
        vlm = with_method(subject, method, keep=1.0 if method == "full" else 64, dtype=dtype)
        if not given.eager:
            if first is not None:
                forget_graphs(first)
                release(device)
            compiled(vlm, given, keep, first)
            first = first or vlm.fast
        if method != "full":
            clock.within = given.within
        for setting, keeps in runs.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            budget = {"keep": 1.0} if method == "full" else {"keep": 64} if len(keeps) == 1 else {"keeps": keeps}
            about = {"engine": setting, "method": method, "backbone": "llava-1.5-7b", **budget}
            rows += measured(vlm, given, keeps, clock, about, rows)
    if not rows:
        raise SystemExit("nothing was measured")
    say("done")


def measured(
    vlm: Any,
    given: argparse.Namespace,
    keeps: list[int],
    clock: Clock,
    about: dict[str, Any],
    before: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The rows of one setting, saved behind those before; by the loop alone where the server does not answer."""
    import torch

    rows: list[dict[str, Any]] = []
    planned = clock.rows
    try:
        for row in measure(vlm, given, keeps, clock):
            peak = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}
            alone = next((one for one in rows if one["clients"] == 1), None)
            ratio = 1.0 if row["clients"] == 1 else None if alone is None else row["requests_s"] / alone["requests_s"]
            rows.append({**about, **row, **({} if ratio is None else {"to_one_client": ratio}), **peak})
            say(json.dumps(rows[-1]))
            save(given, [*before, *rows])
    except Exception:
        if given.loop:
            raise
        traceback.print_exc()
        say("the server does not answer; this and what follows is measured without HTTP")
        given.loop, clock.rows = True, planned
        return measured(vlm, given, keeps, clock, about, before)
    return rows


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
