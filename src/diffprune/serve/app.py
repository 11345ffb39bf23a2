"""The server's routes. Bodies are read by hand, so that their size, form and time are ours to limit."""

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from diffprune.serve.errors import ApiError
from diffprune.serve.examples import find_examples
from diffprune.serve.forms import DOT, ERROR_SCHEMA, ERRORS, body_schema, chat_example, completion, times, usage
from diffprune.serve.metrics import Metrics
from diffprune.serve.reading import Reader
from diffprune.serve.schema import ChatRequest, SelectRequest
from diffprune.serve.settings import Settings
from diffprune.serve.worker import Job, Worker, timed_out

logger = logging.getLogger("diffprune")

PAGE = Path(__file__).parent / "page"
DRAINED = 16  # times the largest body that is read and thrown away, so that its sender hears why
THREADS = 4  # that open pictures
LATE = 2.0  # seconds that a reader has for an answer beyond `timeout`, in which every answer ends by itself
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class HungUp(Exception):
    """The client has gone."""


class Server:
    """One served model: its worker, its limits, and the requests under way."""

    def __init__(self, vlm: Any, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.metrics = Metrics()
        self.worker = Worker(vlm, settings, self.metrics)
        self.reader = Reader(self.worker, settings, name)
        # A thread waits for as long as a host does from which pictures come; requests without such wait for none.
        threads = settings.most if settings.hosts else THREADS
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="diffprune-read")
        self.created = int(time.time())
        self.num_open = 0
        self.bodies: dict[asyncio.Timeout, None] = {}  # that are being read, the longest-read first
        self.examples: list[dict[str, str]] = []

    async def read(self, request: Request) -> bytes:
        """The body of a request; an `ApiError` where it is no JSON, too large or too slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the body is {kind[:100] or 'of no kind'}; send Content-Type: application/json")
        parts: list[bytes] = []
        size, most = 0, self.settings.max_body
        loop = asyncio.get_running_loop()
        until = loop.time() + self.settings.timeout
        try:
            async with asyncio.timeout_at(until) as limit:
                with self._among_bodies(limit):
                    async for part in request.stream():
                        size += len(part)
                        if size <= most:
                            parts.append(part)
                        elif size > DRAINED * most:
                            break
                        else:
                            parts.clear()
        except TimeoutError:
            if loop.time() < until:  # it was given up for others
                raise self.worker.too_many() from None
            raise ApiError(408, f"the body took more than {self.settings.timeout:g} s; send it anew") from None
        if size > most:
            raise ApiError(413, f"the body has more than {most:,} bytes; send fewer or smaller pictures")
        return b"".join(parts)

    async def in_thread(self, work: Callable[[bytes], Any], body: bytes) -> Any:
        """Reading a request, beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(work, body))

    @contextmanager
    def _among_bodies(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Where too many bodies are being read, the one that has been for longest is given up: a slow sender keeps
        nobody out, and whoever sends at once is through before others come.
        """
        if len(self.bodies) >= self.settings.most:
            longest = next(iter(self.bodies))
            del self.bodies[longest]
            if not longest.expired():
                longest.reschedule(0.0)
        self.bodies[limit] = None
        try:
            yield
        finally:
            self.bodies.pop(limit, None)

    @asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, and room for it from the last byte on: one that is still read takes none."""
        self._require_room()  # before anything is read, and once it is
        body = await self.read(request)
        self._require_room()
        self.num_open += 1
        try:
            yield body
        finally:
            self.num_open -= 1

    def _require_room(self) -> None:
        if self.num_open >= self.settings.most:
            raise self.worker.too_many()

    async def hear(self, request: Request, make: Callable[[Callable[[Any], None]], Job]) -> AsyncGenerator[Any, None]:
        """What the worker tells of a job, up to its end; the job ends where the client goes or its time is over."""
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def tell(event: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told.put_nowait, event)

        job = make(tell)
        job.deadline = job.started + self.settings.timeout
        self.worker.submit(job)
        gone = asyncio.ensure_future(_gone(request))
        try:
            while True:
                heard = asyncio.ensure_future(told.get())
                left = job.deadline + 1.0 - time.monotonic()
                await asyncio.wait({heard, gone}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
                if not heard.done():
                    heard.cancel()
                    if gone.done():
                        raise HungUp
                    raise timed_out(self.settings)
                event = heard.result()
                if isinstance(event, ApiError):
                    raise event
                yield event
                if not isinstance(event, str):
                    return
        finally:
            job.cancel()
            gone.cancel()


async def _gone(request: Request) -> None:
    """Returns when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(vlm: Any, settings: Settings, *, name: str, on_ready: Callable[[], None] | None = None) -> FastAPI:
    """The application that serves a model.

    Args:
        vlm: A `PrunedVLM`; from now on the worker's alone.
        name: Under which it is asked for.
        on_ready: Called when requests are taken.
    """
    server = Server(vlm, settings, name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if on_ready is not None:
            on_ready()
        yield
        await asyncio.get_running_loop().run_in_executor(None, server.worker.stop)
        server.threads.shutdown()

    async def allowed(request: Request) -> None:
        if settings.token is None:
            return
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.encode(), settings.token.encode()):
            raise ApiError(
                401,
                "the token is missing or wrong; send Authorization: Bearer TOKEN",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    # No pages of FastAPI's own: they load scripts from elsewhere.
    app = FastAPI(title="diffprune", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = server
    app.add_middleware(Counted, server=server)
    for kind in (ApiError, HTTPException, HungUp, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _as_answer)
    _add_page(app)
    errors: Any = {
        code: {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}} for code, text in ERRORS
    }
    guarded: dict[str, Any] = {"dependencies": [Depends(allowed)], "responses": errors}
    streamed: Any = {200: {"description": "The answer, whole or as a stream.", "content": {"text/event-stream": {}}}}

    @app.get("/health", responses={503: errors[503]})
    async def health() -> Response:
        if not server.worker.is_alive:
            raise ApiError(503, "the model's thread has ended; start the server again")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=Response, **guarded)
    async def metrics() -> Response:
        server.metrics.waiting.set(server.worker.num_waiting)
        server.metrics.open.set(server.num_open)
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", **guarded)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(server)]})

    @app.get("/v1/models/{model:path}", **guarded)
    async def model(model: str) -> Response:
        if model != name:
            raise ApiError(404, f"there is no model {model[:200]!r}; this server has {name!r}", code="model_not_found")
        return JSONResponse(_model(server))

    chat_form = body_schema(ChatRequest, chat_example(name), model=name)

    @app.post("/v1/chat/completions", openapi_extra=chat_form, **guarded | {"responses": errors | streamed})
    async def chat(request: Request) -> Response:
        async with server.admitted(request) as body:
            asked, make = await server.in_thread(server.reader.chat, body)
            events = server.hear(request, make)
            if not asked.stream:
                async with aclosing(events):
                    return JSONResponse(completion(name, await anext(events)))
            first = await anext(events)  # what is wrong is told by a status, not in the stream
        return StreamingResponse(
            _stream(server, asked, first, events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    @app.post("/v1/diffprune/select", openapi_extra=body_schema(SelectRequest, {"image": DOT}), **guarded)
    async def select(request: Request) -> Response:
        async with server.admitted(request) as body:
            make = await server.in_thread(server.reader.select, body)
            async with aclosing(server.hear(request, make)) as events:
                return JSONResponse(await anext(events))

    @app.get("/v1/diffprune/examples", **guarded)
    async def examples() -> Response:
        if not server.examples:
            loop = asyncio.get_running_loop()
            server.examples = await loop.run_in_executor(server.threads, find_examples, server.worker.vlm)
        return JSONResponse({"object": "list", "data": server.examples})

    return app


# What is answered ----------------------------------------------------------------------------------------------------


def _model(server: Server) -> dict[str, Any]:
    vlm = server.worker.vlm
    return {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "diffprune",
        "diffprune": {
            "method": vlm.method.name,
            "methods": server.reader.methods,
            "selectable": server.reader.selectable,
            "keep": vlm.budget.keep,
            "max_new_tokens": server.settings.max_new_tokens,
            "context": server.worker.context,
        },
    }


async def _stream(
    server: Server, asked: ChatRequest, first: Any, events: AsyncGenerator[Any, None]
) -> AsyncIterator[str]:
    """The answer as server-sent events, in the API's own form."""
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": server.name,
    }
    with_usage = bool(asked.stream_options and asked.stream_options.include_usage)

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        empty = {"usage": None} if with_usage else {}
        return f"data: {json.dumps({**head, 'choices': choices, **empty, **more}, ensure_ascii=False)}\n\n"

    server.num_open += 1
    try:
        yield chunk({"role": "assistant", "content": ""})
        event = first
        while isinstance(event, str):
            if event:
                yield chunk({"content": event})
            event = await anext(events)
        yield chunk({}, event.finish, diffprune=times(event))
        if with_usage:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(event)})}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status is sent already
        yield f"data: {json.dumps(error.body(), ensure_ascii=False)}\n\n"
    except HungUp:
        pass
    finally:
        server.num_open -= 1
        await events.aclose()


