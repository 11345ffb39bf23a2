"""What a request says, checked: the fields of OpenAI's chat completions that are understood, and `diffprune`.

A field is either obeyed or refused by name; values that ask for nothing (`n` of 1, no penalties) are taken.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from diffprune import json_files
from diffprune.serve.errors import ApiError

# Fields that are taken with these values alone, beside null: they then ask for what is done anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "store": (False,),
}
UNHEARD = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})  # about the sender
# What a message is, for the schema; `backbones.messages` reads it and says what is wrong with one.
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "anyOf": [
                            {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                            {
                                "type": "object",
                                "required": ["type", "image_url"],
                                "properties": {
                                    "type": {"const": "image_url"},
                                    "image_url": {
                                        "type": "object",
                                        "required": ["url"],
                                        "properties": {"url": {"type": "string"}},
                                    },
                                },
                            },
                        ]
                    },
                },
            ]
        },
    },
}
STOPS, STOP_LENGTH = 16, 1000  # texts at which an answer may end, and characters of one
Number = StrictInt | StrictFloat
Count = Annotated[StrictInt, Field(ge=1)]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=STOP_LENGTH)]


class Pruning(BaseModel):
    """How the pictures of a request are pruned."""

    model_config = ConfigDict(extra="forbid")
    keep: Number | list[Number] | None = Field(
        None, description="Tokens of each picture (64) or a share (0.111); a list has one for each picture."
    )
    method: StrictStr | None = Field(None, description="By which method; default: the server's own. `full` keeps all.")


class StreamOptions(BaseModel):
    """What a stream holds beside its text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow")
    model: StrictStr
    messages: list[dict[str, Any]] = Field(min_length=1, json_schema_extra={"items": MESSAGE})
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS)] | None = None
    temperature: Annotated[StrictFloat | StrictInt, Field(ge=0, le=2)] | None = None
    top_p: Annotated[StrictFloat | StrictInt, Field(ge=0, le=1)] | None = None
    seed: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    diffprune: Pruning | None = None


class SelectRequest(BaseModel):
    """The body of POST /v1/diffprune/select."""

    model_config = ConfigDict(extra="forbid")
    image: StrictStr = Field(description="data:image/...;base64,...")
    text: StrictStr = Field("", description="A question, for methods that read it.")
    keep: Number | None = None
    method: StrictStr | None = None


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object; an `ApiError` where it is none."""
    if not body.strip():
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        found = json_files.parse_json(body, constants=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON in UTF-8 ({str(error)[:200]}); send a JSON object") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {_short(found)}; send a JSON object")
    return found


def parse_chat(found: dict[str, Any]) -> ChatRequest:
    """A chat request, checked; an `ApiError` that names the field where one is wrong."""
    request = _validated(ChatRequest, found)
    for name, value in (request.model_extra or {}).items():
        if name in UNHEARD or value is None or any(_same(value, usual) for usual in NEUTRAL.get(name, ())):
            continue
        if name in NEUTRAL:
            raise ApiError(400, f"{name}={_short(value)} cannot be obeyed here; leave it out", param=name)
        raise _unknown(name)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is for streams; set stream, or leave it out", param="stream_options")
    return request


def parse_select(found: dict[str, Any]) -> SelectRequest:
    """A request for a selection, checked."""
    return _validated(SelectRequest, found)


def _validated(kind: type[Any], found: dict[str, Any]) -> Any:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(step) for step in first["loc"] if not _is_type(step))
        if first["type"] == "extra_forbidden":
            raise _unknown(where) from None
        if "keep" in first["loc"]:  # pydantic would ask for an integer, which is but one of its forms
            forms = "tokens (64) or a share (0.111)" + (
                ", or a list with one for each picture" if kind is ChatRequest else ""
            )
            raise ApiError(400, f"{where}={_short(first['input'])} is no budget; give {forms}", param=where) from None
        if "stop" in first["loc"]:  # likewise
            raise ApiError(
                400,
                f"stop={_short(first['input'])} is no stop; give a text, or a list of up to {STOPS} texts, none empty "
                f"or of more than {STOP_LENGTH:,} characters",
                param="stop",
            ) from None
        said = "Input should be an object" if first["type"] in ("model_type", "dict_type") else first["msg"]
        given = "" if first["type"] in ("missing", "too_short") else f", not {_short(first['input'])}"
        raise ApiError(400, f"{where}: {said}{given}", param=where) from None


def _unknown(name: str) -> ApiError:
    return ApiError(400, f"there is no field {name[:100]!r}; leave it out", param=name[:100], code="unknown_parameter")


def _is_type(step: object) -> bool:
    """Whether a step of pydantic's path names a type of a union, not a field."""
    return isinstance(step, str) and (
        step in ("int", "float", "str", "bool", "dict")
        or step.startswith(("list[", "constrained", "function", "union"))
    )


def _same(value: Any, usual: Any) -> bool:
    return value == usual and isinstance(value, bool) == isinstance(usual, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
