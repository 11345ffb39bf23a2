"""Conversations as users write them, in the form of OpenAI and transformers, read and checked before a model sees them.

    [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]},
     {"role": "assistant", "content": "A ring."},
     {"role": "user", "content": "Which color?"}]

A picture stands in its part as "image", "path" or "url", or as OpenAI's "image_url"; a part {"type": "image"} alone
takes the next of the pictures given beside the messages. Nothing is downloaded.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from diffprune.backbones.processors import open_image

ROLES = ("system", "user", "assistant")
IMAGE_PARTS = ("image", "image_url", "input_image")
TEXT_PARTS = ("text", "input_text", "output_text")
PICTURE_KEYS = ("image", "path", "url", "image_url")  # of a part: where its picture may stand

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation: its turns as a chat template takes them, and its pictures in the order of their places."""

    turns: list[Message]
    pictures: list[Image.Image]


def is_one_talk(messages: Any) -> bool:
    """Whether messages are those of one conversation; else each entry is a conversation."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(
            f"messages={_short(messages)} holds no conversation; give a list of messages with role and content"
        )
    return isinstance(messages[0], Mapping)


def read_talks(messages: Any, images: Any = None, *, files: bool = True, most_pixels: int | None = None) -> list[Talk]:
    """Conversations, checked, with their pictures opened.

    Args:
        messages: Of one conversation, or a list of conversations.
        images: Pictures for parts that name one and hold none: of one conversation a list, of several one list each.
        files: Whether a picture may be named by a path on this machine; a server for strangers says no.
        most_pixels: Of the pictures of a conversation together.
    """
    if is_one_talk(messages):
        return [_read(messages, images, files, most_pixels)]
    beside = [None] * len(messages) if images is None else images
    if not isinstance(beside, list | tuple) or len(beside) != len(messages):
        given = len(beside) if isinstance(beside, list | tuple) else type(beside).__name__
        raise ValueError(f"images={given} beside {len(messages)} conversations; give one list each (None for none)")
    return [_read(talk, own, files, most_pixels) for talk, own in zip(messages, beside, strict=True)]


def _read(messages: Any, images: Any, files: bool, most_pixels: int | None) -> Talk:
    is_one_talk(messages)
    if images is not None and not isinstance(images, list | tuple):
        raise ValueError(f"images is a {type(images).__name__}; give a list of images, even for one")
    beside = list(images or ())
    turns: list[Message] = []
    pictures: list[Image.Image] = []
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{where} is {_short(message)}; give a dict with role and content")
        if not isinstance(message["role"], str) or message["role"] not in ROLES:
            raise ValueError(f"{where} has the role {_short(message['role'])}; there are {', '.join(ROLES)}")
        content: list[Message] = []
        for part in _parts(message["content"], where):
            if part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
                content.append({"type": "text", "text": part["text"]})
            elif part.get("type") in IMAGE_PARTS:
                pictures.append(_picture(part, beside, where, files))
                pixels = sum(picture.width * picture.height for picture in pictures)
                if most_pixels is not None and pixels > most_pixels:
                    raise ValueError(
                        f"the first {len(pictures)} pictures have {pixels:,} pixels together; scale them below "
                        f"{most_pixels:,} first, or send fewer"
                    )
                content.append({"type": "image"})
            else:
                raise ValueError(f"{where} holds {_short(part)}, which is neither text nor an image; leave it out")
        turns.append({"role": message["role"], "content": content})
    if beside:
        raise ValueError(
            f"{len(beside)} of the images have no place in the messages; write {{'type': 'image'}} where each belongs"
        )
    if turns[-1]["role"] != "user":
        raise ValueError(f"the last message is the {turns[-1]['role']}'s; end with the user's, which is to be answered")
    return Talk(turns, pictures)


def _parts(content: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list | tuple) and content and all(isinstance(part, Mapping) for part in content):
        return list(content)
    raise ValueError(f"{where} has the content {_short(content)}; give a text, or a list of parts with a type each")


def _picture(part: Mapping[str, Any], beside: list[Any], where: str, files: bool) -> Image.Image:
    """The picture of a part, or the next of those beside the messages."""
    source = next((part[key] for key in PICTURE_KEYS if part.get(key) is not None), None)
    if isinstance(source, Mapping):  # OpenAI: {"image_url": {"url": ...}}
        source = source.get("url")
    if source is None:
        if not beside:
            raise ValueError(
                f"{where} names an image and holds none; put it into the part as 'image' (a path, a PIL image or an "
                "array of bytes) or 'url' (data:image/...;base64,...), or give it in images="
            )
        source = beside.pop(0)
    return read_picture(source, where, files=files)


def read_picture(source: Any, where: str, *, files: bool) -> Image.Image:
    """The picture in a data URL, at a path, or in whatever `open_image` takes.

    Args:
        where: What names it, as errors call it.
        files: Whether that may be a path on this machine.
    """
    if not isinstance(source, str):
        return open_image(source)
    kind = source[:8].lower()  # a scheme may be written in capitals
    if kind.startswith("data:"):
        return _decode(source, where)
    if kind.startswith(("http://", "https://")):
        raise ValueError(
            f"{where} names the picture {source[:200]}, and nothing is downloaded; give the file or its bytes"
        )
    if not files:
        raise ValueError(
            f"{where} names the file {source[:200]!r}, and files are not read here; send data:image/...;base64,..."
        )
    return open_image(source[len("file://") :] if kind.startswith("file://") else source)


def _decode(url: str, where: str) -> Image.Image:
    """The picture in a data URL."""
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return open_image(base64.b64decode(data, validate=True))
    except ValueError as error:  # of base64 too
        raise ValueError(f"the data URL of {where} ({head[:40]}) cannot be read: {error}") from error


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:60] + "..."
