"""The server answers as the model does offline, whoever asks at the same time."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from diffprune.serve import app, pictures
from diffprune.serve.metrics import Metrics
from diffprune.serve.settings import Settings
from diffprune.serve.worker import Job
from tests import tiny
from tests.contracts.vlm import pruned
from tests.serve.running import NAME, Running, data_uri, question, running

HISTORY = [question("what is it?", tiny.picture(1)), {"role": "assistant", "content": "a ring"}]
# Messages, budgets of their pictures, new tokens: turns, pictures and text alone.
ASKED: list[tuple[list[Any], list[int | float], int]] = [
    ([question("what is it?", tiny.picture(1))], [5], 9),
    ([question("which color?", tiny.picture(2, (64, 90)))], [0.25], 4),
    ([*HISTORY, question("and this one?", tiny.picture(3))], [3, 11], 12),
    ([question("hello")], [], 6),
    ([{"role": "system", "content": "be short"}, question("both?", tiny.picture(4), tiny.picture(5))], [16, 1], 7),
]


def offline(vlm: Any, messages: list[Any], keep: Any, new: int) -> str:
    return vlm.generate(messages=messages, keep=keep or None, max_new_tokens=new, do_sample=False)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Running, Any]]:
    with running(pruned("llava", "divprune", keep=5), max_new_tokens=3000, queue=8) as server:
        yield server, pruned("llava", "divprune", keep=5)


def together(server: Running, calls: list[Any]) -> list[Any]:
    """The results of calls that all wait before the first is answered."""
    with ThreadPoolExecutor(len(calls)) as threads:
        with server.held():
            found = [threads.submit(call) for call in calls]
            deadline = time.monotonic() + 60
            while server.server.worker.num_waiting < len(calls):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return [future.result() for future in found]


def test_a_batch_of_budgets_turns_and_pictures_answers_as_its_requests_offline(served: Any) -> None:
    server, vlm = served
    calls = [
        lambda messages=messages, keep=keep, new=new: server.ask(messages, keep=keep or None, max_tokens=new)
        for messages, keep, new in ASKED
    ]
    answers = together(server, calls)
    for answer, (messages, keep, new) in zip(answers, ASKED, strict=True):
        assert answer.diffprune["batch"] == len(ASKED)
        assert answer.choices[0].message.content == offline(vlm, messages, keep, new)
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == new
        assert answer.usage.visual_tokens == 16 * len(keep)
        assert answer.usage.visual_tokens_kept == sum(k if isinstance(k, int) else int(k * 16) for k in keep)
    alone = server.ask(*ASKED[0][:1], max_completion_tokens=9)
    assert alone.choices[0].message.content == answers[0].choices[0].message.content  # the server's own budget is 5
    assert alone.diffprune["batch"] == 1
    other = server.ask(*ASKED[0][:1], method="feature_norm", max_tokens=9)
    assert other.usage.visual_tokens_kept == 5  # by another method too
    full = server.ask(*ASKED[0][:1], method="full", max_tokens=9)
    assert full.usage.prompt_tokens - alone.usage.prompt_tokens == 16 - 5 == full.usage.visual_tokens_kept - 5
    assert full.choices[0].message.content == offline(pruned("llava"), ASKED[0][0], None, 9)


def test_a_stream_says_what_the_whole_answer_says(served: Any) -> None:
    server, vlm = served
    messages = [question("what is it?", tiny.picture(6))]
    wanted = offline(vlm, messages, None, 24)
    with server.client() as client:
        chunks = list(
            client.chat.completions.create(
                model=NAME, messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}
            )
        )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == wanted
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    status, headers, body = server.send(
        "POST",
        "/v1/chat/completions",
        json.dumps({"model": NAME, "messages": messages, "max_tokens": 2, "stream": True}).encode(),
    )
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert body.endswith(b"data: [DONE]\n\n") and b'"usage"' not in body


def test_an_answer_ends_at_a_stop_which_is_no_part_of_it(served: Any) -> None:
    server, vlm = served
    messages = [question("what is it?", tiny.picture(6))]
    whole = offline(vlm, messages, None, 24)
    stop = whole[8:10]
    found = server.ask(messages, max_tokens=24, stop=["never said", stop])
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].message.content == whole[: whole.index(stop)].strip()


def test_a_seed_draws_the_same_in_any_company(served: Any) -> None:
    server, _ = served
    messages = [question("what is it?", tiny.picture(1))]
    drawn = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 12}

    def ask(**more: Any) -> str:
        return server.ask(messages, **drawn, **more).choices[0].message.content

    alone, other = ask(seed=3), ask(seed=4)
    assert alone != other
    calls = [lambda: ask(seed=4), lambda: server.ask(messages, max_tokens=5), lambda: ask(seed=3)]
    found = together(server, calls)
    assert [found[0], found[2]] == [other, alone]


def test_a_client_that_hangs_up_ends_its_row(served: Any) -> None:
    server, vlm = served
    steps: list[int] = []
    head = server.server.worker.vlm.base.lm_head.register_forward_hook(lambda *_: steps.append(1))
    try:
        with server.client() as client:
            stream = client.chat.completions.create(model=NAME, messages=ASKED[0][0], max_tokens=3000, stream=True)
            next(iter(stream))
            stream.close()
        impatient = server.client().with_options(timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(model=NAME, messages=ASKED[0][0], max_tokens=3000)
        impatient.close()
        answer = server.ask(ASKED[3][0], max_tokens=6)  # the worker has come back to the others
    finally:
        head.remove()
    assert answer.choices[0].message.content == offline(vlm, *ASKED[3])
    assert len(steps) < 3000
    assert server.server.num_open == 0


def test_an_answer_that_is_not_taken_in_time_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application goes on as for a client that has gone, and what it still says is not sent."""
    monkeypatch.setattr(app, "LATE", 0.0)
    made = app.Server.__new__(app.Server)  # without a model
    made.settings, made.metrics = Settings(timeout=0.01), Metrics()
    sent, ended = [], []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) == 2:
            await asyncio.Event().wait()  # a reader that stands still

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        for _ in range(3):
            await send({"type": "http.response.body"})
        ended.append(True)

    counted = app.Counted(answer, made)
    asyncio.run(asyncio.wait_for(counted({"type": "http", "method": "GET"}, None, send), 10))
    assert sent == ["http.response.start", "http.response.body"] and ended


