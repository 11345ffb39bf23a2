"""Conversations as the reference model reads them."""

from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from tests.train.test_conversations import talk


def test_the_reference_model_is_asked_on_as_its_template_says() -> None:
    vlm = PrunedVLM(*load_base("scenes-nano"))
    ids = talk(vlm).features["input_ids"][0].tolist()
    text = " ASSISTANT: a cat</s>USER: Where? ASSISTANT: to the left</s>USER: Sure? ASSISTANT: yes</s>"
    words = vlm.backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[-len(words) :] == words
