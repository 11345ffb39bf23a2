"""Whatever is sent, the answer has the API's error body and the right status, and the server lives on."""

import base64
import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from diffprune.serve import pictures
from diffprune.serve.pictures import fetch, is_public
from diffprune.serve.settings import Settings
from tests import tiny
from tests.contracts.vlm import pruned
from tests.serve.running import NAME, Running, data_uri, question, running

CHAT = "/v1/chat/completions"
PICTURE = tiny.picture(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = {"max_body": 3_000_000, "max_pictures": 3, "max_new_tokens": 64, "max_pixels": 150_000}
    with running(pruned("llava", "divprune", keep=5), **limits) as made:
        yield made


def as_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A file of a few bytes whose header promises that many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def shown(url: Any) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    return [{"role": "user", "content": parts}]


GOOD: dict[str, Any] = {"model": NAME, "messages": [question("hello", PICTURE)], "max_tokens": 3}
BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no image": ({"messages": shown(as_uri(b"plainly no image"))}, 400, "no image that can be read"),
    "cut off": ({"messages": shown(as_uri(png(tiny.picture(1, (300, 300)))[:9000]))}, 400, "cut short"),
    "bomb": ({"messages": shown(as_uri(bomb(10_000, 10_000)))}, 400, "10000 x 10000|too large|bomb"),
    "empty": (
        {"messages": shown("data:image/png;base64,")},
        400,
        "a file of 0 bytes is no image that can be read; known",
    ),
    "shouted data": ({"messages": shown("DATA:image/png;base64,AAAA")}, 400, "a file of 3 bytes is no image"),
    "long path": ({"messages": shown("/" + "a" * 999)}, 400, "/" + "a" * 199 + "', and files are not read here"),
    "no base64": ({"messages": shown("data:image/png;base64,!!!")}, 400, "data URL"),
    "address": ({"messages": shown("http://example.com/a.png")}, 400, "nothing is fetched"),
    "shouted address": ({"messages": shown("HTTP://example.com/a.png")}, 400, "nothing is fetched"),
    "path": ({"messages": shown("/etc/passwd")}, 400, "files are not read here"),
    "file address": ({"messages": shown("file:///etc/passwd")}, 400, "files are not read here"),
    "path as image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}]},
        400,
        "files are not read here",
    ),
    "list as image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": [1]}]}]},
        400,
        "no picture",
    ),
    "empty picture": ({"messages": shown(None)}, 400, "holds no picture"),
    "pictures": ({"messages": [question("?", *[PICTURE] * 4)]}, 400, "4 pictures are more than the 3"),
    "large pictures": (
        {"messages": [question("?", *[tiny.picture(1, (300, 300))] * 3)]},
        400,
        "the first 2 pictures have 180,000 pixels together; scale them below 150,000 first",
    ),
    "placeholder": ({"messages": [question("what is <image>?", PICTURE)]}, 400, "placeholder"),
    "model": ({"model": "gpt-4o"}, 404, "there is no model 'gpt-4o'"),
    "keep 0": ({"diffprune": {"keep": 0}}, 400, "keep=0 keeps nothing"),
    "keep -1": ({"diffprune": {"keep": -1}}, 400, "keep=-1 keeps nothing"),
    "keep x": ({"diffprune": {"keep": "x"}}, 400, "diffprune.keep='x' is no budget; give tokens (64) or a share"),
    "keep true": ({"diffprune": {"keep": True}}, 400, "diffprune.keep=True is no budget"),
    "keep of texts": ({"diffprune": {"keep": ["x"]}}, 400, "diffprune.keep=['x'] is no budget"),
    "keep 10000": ({"diffprune": {"keep": 10_000}}, 400, "keep=10000 is more than the 4096"),
    "keep 1.5": ({"diffprune": {"keep": 1.5}}, 400, "no share"),
    "keep for two": ({"diffprune": {"keep": [5, 5]}}, 400, "2 budgets for 1 pictures"),
    "keep of full": ({"diffprune": {"keep": 5, "method": "full"}}, 400, "needs a method that chooses"),
    "method": ({"diffprune": {"method": "nothing"}}, 400, "'nothing' is not served"),
    "learned method": ({"diffprune": {"method": "diffprune"}}, 400, "'diffprune' is not served"),
    "pruning": ({"diffprune": {"budget": 5}}, 400, "there is no field 'diffprune.budget'; leave it out"),
    "pruning by number": ({"diffprune": 5}, 400, "diffprune: Input should be an object, not 5"),
    "no messages": ({"messages": []}, 400, "messages: List should have at least 1 item after validation, not 0"),
    "messages": ({"messages": "hello"}, 400, "messages"),
    "role": ({"messages": [{"role": "wizard", "content": "hello"}]}, 400, "'wizard'"),
    "no content": ({"messages": [{"role": "user"}]}, 400, "role and content"),
    "last": ({"messages": [{"role": "assistant", "content": "a"}]}, 400, "end with the user's"),
    "audio": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "neither text nor an image"),
    "half a pair": ({"messages": [question("\ud800")]}, 400, "no text"),
    "tokens": ({"max_tokens": 65}, 400, "max_tokens=65 is more than the 64"),
    "completion tokens": ({"max_tokens": None, "max_completion_tokens": 65}, 400, "max_completion_tokens=65 is more"),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "long": ({"messages": [question("long " * 1000)], "max_tokens": 8}, 400, "context holds"),
    "far too long": ({"messages": [question("long " * 60_000)]}, 400, "characters"),
    "many messages": (
        {"messages": [{"role": "user", "content": ""}] * 4097},
        400,
        "4097 messages are more than a context",
    ),
    "temperature": ({"temperature": 3}, 400, "temperature"),
    "long without a length": (
        {"messages": [question("long " * 1000)], "max_tokens": None},
        400,
        "answer at least 1, and",
    ),
    "stop": ({"stop": ""}, 400, "stop='' is no stop"),
    "stops": (
        {"stop": ["a", ""]},
        400,
        "stop=['a', ''] is no stop; give a text, or a list of up to 16 texts, none empty",
    ),
    "long stop": ({"stop": ["a", "b" * 1001]}, 400, "none empty or of more than 1,000 characters"),
    "two answers": ({"n": 2}, 400, "n=2 cannot be obeyed"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools"),
    "unknown field": ({"keep": 64}, 400, "no field 'keep'"),
    "options": ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_and_the_server_lives_on(server: Running, stream: bool) -> None:
    for name, (change, wanted, words) in BAD.items():
        if stream and name == "options":
            continue
        status, _, body = server.post(CHAT, {**GOOD, "stream": stream, **change})
        error = body["error"]
        assert status == wanted, (name, status, body)
        assert any(word in error["message"] for word in words.split("|")), (name, body)
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert "Traceback" not in error["message"] and len(error["message"]) < 2100
        assert " object at 0x" not in error["message"], "addresses in memory are nobody's business"
    assert server.post(CHAT, GOOD)[0] == 200
    assert server.server.num_open == 0


def test_bodies_that_are_none(server: Running) -> None:
    kinds = {"Content-Type": "text/plain"}
    deep = b'{"model":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    for body, headers, wanted in (
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b'{"model": NaN}', {}, 400),
        (b"\xff\xfe", {}, 400),
        (deep, {}, 400),
        (json.dumps(GOOD).encode(), kinds, 415),
        (b'{"model": "' + b"x" * 4_000_000 + b'"}', {}, 413),
    ):
        for path in (CHAT, "/v1/diffprune/select"):
            status, _, found = server.send("POST", path, body, headers)
            assert status == wanted, (body[:20], path, found)
            assert json.loads(found)["error"]["message"]
    status, _, found = server.send("POST", CHAT, b"null")
    assert status == 400 and "the body is None; send a JSON object" in json.loads(found)["error"]["message"]
    assert server.post(CHAT, GOOD)[0] == 200


