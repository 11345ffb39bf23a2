"""Every word that can occur in a text about a scene, for the tokenizer."""

from collections.abc import Iterator

from diffprune_lab.scenes.language.captions import CAPTION_PROMPTS, PLANS, RUINED_CAPTIONS
from diffprune_lab.scenes.language.questions import NUMBERS, with_options
from diffprune_lab.scenes.language.words import ATTRIBUTES, CHINESE, ENGLISH, LETTERS, UNANSWERABLE, a
from diffprune_lab.scenes.world import TAGS, WORDS, make_scene


def all_texts(scenes: int = 100) -> Iterator[str]:
    """Texts with every word that can occur, English and Chinese, each in the places where it occurs.

    Wordings are filled with every word, and captions are those of the first training scenes in every sentence plan.
    An answer follows a space, so that answers come with one.
    """
    others = (*WORDS, *NUMBERS, *map(str, range(10)), *TAGS)
    for words in (ENGLISH, CHINESE):
        values = [value for attribute in ATTRIBUTES for value in words.values(attribute)]
        options = [*values, *others, *words.plurals]
        slots = [*options, *words.directions, *(a(value) for value in values)]
        slots += [form.format(*values[:2]) for form in words.refer.values()]
        for wording in (wording for wordings in words.ask.values() for wording in wordings):
            yield from (wording.format(slot, slot, slot) for slot in slots)
        yield from (with_options("", (option,) * len(LETTERS), words) for option in options)
        yield from (f" {value}" for value in values)
    yield from (f" {answer}" for answer in (*others, *LETTERS, "yes", "no", UNANSWERABLE))
    yield from CAPTION_PROMPTS
    yield from (f" {text}" for text in RUINED_CAPTIONS)
    for index in range(scenes):
        for kind in ("plain", "sign", "diagram"):
            scene = make_scene("train", index, kind=kind, quality="clear")
            yield from (f" {plan(scene)}" for plan in PLANS)
