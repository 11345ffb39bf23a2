"""Fifty clients for a minute on the embedded model: every answer as offline, nothing lost, nothing that grows."""

import base64
import io
import itertools
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

import diffprune as dp
from diffprune_lab.scenes.source import SCENES_TASKS
from tests.serve.test_process import Process

PRUNER, CLIENTS, BATCH, NEW_TOKENS = "scenes-llava-diffprune", 50, 8, 12
SECONDS = float(os.environ.get("DIFFPRUNE_LOAD_SECONDS", "60"))
BUDGETS: list[Any] = [16, 32, 64, 0.25, None]


def conversations(vlm: Any) -> list[tuple[list[Any], Any]]:
    """Messages and a budget: one picture, two pictures, and a second turn."""
    asked = SCENES_TASKS.build(SCENES_TASKS.names()[:6], count=2).for_model(vlm)
    pairs = []
    for question in itertools.chain.from_iterable(task.questions[:2] for task in asked.tasks):
        (picture,) = asked.open(question.images)
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        pairs.append(({"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": question.prompt}))
    found = []
    for number, (image, text) in enumerate(pairs):
        messages = [{"role": "user", "content": [image, text]}]
        if number % 3 == 1:
            messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": [pairs[0][1]]}]
        found.append((messages, BUDGETS[number % len(BUDGETS)]))
    return found


def cpu_seconds(process: int) -> float:
    """Of a process, all of its threads together."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> int:
    """Kilobytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def offline_cpu(vlm: Any, asked: list[tuple[list[Any], Any]]) -> float:
    """Seconds of the processor for one answer, in batches of the server's size."""
    rounds = [[asked[(start + row) % len(asked)] for row in range(BATCH)] for start in range(0, 6 * BATCH, BATCH)]
    spent = []
    for batch in rounds:
        start = time.process_time()
        keep = [vlm.budget.keep if budget is None else budget for _, budget in batch]
        vlm.generate(messages=[messages for messages, _ in batch], keep=keep, max_new_tokens=NEW_TOKENS)
        spent.append((time.process_time() - start) / BATCH)
    return sorted(spent[1:])[len(spent[1:]) // 2]


class Client(threading.Thread):
    """Asks again as soon as it is answered; from a third of the run on, a hasty one hangs up in the middle."""

    def __init__(self, number: int, server: Process, asked: list[tuple[list[Any], Any]], clock: "Clock") -> None:
        super().__init__(daemon=True)
        self.number, self.server, self.asked, self.clock = number, server, asked, clock
        self.answers: list[tuple[int, str]] = []
        self.refused, self.hung_up, self.errors = 0, 0, list[str]()

    def run(self) -> None:
        draw = random.Random(self.number)
        with self.server.client() as client:
            while self.clock.now() < SECONDS:
                index = draw.randrange(len(self.asked))
                messages, keep = self.asked[index]
                extra = {} if keep is None else {"extra_body": {"diffprune": {"keep": keep}}}
                options: dict[str, Any] = {"model": PRUNER, "messages": messages, "max_tokens": NEW_TOKENS, **extra}
                try:
                    if self.number % 3 == 0 and self.clock.now() > SECONDS / 3:
                        stream = client.chat.completions.create(**options, stream=True)
                        next(iter(stream))
                        stream.close()
                        self.hung_up += 1
                    else:
                        answer = client.chat.completions.create(**options)
                        self.answers.append((index, answer.choices[0].message.content or ""))
                except openai.RateLimitError as error:
                    self.refused += 1
                    time.sleep(float(error.response.headers["retry-after"]))
                except Exception as error:
                    self.errors.append(f"{type(error).__name__}: {error}")


class Clock:
    """Seconds since the clients began."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.start

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - self.now()))


@pytest.mark.slow
def test_fifty_clients_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = dp.load(PRUNER)
    asked = conversations(vlm)
    wanted = [
        vlm.generate(messages=messages, keep=keep, max_new_tokens=NEW_TOKENS, do_sample=False)
        for messages, keep in asked
    ]
    assert len(set(wanted)) > 3
    offline = offline_cpu(vlm, asked)
    server = Process("--pruner", PRUNER, "--batch", str(BATCH), module="diffprune_lab")
    assert server.url, "".join(server.lines)
    try:
        clock = Clock()
        clients = [Client(number, server, asked, clock) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        pid = server.process.pid
        clock.wait(SECONDS / 12)
        spent, done = cpu_seconds(pid), sum(len(client.answers) for client in clients)
        clock.wait(SECONDS / 3)  # so far nobody hangs up
        each = (cpu_seconds(pid) - spent) / (sum(len(client.answers) for client in clients) - done)
        early = resident(pid)
        clock.wait(SECONDS)
        late = resident(pid)
        for client in clients:
            client.join(120)
        answers = [answer for client in clients for answer in client.answers]
        refused, hung_up = sum(client.refused for client in clients), sum(client.hung_up for client in clients)
        print(
            f"{len(answers)} answers, {hung_up} hung up, {refused} refused; {1e3 * each:.1f} ms of the processor "
            f"for an answer, {1e3 * offline:.1f} offline; resident {early} kB, then {late} kB"
        )
        assert [error for client in clients for error in client.errors] == []
        assert [index for index, text in answers if text != wanted[index]] == []
        assert len(answers) > CLIENTS and hung_up > CLIENTS / 3
        assert refused <= 0.05 * (len(answers) + hung_up + refused)
        assert offline / each >= 0.8  # of the rate of offline batches, by the processor's own clock
        assert late <= 1.05 * early
        assert server.end() == 0, "".join(server.lines)
    finally:
        server.close()
