"""Ten simulated annotators, as VQAv2, TextVQA and VizWiz have them: most agree, some write otherwise, some err."""

from diffprune.rng import Rng
from diffprune_lab.scenes import language
from diffprune_lab.scenes.language import ENGLISH, UNANSWERABLE

ANNOTATORS = 10
_SYNONYMS = {
    "small": "little",
    "large": "big",
    "plain": "solid",
    "dotted": "spotted",
    "striped": "stripes",
    "purple": "violet",
    "ring": "donut",
    "moon": "crescent",
    "house": "home",
    "circle": "round",
    "center": "middle",
    UNANSWERABLE: "unsuitable image",
}
_NUMBER_WORDS = ("zero", "one", "two", "three", "four")
_SLIPS = {
    value: values
    for values in (
        *(ENGLISH.values(attribute) for attribute in language.ATTRIBUTES),
        ("yes", "no"),
        ("0", "1", "2", "3", "4"),
    )
    for value in values
}


def annotate(answer: str, rng: Rng) -> list[str]:
    """Ten annotators' answers: mostly the right one, some written otherwise, some synonyms, some slips.

    On one question in twelve the annotators disagree, as they do in the real data, and even the right answer may not
    get full marks.
    """
    careful = 4 if rng.below(12) == 0 else 9  # in ten
    return [_say(answer, rng) if rng.below(10) < careful else _err(answer, rng) for _ in range(ANNOTATORS)]


def _say(answer: str, rng: Rng) -> str:
    """The right answer, now and then in another spelling that the metric's normalisation takes back."""
    if rng.below(8):
        return answer
    if answer in ("0", "1", "2", "3", "4"):
        return _NUMBER_WORDS[int(answer)]
    return f"{answer.capitalize()}."


def _err(answer: str, rng: Rng) -> str:
    if answer in _SYNONYMS and rng.below(2):
        return _SYNONYMS[answer]
    if answer in _SLIPS:
        return rng.choice([value for value in _SLIPS[answer] if value != answer])
    return (
        answer[:-1] if answer.isupper() else language.other_texts(answer, rng, 1)[0] if answer.isdigit() else "unsure"
    )
