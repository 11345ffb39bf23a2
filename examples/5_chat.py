"""Several questions about one picture in one conversation; the picture is encoded once and the cache is kept.

    python examples/5_chat.py
    python examples/5_chat.py llava-hf/llava-1.5-7b-hf

The lab's small model was trained on single questions, so from the second turn on its answers show how a conversation is
laid out and no more; a model that was trained to chat answers them.
"""

import sys
from pathlib import Path

import diffprune as dp

PICTURE = Path(__file__).parent / "wolf.png"
QUESTIONS = ("Which word does the sign show?", "What color is the house?", "How many things are there?")


def main(model: str | None = None) -> None:
    vlm = dp.load("scenes-llava-diffprune", keep=32) if model is None else dp.load(model, method="divprune", keep=64)
    talk = vlm.chat(max_new_tokens=8)
    for number, question in enumerate(QUESTIONS):
        print(question, end=" ")
        for piece in talk.stream(question, images=[] if number else [PICTURE]):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
