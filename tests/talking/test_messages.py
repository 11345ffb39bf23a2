"""Messages in the forms of OpenAI and transformers, several conversations at once, and what is refused."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffprune.backbones.messages import read_talks
from diffprune.memory import Memory
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned

PICTURE = tiny.picture(1)
STEPS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


def as_url() -> str:
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def asking(part: dict[str, Any], text: str = "what is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def test_a_picture_may_stand_in_its_message_in_every_form(tmp_path: Path) -> None:
    vlm = pruned("llava", EveryOther(), keep=5)
    file = tmp_path / "a.png"
    PICTURE.save(file)
    wanted = vlm.generate([PICTURE], "what is it?", **STEPS)
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": np.asarray(PICTURE)},
        {"type": "image", "image": file},
        {"type": "image", "path": str(file)},
        {"type": "image", "url": f"file://{file}"},
        {"type": "image", "url": f"FILE://{file}"},
        {"type": "image_url", "image_url": {"url": as_url()}},
        {"type": "image_url", "image_url": as_url()},
    ]
    for part in parts:
        assert vlm.generate(messages=asking(part), **STEPS) == wanted
    assert vlm.generate([PICTURE], messages=asking({"type": "image"}), **STEPS) == wanted


def test_conversations_of_different_length_answer_together_as_one_by_one() -> None:
    for family in ("llava_next", "qwen2_5_vl", "idefics3"):
        vlm = pruned(family, EveryOther())
        said = [{"role": "assistant", "content": "a ring"}, {"role": "user", "content": "which color?"}]
        other = {"type": "image", "image": tiny.picture(2, (64, 120))}
        talks = [
            [*asking({"type": "image", "image": PICTURE}), *said[:1], *asking(other, "and this?")],
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
            [*asking(other), *said],
        ]
        together = vlm.generate(messages=talks, keep=[3, 6, 4], return_ids=True, **STEPS)
        for row, (talk, keep) in enumerate(zip(talks, ([3, 6], 1, 4), strict=True)):
            assert torch.equal(vlm.generate(messages=talk, keep=keep, return_ids=True, **STEPS)[0], together[row])
        assert len(vlm.generate(messages=talks, keep=5, **STEPS)) == 3


def test_each_picture_may_have_a_budget_of_its_own() -> None:
    vlm = pruned("llava", EveryOther())
    tokens = vlm.encode(vlm.prepare([[PICTURE, tiny.picture(2)]], ["which?"]))
    assert vlm.counts(tokens, [4, 0.5]).tolist() == [4, 8]
    selection = vlm.select([PICTURE, tiny.picture(2)], keep=[2, 7])
    assert [len(image.keep) for image in selection] == [2, 7]
    with pytest.raises(ValueError, match=r"keep=\[4, 2\] holds 2 budgets for 1 pictures"):
        vlm.generate([PICTURE], "what?", keep=[4, 2])
    with pytest.raises(ValueError, match="keeps nothing"):
        vlm.generate([PICTURE], "what?", keep=[0])


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (asking({"type": "image"}), "message 1 names an image and holds none"),
        (asking({"type": "image_url", "image_url": {}}), "message 1 names an image and holds none"),
        (asking({"type": "image", "url": "https://example.com/a.png"}), "nothing is downloaded"),
        (
            asking({"type": "image", "url": "data:image/png;base64,AAAA"}),
            "data URL of message 1 .* cannot be read: a file of 3 bytes",
        ),
        (asking({"type": "image", "url": "data:image/png,AAAA"}), "it is not base64"),
        (asking({"type": "image", "url": "DATA:image/png,AAAA"}), "it is not base64"),
        (
            asking({"type": "image", "url": "HTTPS://example.com/" + "a" * 999}),
            "HTTPS://example.com/a{180}, and nothing",
        ),
        (asking({"type": "image", "path": "/nowhere/a.png"}), "there is no image file"),
        (asking({"type": "video", "video": "a.mp4"}), "neither text nor an image"),
        ([], "holds no conversation"),
        ("what is it?", "holds no conversation"),
        ([[]], "holds no conversation"),
        ([{"role": "user"}], "give a dict with role and content"),
        ([{"role": "wizard", "content": "hello"}], "role 'wizard'"),
        ([{"role": "user", "content": 3}], "has the content 3"),
        ([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}], "end with the user's"),
        ([{"role": "user", "content": "an <image> of what?"}], "0 image.s. for 1 placeholder"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_in_a_sentence(messages: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        pruned("llava").generate(messages=messages)


def test_pictures_beside_the_messages_must_all_have_a_place() -> None:
    vlm = pruned("llava")
    with pytest.raises(ValueError, match="1 of the images have no place"):
        vlm.generate([PICTURE, PICTURE], messages=asking({"type": "image"}))
    with pytest.raises(ValueError, match="messages and text are both given"):
        vlm.generate(text="what?", messages=asking({"type": "image"}))
    with pytest.raises(ValueError, match="beside 2 conversations"):
        vlm.generate([PICTURE], messages=[asking({"type": "image"})] * 2)
    with pytest.raises(ValueError, match="a memory is one conversation's"):
        vlm.generate(messages=[asking({"type": "image", "image": PICTURE})] * 2, memory=Memory())


def test_a_server_can_have_no_file_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="files are not read here"):
        read_talks(asking({"type": "image", "url": str(tmp_path / "a.png")}), files=False)
    (talk,) = read_talks(asking({"type": "image_url", "image_url": {"url": as_url()}}), files=False)
    assert talk.pictures[0].size == PICTURE.size
