"""Answers in the API's own form, and what openapi.json says of requests and errors."""

import time
import uuid
from typing import Any

from diffprune.serve.worker import Answer

ERRORS = (
    (400, "The request cannot be fulfilled; the message says why."),
    (401, "The token is missing or wrong."),
    (404, "There is no such model or page."),
    (408, "The body took too long."),
    (413, "The body is too large."),
    (415, "The body is no JSON."),
    (429, "Too many requests wait; Retry-After says when to ask again."),
    (500, "The server made a mistake."),
    (503, "The server is shutting down or out of memory."),
    (504, "The answer took too long."),
)
_TEXT = {"type": ["string", "null"]}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
        }
    },
}


DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFElEQVR4nGM8oaHBgA0wYRUdtBIA4D"
    "gBKJ8lCQoAAAAASUVORK5CYII="
)  # a picture of 8 x 8


def chat_example(name: str) -> dict[str, Any]:
    """A request, for openapi.json."""
    content = [{"type": "image_url", "image_url": {"url": DOT}}, {"type": "text", "text": "What is it?"}]
    return {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def body_schema(kind: type[Any], example: dict[str, Any], **fixed: Any) -> dict[str, Any]:
    """The request's schema for openapi.json.

    Args:
        fixed: Fields that have one value on this server.
    """
    schema = kind.model_json_schema(ref_template="#/$defs/{model}")
    defs = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict) and "$ref" in node:
            return inlined(defs[node["$ref"].rpartition("/")[2]])
        if isinstance(node, dict):
            return {key: inlined(value) for key, value in node.items()}
        return [inlined(value) for value in node] if isinstance(node, list) else node

    schema["properties"] |= {key: {"type": "string", "const": value} for key, value in fixed.items()}
    content = {"application/json": {"schema": inlined(schema), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def usage(answer: Answer) -> dict[str, Any]:
    """Tokens of prompt and answer, and of the pictures before and after pruning."""
    counts = answer.counts
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": answer.num_tokens,
        "total_tokens": counts.prompt + answer.num_tokens,
        "visual_tokens": counts.visual,
        "visual_tokens_kept": counts.kept,
    }


def times(answer: Answer) -> dict[str, Any]:
    """What the answer took, in ms from the start of its batch."""
    return {
        "first_token_ms": round(1e3 * answer.first, 2),
        "total_ms": round(1e3 * answer.seconds, 2),
        "batch": answer.batch,
        "path": answer.path,
    }


def completion(name: str, answer: Answer) -> dict[str, Any]:
    """A whole answer."""
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}],
        "usage": usage(answer),
        "diffprune": times(answer),
    }