async def _as_answer(request: Request, error: Exception) -> Response:
    """Any error in the API's own form."""
    if isinstance(error, HungUp | ClientDisconnect):
        return Response(status_code=499)  # nobody hears it
    if isinstance(error, HTTPException):
        error = ApiError(
            error.status_code,
            f"{request.method} {request.url.path[:200]} is not served ({error.detail}); see docs/serving.md",
            headers=dict(error.headers or {}),
        )
    if not isinstance(error, ApiError):
        logger.error("a request failed", exc_info=error)
        error = ApiError(500, "the server made a mistake, which stands in its log; ask again")
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _add_page(app: FastAPI) -> None:
    """The page at `/`: files of ours, nothing from elsewhere."""

    def add(path: str, file: str, kind: str) -> None:
        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return FileResponse(PAGE / file, media_type=kind, headers=PAGE_HEADERS)

    add("/", "page.html", "text/html; charset=utf-8")
    add("/look.css", "look.css", "text/css; charset=utf-8")
    add("/page.css", "page.css", "text/css; charset=utf-8")
    add("/page.js", "page.js", "text/javascript; charset=utf-8")


class Counted:
    """Counts the answers by path and status, around everything, so that none is missed; takes HEAD for GET.

    An answer that its reader does not take in time is cut off: it would keep its place for as long as the reader likes.
    """

    def __init__(self, app: Any, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # uvicorn leaves the body out
            scope = {**scope, "method": "GET"}

        loop, until, late = asyncio.get_running_loop(), 0.0, False

        async def counting(message: Any) -> None:
            nonlocal until, late
            if message["type"] == "http.response.start":
                until = loop.time() + self.server.settings.timeout + LATE
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self.server.metrics.requests.labels(path, str(message["status"])).inc()
            if late:
                return  # without its end, so that the connection is closed
            try:
                async with asyncio.timeout_at(until):
                    await send(message)
            except TimeoutError:
                late = True

        await self.app(scope, receive, counting)
