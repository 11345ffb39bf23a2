"""The benchmarks' own metrics, as pure functions of answers.

Each follows the official script of its benchmark: GQA (exact match), VQAv2, TextVQA and VizWiz (ten answers, by one of
two normalisations), POPE (F1), MME (accuracy and accuracy+), MMBench (circular), ScienceQA and SEED (a letter).

A metric over many answers gives `Scored`: the score in percent of its maximum, and one value for each independent unit
(a question, a pair, a set of rotations) such that the score is the mean of the units. Resampling units resamples the
score, which is what a paired bootstrap needs.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

MME_SUBTASK_MAXIMUM = 200  # 100 for accuracy and 100 for accuracy+

_ARTICLES = frozenset(("a", "an", "the"))
_DIGITS = "zero one two three four five six seven eight nine ten"
_NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_DIGITS.split())}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_PERIOD = re.compile(r"(?!<=\d)\.(?!\d)")  # as the official script writes it: a period before a digit stays
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_CONTRACTIONS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
    someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
    there's they'd they'd've they'll they're they've wasn't we'd've we've weren't what'll what're what's what've when's
    where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
    y'all y'all'd've y'all'll you'd you'd've you'll you're you've 'ow's'at 'twas
"""
# Each contraction with one apostrophe forgotten, and what was meant; the last entry is the script's own slip.
_REPAIRED = {
    word[: m.start()] + word[m.end() :]: word for word in _CONTRACTIONS.split() for m in re.finditer("'", word)
} | {"somebody'd": "somebodyd"}
_MOST_PERIODS = int(re.UNICODE)  # the script gives the flag where `re.sub` takes the number of replacements


class Scored(NamedTuple):
    """A score in percent, and the values of its independent units, of which it is the mean."""

    score: float
    units: list[float]


def mean(units: list[float]) -> Scored:
    """The mean of units that already are percentages."""
    if not units:
        raise ValueError("There are no answers to score: give at least one.")
    return Scored(min(sum(units) / len(units), 100.0), units)  # rounding of weighted units may lead above it


def _check(outputs: Sequence, *others: Sequence) -> None:
    for other in others:
        if len(other) != len(outputs):
            raise ValueError(f"{len(outputs)} outputs cannot answer {len(other)} questions: give one for each.")


# Open answers --------------------------------------------------------------------------------------------------------


def exact_match(output: str, answer: str) -> float:
    """1.0 where the output is the answer, letter case, outer space and a final period aside (GQA)."""
    return float(_plain(output) == _plain(answer))


def _plain(text: str) -> str:
    return text.strip().rstrip(".").lower()


def normalize(text: str) -> str:
    """An answer as the VQA script compares it: lower case, no punctuation, no articles, digits for number words."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    spaced = text
    for mark in _PUNCTUATION:
        if mark not in text:
            continue
        # A mark at the edge of a word goes; one inside a word parts it, unless the text has a number like 1,000.
        at_edge = f"{mark} " in text or f" {mark}" in text or _COMMA_IN_NUMBER.search(text) is not None
        spaced = spaced.replace(mark, "" if at_edge else " ")
    spaced = _PERIOD.sub("", spaced, count=_MOST_PERIODS)
    words = (_NUMBERS.get(word, word) for word in spaced.lower().split())
    return " ".join(_REPAIRED.get(word, word) for word in words if word not in _ARTICLES)


def normalize_evalai(text: str) -> str:
    """An answer as EvalAI compares it: commas and question marks go and 's is a word, then as the VQA script does."""
    return normalize(text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip())


NORMALIZATIONS: dict[str, Callable[[str], str]] = {"vqa": normalize, "evalai": normalize_evalai}


def agreement(matches: int, answers: int) -> float:
    """The mean over all ways to leave one answer out of min(1, how many of the rest match / 3)."""
    if matches == 0:
        return 0.0
    return ((answers - matches) * min(1.0, matches / 3) + matches * min(1.0, (matches - 1) / 3)) / answers


def vqa_accuracy(output: str, answers: Sequence[str], normalization: str = "vqa") -> float:
    """The share of agreement with the annotators: 1.0 from three others on (VQAv2, TextVQA, VizWiz).

    Args:
        normalization: One of `NORMALIZATIONS`: the VQA script's, or EvalAI's, which LLaVA's TextVQA script uses.
    """
    if not answers:
        raise ValueError("An output cannot be compared with no answers: give the annotators' answers.")
    normal = NORMALIZATIONS[normalization]
    predicted = normal(output)
    return agreement(sum(normal(answer) == predicted for answer in answers), len(answers))


# Letters -------------------------------------------------------------------------------------------------------------


