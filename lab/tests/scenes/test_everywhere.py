"""The world is the same on every machine and under every version of torch."""

import hashlib

from diffprune_lab.scenes import pack, render
from diffprune_lab.scenes.tasks import TASKS, build_task


def test_a_thousand_scenes_with_their_texts_and_pictures_are_what_they_were_when_this_was_written():
    """Digests that came out of torch 2.11.0 and 2.13.0 alike."""
    texts, pictures = hashlib.sha256(), hashlib.sha256()
    for task in TASKS:
        questions = build_task(task, "test", 100).questions
        for question in questions:
            texts.update(repr((question.scene, question.prompt, question.answer)).encode())
        pixels = render(pack([question.scene for question in questions[:100]]))
        pictures.update(pixels.numpy().tobytes())  # type: ignore[union-attr]
    assert texts.hexdigest()[:32] == "a85e52bb537725707a60bbcb8b3a94ba"
    assert pictures.hexdigest()[:32] == "5bfabefb06d740325dd7d63f421c6e09"
