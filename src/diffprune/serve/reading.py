"""A request's bytes as a job for the worker: parsed, checked against what is served, pictures opened, laid out.

Runs in threads beside the model's; nothing here touches it but its chat template.
"""

from collections.abc import Callable, Sequence
from typing import Any

from diffprune.backbones.messages import read_picture, read_talks
from diffprune.registry import METHODS
from diffprune.serve.errors import ApiError
from diffprune.serve.pictures import fetched, with_pictures
from diffprune.serve.rows import Wish
from diffprune.serve.schema import ChatRequest, Pruning, parse_chat, parse_json, parse_select
from diffprune.serve.settings import Settings
from diffprune.serve.worker import CHARACTERS_PER_TOKEN, Job, Worker
from diffprune.types import Budget


def served_methods(vlm: Any) -> list[str]:
    """Methods that a request may name: the model's own, and those that need no weights and fit the family."""
    own = vlm.method.name
    free = [name for name in METHODS.names() if not METHODS.get(name).trained]
    fitting = [name for name in free if METHODS.get(name).needs <= vlm.backbone.provides | {"llm_attention"}]
    return [own, *(name for name in fitting if name != own)]


class Reader:
    """Reads requests for one served model.

    Args:
        name: Under which the model is asked for.
    """

    def __init__(self, worker: Worker, settings: Settings, name: str) -> None:
        self.worker, self.settings, self.name = worker, settings, name
        self.methods = served_methods(worker.vlm)
        inside = {name for name in self.methods[1:] if METHODS.get(name).is_inside}
        inside |= {self.methods[0]} if worker.vlm.method.is_inside else set()
        self.selectable = [name for name in self.methods if name not in inside]  # these choose before the question

    def chat(self, body: bytes) -> tuple[ChatRequest, Callable[[Callable[[Any], None]], Job]]:
        """The request, and what makes its job of a listener."""
        request = parse_chat(parse_json(body))
        if request.model != self.name:
            raise ApiError(
                404,
                f"there is no model {request.model[:200]!r}; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )
        named = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        wanted = getattr(request, named)
        if wanted is not None and wanted > self.settings.max_new_tokens:
            raise ApiError(
                400,
                f"{named}={wanted} is more than the {self.settings.max_new_tokens} of an answer here; ask for fewer",
                param=named,
            )
        context, number = self.worker.context, len(request.messages)
        if context is not None and number > context:  # a template takes seconds over so many
            raise ApiError(
                400,
                f"{number} messages are more than a context of {context} tokens holds; send fewer",
                param="messages",
                code="context_length_exceeded",
            )
        pruning = request.diffprune or Pruning(keep=None, method=None)
        method = self._method(pruning.method, "diffprune.method")
        try:
            messages = [_known_role(message) for message in request.messages]
            messages, number = with_pictures(
                messages,
                most=self.settings.max_pictures,
                hosts=self.settings.hosts,
                max_bytes=self.settings.max_body,
            )
            keep = self._keep(pruning.keep, method, number, "diffprune.keep")
            (talk,) = read_talks(messages, files=False, most_pixels=self.settings.max_pixels)
            prompt = self.worker.backbone.lay_out(talk)
        except ValueError as error:
            raise ApiError(400, " ".join(str(error).split())[:2000], param="messages") from None
        self._check_length(prompt, "messages")
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        wish = Wish(
            max_tokens=wanted,
            stop=tuple(stop),
            temperature=float(request.temperature or 0.0),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            seed=request.seed,
        )

        def make(tell: Callable[[Any], None]) -> Job:
            return Job(
                tell=tell,
                method=method,
                prompt=prompt,
                pictures=talk.pictures,
                keep=keep,
                wish=wish,
                stream=bool(request.stream),
            )

        return request, make

    def select(self, body: bytes) -> Callable[[Callable[[Any], None]], Job]:
        """What makes the job of a selection of a listener."""
        request = parse_select(parse_json(body))
        method, keep = self._method(request.method, "method"), self._keep(request.keep, request.method, 1, "keep")
        self._check_length(request.text, "text")
        try:
            part = fetched({"type": "image", "image": request.image}, self.settings.hosts, self.settings.max_body)
            picture = read_picture(part["image"], "the image", files=False)
        except ValueError as error:
            raise ApiError(400, " ".join(str(error).split())[:2000], param="image") from None

        def run(vlm: Any) -> dict[str, Any]:
            budget = self.worker.vlm.budget.keep if keep is None else keep
            asked = None if vlm.method.name == "full" else budget
            (found,) = vlm.select([picture], [request.text], keep=asked)
            return {
                "object": "diffprune.selection",
                "model": self.name,
                "method": vlm.method.name,
                "size": list(picture.size),
                "num_visual": found.grid[0] * found.grid[1] if found.boxes is None else len(found.boxes),
                "keep": found.keep.tolist(),
                "logits": None if found.logits is None else _rounded(found.logits.tolist()),
                "grid": list(found.grid),
                "boxes": None if found.boxes is None else [_rounded(box) for box in found.boxes.tolist()],
            }

        return lambda tell: Job(tell=tell, method=method, run=run)

    def _method(self, name: str | None, param: str) -> str | None:
        """The method that is asked for in that field; None where it is the server's own."""
        if name is None or name == self.methods[0]:
            return None
        if name not in self.methods:
            raise ApiError(
                400, f"method {name[:100]!r} is not served; there are {', '.join(self.methods)}", param=param
            )
        return name

    def _keep(self, keep: Any, method: str | None, num_pictures: int, param: str) -> Any:
        """The budget of that field, checked."""
        if keep is None:
            return None
        each = keep if isinstance(keep, list) else [keep]
        try:
            for one in each:
                Budget(one)
                if self.worker.context is not None and isinstance(one, int) and one > self.worker.context:
                    raise ValueError(
                        f"keep={one} is more than the {self.worker.context} tokens of the model's whole context; "
                        "give fewer, or a share (0.111)"
                    )
            if isinstance(keep, list) and len(keep) != num_pictures:
                raise ValueError(f"keep={keep} holds {len(keep)} budgets for {num_pictures} pictures; give one each")
            if (method or self.methods[0]) == "full":
                raise ValueError(f"keep={keep} needs a method that chooses; name one beside it")
        except ValueError as error:
            raise ApiError(400, str(error)[:500], param=param) from None
        return keep

    def _check_length(self, text: str, param: str) -> None:
        most = None if self.worker.context is None else self.worker.context * CHARACTERS_PER_TOKEN
        if most is not None and len(text) > most:
            raise ApiError(
                400,
                f"{param}: {len(text)} characters are far more than a context of {self.worker.context} tokens holds; "
                "shorten it",
                param=param,
                code="context_length_exceeded",
            )


def _known_role(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name for the system's role is the same to a model."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