def test_slow_bodies_keep_nobody_out() -> None:
    """As many as may be under way at once take no place; with one more, the first of them is given up."""
    with running(pruned("llava", "divprune", keep=5), queue=3, batch=1) as server, ExitStack() as open_ones:

        def begin() -> socket.socket:
            made = open_ones.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            count = len(server.server.bodies)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            made.sendall(head.encode() + b"{")
            deadline = time.monotonic() + 60
            while len(server.server.bodies) == count < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return made

        slow = [begin() for _ in range(4)]
        assert server.post(CHAT, GOOD)[0] == 200
        assert slow[0].recv(1000).startswith(b"HTTP/1.1 429 ") and server.server.num_open == 0
        assert len(server.server.bodies) == 3
        slow[1].sendall(b" " * 998 + b"}")
        assert slow[1].recv(1000).startswith(b"HTTP/1.1 400 ")  # whole, and no request


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"image": "/etc/passwd"}, "image", "the image names the file '/etc/passwd', and files are not read here"),
        ({"image": ""}, "image", "the image names the file ''"),
        ({"image": "https://example.com/a.png"}, "image", "nothing is fetched"),
        ({"image": as_uri(b"nothing")}, "image", "the data URL of the image"),
        ({"keep": 0}, "keep", "keep=0 keeps nothing"),
        ({"keep": [2]}, "keep", "keep=[2] is no budget; give tokens (64) or a share (0.111)"),
        ({"method": "full"}, "keep", "needs a method that chooses"),
        ({"method": "nothing"}, "method", "'nothing' is not served"),
        ({"method": "fastv"}, None, "inside the language model"),
        ({"text": "long " * 60_000}, "text", "text: 300000 characters are far more"),
        ({"question": "what?"}, "question", "there is no field 'question'; leave it out"),
    ],
)
def test_what_is_wrong_with_a_selection_names_its_field(
    server: Running, change: dict[str, Any], param: str | None, words: str
) -> None:
    status, _, found = server.post("/v1/diffprune/select", {"image": data_uri(PICTURE), "keep": 2, **change})
    assert status == 400 and words in found["error"]["message"] and found["error"]["param"] == param


