"""Files of questions as a user would write them, and a model in a folder that is asked them."""

import json
from pathlib import Path

from diffprune.evaluate.session import Asked
from tests import tiny

SIZES = ((100, 70), (56, 56))
PICTURES = 12


def write_pictures(folder: Path) -> list[str]:
    names = [f"{number}.png" for number in range(PICTURES)]
    for number, name in enumerate(names):
        tiny.picture(number, SIZES[number % 2]).save(folder / name)
    return names


def rows(count: int, names: list[str]) -> list[dict]:
    """One picture, two, or none; English and Chinese; open questions, choices, yes or no, a conversation."""
    made: list[dict] = []
    for number in range(count):
        row: dict = {"id": f"q{number}", "question": f"What is number {number}?", "answer": "red", "task": "open"}
        row["image"] = names[number * 5 % len(names)]
        kind = number % 8
        if kind == 1:
            row |= {"image": [names[number % 7], names[number % 5]], "question": "Which of the two?"}
        elif kind == 2:
            row |= {"question": "图里有什么", "answer": "红色"}
        elif kind == 3:
            del row["image"]
        elif kind == 4:
            row |= {"task": "letters", "choices": ["a", "b", "c", "d", "e"], "answer": "c"}
        elif kind == 5:
            row |= {"task": "presence", "metric": "pope", "answer": ("yes", "no")[number // 8 % 2]}
        elif kind == 6:
            row |= {"turns": [["What do you see?", "A wall."]]}
        made.append(row)
    return made


def write_jsonl(folder: Path, count: int) -> Path:
    path = folder / "mine.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) for row in rows(count, write_pictures(folder)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def save_model(folder: Path, family: str = "llava") -> Path:
    model, processor = tiny.build(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def asked(model: Path, data: Path, out: Path | None, **changes) -> Asked:
    settings = {"methods": "full,divprune,random", "keep": "3,0.4", "seeds": "0", "batch_size": 7, "hold": 5}
    return Asked(model=str(model), data=data, out=out, max_new_tokens=3, **(settings | changes))