def parse_letter(output: str, options: int = 4) -> str | None:
    """The letter an output chooses, as in "B", "B.", "(B) red" or "The answer is B"; None where it chooses none."""
    letter = f"([A-{chr(ord('A') + options - 1)}])"
    found = re.match(rf"\(?{letter}(?![a-zA-Z'])", output.strip()) or re.search(rf"answer is:? \(?{letter}\b", output)
    return found.group(1) if found else None


def choice_accuracy(outputs: Sequence[str], letters: Sequence[str], options: Sequence[int] | None = None) -> Scored:
    """The share of right letters (ScienceQA, SEED).

    Args:
        options: How many there are to each question; default: four.
    """
    given = [4] * len(outputs) if options is None else options
    _check(outputs, letters, given)
    return mean([100.0 * (parse_letter(o, n) == a) for o, a, n in zip(outputs, letters, given, strict=True)])


def circular_accuracy(
    outputs: Sequence[str], letters: Sequence[str], groups: Sequence[Hashable], options: Sequence[int] | None = None
) -> Scored:
    """The share of groups (one question with its options rotated) that are right in every rotation (MMBench).

    Args:
        options: How many there are to each question; default: four.
    """
    given = [4] * len(outputs) if options is None else options
    _check(outputs, letters, groups, given)
    right: dict[Hashable, bool] = {}
    for output, letter, group, many in zip(outputs, letters, groups, given, strict=True):
        right[group] = right.get(group, True) and parse_letter(output, many) == letter
    return mean([100.0 * value for value in right.values()])


# Yes or no -----------------------------------------------------------------------------------------------------------


def parse_presence(output: str) -> str:
    """ "no" where the first sentence has a "no" or "not", else "yes": POPE's own reading, which has no third answer."""
    words = output.split(".")[0].replace(",", " ").lower().split()
    return "no" if "no" in words or "not" in words else "yes"


def parse_yes_no(output: str) -> str | None:
    """ "yes" or "no" where the output starts with it, else None (MME)."""
    start = output.strip().lower()[:4]
    return "yes" if start.startswith("yes") else "no" if start.startswith("no") else None


def ratio_units(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """One value for each question such that their mean is the ratio of the sums, in percent.

    A ratio of sums is no mean over questions, so a unit is the question's first-order share of it (the infinitesimal
    jackknife): ratio + n (above - ratio below) / sum of below. Their mean is exactly the ratio, and 0 where there is
    nothing below.
    """
    total = sum(below) or 1.0
    ratio = sum(above) / total
    return [100.0 * (ratio + len(above) * (a - ratio * b) / total) for a, b in zip(above, below, strict=True)]


def pope_f1(outputs: Sequence[str], answers: Sequence[str], subsets: Sequence[Hashable]) -> Scored:
    """F1 of "yes", 2 TP / (2 TP + FP + FN), averaged over the subsets (random, popular, adversarial)."""
    _check(outputs, answers, subsets)
    places: dict[Hashable, list[int]] = {}
    for place, subset in enumerate(subsets):
        places.setdefault(subset, []).append(place)
    units = [0.0] * len(outputs)
    for members in places.values():
        predicted = [parse_presence(outputs[place]) == "yes" for place in members]
        true = [answers[place] == "yes" for place in members]
        above = [2.0 * (p and t) for p, t in zip(predicted, true, strict=True)]
        below = [float(p) + float(t) for p, t in zip(predicted, true, strict=True)]  # 2 TP + FP + FN, one by one
        weight = len(outputs) / (len(places) * len(members))  # every subset counts the same, whatever its size
        for place, unit in zip(members, ratio_units(above, below), strict=True):
            units[place] = weight * unit
    return mean(units)


def mme_score(
    outputs: Sequence[str], answers: Sequence[str], pairs: Sequence[Hashable], subtasks: Sequence[str]
) -> Scored:
    """Accuracy + accuracy+ (both questions of a picture right), averaged over the subtasks, in percent of 200 each.

    The benchmark's own number is the sum over subtasks: `score / 100 * MME_SUBTASK_MAXIMUM * number of subtasks`.
    """
    _check(outputs, answers, pairs, subtasks)
    right = [parse_yes_no(output) == answer for output, answer in zip(outputs, answers, strict=True)]
    return pair_score(right, pairs, subtasks)


def pair_score(right: Sequence[bool], pairs: Sequence[Hashable], subtasks: Sequence[str]) -> Scored:
    """MME's score of answers that are known to be right or wrong; one unit for each pair."""
    _check(right, pairs, subtasks)
    members: dict[tuple[str, Hashable], list[bool]] = {}
    for is_right, pair, subtask in zip(right, pairs, subtasks, strict=True):
        members.setdefault((subtask, pair), []).append(is_right)
    sizes = Counter(subtask for subtask, _ in members)
    units = []
    for (subtask, _), values in members.items():
        weight = len(members) / (len(sizes) * sizes[subtask])  # every subtask counts the same, whatever its size
        units.append(50.0 * weight * (sum(values) / len(values) + all(values)))
    return mean(units)
