"""Several questions about one picture in one conversation, laid out by the model's own chat template.

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
    messages = []
    for question in QUESTIONS:
        content = [{"type": "text", "text": question}]
        if not messages:
            content.insert(0, {"type": "image"})
        messages.append({"role": "user", "content": content})
        prompt = vlm.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answer = vlm.generate(images=[PICTURE], text=prompt, max_new_tokens=8)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        print(f"{question}  {answer}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
