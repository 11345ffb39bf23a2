"""LLaVA's conversation JSON."""

from pathlib import Path
from typing import Any

from diffprune.backbones.prompts import Exchange
from diffprune.config import DataConfig
from diffprune.json_files import read_json
from diffprune.train.feed import Broken, Sample
from diffprune.train.sources.rows import read_picture
from diffprune.train.sources.table import Table


class Conversations(Table):
    """LLaVA's conversation JSON: all questions of an entry with their answers.

    Entries without a picture are skipped: there is nothing to prune in them.
    """

    def __init__(self, path: Path, config: DataConfig) -> None:
        try:
            entries = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error})") from error
        if not isinstance(entries, list):
            raise ValueError(f"{path} holds no list; give LLaVA's conversations, [{{image, conversations}}, ...]")
        self.config, self.root = config, Path(config.images) if config.images else path.parent
        self.entries = [entry for entry in entries if not isinstance(entry, dict) or "image" in entry]

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, number: int) -> Sample | Broken:
        entry = self.entries[number]
        try:
            (question, answer), *later = read_exchanges(entry.get("conversations") if isinstance(entry, dict) else None)
            if not all(asked for asked, _ in later):
                raise ValueError("a question after the first is empty")
            return Sample(
                id=number,
                picture=read_picture(entry["image"], self.config, self.root),
                question=question or self.config.prompt,
                answer=answer,
                later=tuple(later),
            )
        except ValueError as error:
            return Broken(number, str(error))


def read_exchanges(turns: Any) -> list[Exchange]:
    """Questions, the picture's mark taken out, with their answers; a last question without an answer is dropped."""
    try:
        pairs = list(zip(turns[::2], turns[1::2], strict=False))
        if not pairs or any((asked["from"], reply["from"]) != ("human", "gpt") for asked, reply in pairs):
            raise ValueError
        found = [(asked["value"].replace("<image>", "").strip(), reply["value"].strip()) for asked, reply in pairs]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(
            f"the entry has no question and answer, or not in turns: conversations is {str(turns)[:80]}"
        ) from None
    if not all(answer for _, answer in found):
        raise ValueError(f"an answer is empty: conversations is {str(turns)[:80]}")
    return found