def test_one_bad_request_does_not_spoil_the_batch_it_is_in(server: Running) -> None:
    """What is known only when the prompt is laid out, or breaks the model, is told to that request alone."""
    long = {**GOOD, "messages": [question("long " * 1000)]}
    answers: dict[str, Any] = {}
    vlm = server.server.worker.vlm
    backbone, run = vlm.backbone, vlm.backbone.prepare_prompts

    def breaks(asked: list[str], pictures: Any) -> Any:
        if any("break it" in text for text in asked):
            raise RuntimeError("broken")
        return run(asked, pictures)

    backbone.prepare_prompts = breaks
    bodies = {"good": GOOD, "long": long, "broken": {**GOOD, "messages": [question("break it")]}}

    def ask(name: str) -> None:
        answers[name] = server.post(CHAT, bodies[name])

    try:
        with server.held():
            threads = [threading.Thread(target=ask, args=(name,)) for name in bodies]
            for thread in threads:
                thread.start()
            while server.server.worker.num_waiting < len(bodies):
                threads[0].join(0.01)
        for thread in threads:
            thread.join()
    finally:
        del backbone.prepare_prompts
    assert {name: answer[0] for name, answer in answers.items()} == {"good": 200, "long": 400, "broken": 500}
    assert answers["long"][2]["error"]["code"] == "context_length_exceeded"
    assert "broken" not in answers["broken"][2]["error"]["message"]


class Elsewhere(BaseHTTPRequestHandler):
    """A host with pictures, redirects and too much."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/secrets")
            self.end_headers()
            return
        body = png(PICTURE) if self.path == "/a.png?x=1" else b"0" * 200_000
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_pictures_of_allowed_hosts_alone_and_no_way_round() -> None:
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://localhost:{other.server_port}"
        anywhere = {"max_bytes": 100_000, "allowed": lambda address: True}
        try:
            for hosts in (["localhost"], ["LocalHost"]):
                assert fetch(f"{url}/a.png?x=1", hosts, **anywhere) == png(PICTURE)
            for path, hosts, options, words in (
                ("/a.png?x=1", ["example.com"], anywhere, "not one from which pictures are fetched"),
                ("/a.png?x=1", ["localhost"], {"max_bytes": 10}, "address of this network"),
                ("/moved", ["localhost"], anywhere, "leads elsewhere"),
                ("/none", ["localhost"], anywhere, "answered with 404"),
                ("/large", ["localhost"], anywhere, "more than 100,000 bytes"),
                ("/bär.png", ["localhost"], anywhere, "cannot be fetched"),
                ("/a.png?x=1", ["localhost"], {**anywhere, "until": 0.0}, "did not come within 10 s"),
            ):
                with pytest.raises(ValueError, match=words):
                    fetch(url + path, hosts, **options)
        finally:
            other.shutdown()
    inside = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1", "fec0::1", "fc00::1"]
    wrapped = ["::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "2002:a00:1::"]
    assert [address for address in [*inside, *wrapped] if is_public(address)] == []
    assert all(map(is_public, ("93.184.216.34", "2606:4700::1111", "64:ff9b::93.184.216.34")))


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b""])
def test_a_host_that_never_comes_to_an_end_is_not_waited_for(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its headers, within the picture, and where it says nothing at all."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(pictures, "time", clock)
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as threads:
        url = f"http://localhost:{other.getsockname()[1]}/a.png"
        limits: Any = {"max_bytes": 10**6, "until": 10.0, "allowed": lambda address: True}
        asked = threads.submit(fetch, url, ["localhost"], **limits)
        with other.accept()[0] as made:
            made.sendall(beginning)
            clock.monotonic = lambda: 11.0
            made.sendall(b"0")
            with pytest.raises(ValueError, match="did not come within 10 s"):
                asked.result(60)


def test_settings_that_make_no_sense() -> None:
    for wrong in (
        {"batch": 0},
        {"queue": -1},
        {"timeout": 0.0},
        {"timeout": float("inf")},
        {"token": ""},
        {"token": "a\nb"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Settings(**wrong)
    for host in ("https://example.com", "example.com:80", ""):
        with pytest.raises(ValueError, match=f"{host!r} is no host's name; give it alone"):
            Settings(hosts=(host,))
