"""A real server on a real socket, in a thread of this process, and what the tests ask it."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import openai
import uvicorn
from PIL import Image

from diffprune.serve.app import Server, make_app
from diffprune.serve.run import listen
from diffprune.serve.settings import Settings
from diffprune.serve.worker import Job

NAME = "tiny"


def data_uri(picture: Image.Image) -> str:
    """The picture itself as an address."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def question(text: str, *pictures: Image.Image) -> dict[str, Any]:
    """A user's message in OpenAI's form."""
    parts = [{"type": "image_url", "image_url": {"url": data_uri(picture)}} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Running:
    """A server that runs, and its clients."""

    def __init__(self, server: Server, port: int) -> None:
        self.server, self.port = server, port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, token: str = "none") -> openai.OpenAI:
        """The official client, which asks once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=60)

    def ask(self, messages: list[Any], *, keep: Any = None, method: str | None = None, **options: Any) -> Any:
        """A chat completion through the official client."""
        pruning = {"keep": keep, "method": method}
        given = {key: value for key, value in pruning.items() if value is not None}
        extra = {"extra_body": {"diffprune": given}} if given else {}
        with self.client() as client:
            return client.chat.completions.create(model=NAME, messages=messages, **extra, **options)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to any request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, {**kind, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of the answer to a JSON body."""
        status, found, answer = self.send("POST", path, json.dumps(body).encode(), headers)
        return status, found, json.loads(answer)

    def metric(self, line: str) -> float:
        """A value of /metrics."""
        _, _, text = self.send("GET", "/metrics")
        return sum(float(row.rpartition(" ")[2]) for row in text.decode().splitlines() if row.startswith(line))

    @contextmanager
    def held(self) -> Iterator[None]:
        """The worker busy with something else, so that requests wait for sure."""
        busy, go = threading.Event(), threading.Event()

        def wait(vlm: Any) -> None:
            busy.set()
            go.wait(60)

        self.server.worker.submit(Job(tell=lambda event: None, run=wait))
        assert busy.wait(60)
        try:
            yield
        finally:
            go.set()


@contextmanager
def running(vlm: Any, **settings: Any) -> Iterator[Running]:
    """A server around a model, ended afterwards."""
    made, ready = listen("127.0.0.1", 0), threading.Event()
    app = make_app(vlm, Settings(**settings), name=NAME, on_ready=ready.set)
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [made]}, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield Running(app.state.server, made.getsockname()[1])
    finally:
        uvicorn_server.should_exit = True
        thread.join(60)
        made.close()
        assert not thread.is_alive() and not app.state.server.worker.is_alive