def test_one_request_too_many_is_told_when_to_come_back(served: Any) -> None:
    server, _ = served
    body = {"model": NAME, "messages": ASKED[3][0], "max_tokens": 2}
    queue, most = server.server.settings.queue, server.server.settings.most
    assert queue == 8
    with server.held():
        threads = [threading.Thread(target=server.post, args=("/v1/chat/completions", body)) for _ in range(queue)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while server.server.worker.num_waiting < queue:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        status, headers, found = server.post("/v1/chat/completions", body)
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert found["error"]["type"] == "rate_limit_error" and found["error"]["code"] == "queue_full"
        assert server.metric("diffprune_waiting ") == queue and server.server.num_open <= most
    for thread in threads:
        thread.join()
    assert server.post("/v1/chat/completions", body)[0] == 200
    assert server.metric('diffprune_requests_total{path="/v1/chat/completions",status="429"}') == 1


def test_requests_whose_clients_have_gone_take_no_place_in_the_queue() -> None:
    with running(pruned("llava", "divprune", keep=5), queue=2) as server, server.held():
        worker = server.server.worker
        gone = [Job(tell=lambda event: None) for _ in range(2)]
        for job in gone:
            worker.submit(job)
        assert worker.num_waiting == 2
        for job in gone:
            job.cancel()
        worker.submit(Job(tell=lambda event: None, run=lambda vlm: None))
        assert worker.num_waiting == 1


def test_requests_wait_for_no_other_s_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = threading.Semaphore(0), threading.Event()

    def stands_still(*_: Any, **__: Any) -> bytes:
        reached.release()
        go.wait(60)
        raise ValueError("nothing came")

    monkeypatch.setattr(pictures, "fetch", stands_still)
    with running(pruned("llava", "divprune", keep=5), hosts=("example.com",)) as server:
        part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
        body = {"model": NAME, "messages": [{"role": "user", "content": [part]}]}
        others = [threading.Thread(target=server.post, args=("/v1/chat/completions", body)) for _ in range(app.THREADS)]
        try:
            for thread in others:
                thread.start()
            assert all(reached.acquire(timeout=60) for _ in others)
            with server.client() as client:
                asked = client.with_options(timeout=20).chat.completions.create
                assert asked(model=NAME, messages=ASKED[3][0], max_tokens=2).usage.completion_tokens == 2
        finally:
            go.set()
            for thread in others:
                thread.join()


def test_a_selection_is_that_of_the_model(served: Any) -> None:
    server, vlm = served
    picture = tiny.picture(2)
    for method, keep in ((None, 3), ("feature_norm", 0.5), ("full", None)):
        body = {"image": data_uri(picture), "keep": keep, "method": method}
        status, _, found = server.post("/v1/diffprune/select", body)
        assert status == 200, found
        model = vlm if method is None else pruned("llava", method)
        (wanted,) = model.select([picture], keep=keep)
        assert found["keep"] == wanted.keep.tolist() and found["grid"] == [4, 4] and found["size"] == [100, 70]
        assert (found["logits"] is None) == (wanted.logits is None)
        assert len(found["boxes"]) == found["num_visual"] == 16 and len(found["boxes"][0]) == 4


def test_models_health_and_unknown_paths(served: Any) -> None:
    server, _ = served
    with server.client() as client:
        (model,) = client.models.list().data
        assert model.id == NAME and client.models.retrieve(NAME).id == NAME
        assert model.diffprune["method"] == "divprune" and "full" in model.diffprune["methods"]
        assert "diffprune" not in model.diffprune["methods"]  # is learned
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            client.models.retrieve("other")
    assert server.send("GET", "/health")[0] == 200
    status, _, body = server.send("GET", "/v1/nothing")
    assert status == 404 and "not served" in json.loads(body)["error"]["message"]
    assert server.send("DELETE", "/v1/models")[0] == 405
    for path in ("/", "/health", "/v1/models"):
        status, headers, body = server.send("HEAD", path)
        assert status == 200 and body == b"" and int(headers["content-length"]) > 0
    assert server.send("HEAD", "/v1/chat/completions")[0] == 405  # there is no GET
    told = json.loads(server.send("GET", "/openapi.json")[2])["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(told["200"]["content"]) == {"application/json", "text/event-stream"} and "429" in told


def test_a_token_is_asked_for_and_time_is_limited() -> None:
    with running(pruned("llava", "divprune", keep=5), token="secret", timeout=2.0) as server:
        assert server.send("GET", "/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            status, found, body = server.send("GET", "/v1/models", headers=headers)
            assert status == 401 and found["www-authenticate"] == "Bearer"
            assert json.loads(body)["error"]["type"] == "authentication_error"
        with server.client("secret") as client:
            assert client.models.list().data[0].id == NAME
            with server.held(), pytest.raises(openai.APIStatusError) as late:
                client.chat.completions.create(model=NAME, messages=ASKED[3][0], max_tokens=2)
            assert late.value.status_code == 504
