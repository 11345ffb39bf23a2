"""What a model learns about a scene: captions, and questions in the words of the ten tasks."""

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache

from diffprune.rng import Rng
from diffprune_lab.scenes import language
from diffprune_lab.scenes.families import EXERCISES, SPECS, Draw
from diffprune_lab.scenes.language import ENGLISH, Pair, Words
from diffprune_lab.scenes.tasks import TASKS, with_options
from diffprune_lab.scenes.world import Scene

DEFAULT_WEIGHTS: Mapping[str, int] = {
    "caption": 20,
    "gqa": 16,
    "mmbench": 9,
    "mmbench_cn": 9,
    "mme": 8,
    "pope": 8,
    "scienceqa": 16,
    "vqav2": 10,
    "textvqa": 16,
    "seed": 6,
    "vizwiz": 6,
}
_TURN_TRIES = 16  # draws before a turn repeats what was said


def training_turns_by_kind(
    scene: Scene, rng: Rng, count: int, weights: Mapping[str, int] | None = None, *, exercises: bool = False
) -> list[tuple[str, str, str]]:
    """(kind, prompt, answer) of turns about a scene: captions and questions of all ten tasks, in the same words.

    A scene gets what fits it: signs are read where there is one, diagrams are asked about in diagrams, and a ruined
    picture gets a caption that says so and questions that are unanswerable. No prompt comes twice and there is one
    caption at most, unless the weights leave nothing else to say.

    Args:
        rng: Its own stream for each scene, for example `Rng(seed, "turns", scene.index)`.
        weights: How often each of "caption" and TASKS is drawn, where the scene allows it; unnamed ones never.
        exercises: Whether some of what multiple choice asks is asked openly too.
    """
    chosen = DEFAULT_WEIGHTS if weights is None else weights
    bounds, entries = _mix(tuple(chosen.items()), scene.kind, scene.quality == "ruined", exercises)
    turns: list[tuple[str, str, str]] = []
    said: set[str] = set()  # prompts, and "caption" once there is one
    for _ in range(count):
        turn = None
        for _ in range(_TURN_TRIES):
            kind, draw, words = entries[bisect_right(bounds, rng.below(bounds[-1]))]
            if draw is None:
                if kind in said:
                    continue
                turn = _caption_turn(scene, rng)
                break
            made = _question_turn(scene, rng, kind, draw, words)
            turn = turn if made is None else made  # said before is better than nothing to say
            if made is not None and made[1] not in said:
                break
        if turn is None:
            turn = _caption_turn(scene, rng)
        turns.append(turn)
        said.update((turn[1], "caption") if turn[0] == "caption" else turn[1:2])
    return turns


def _caption_turn(scene: Scene, rng: Rng) -> tuple[str, str, str]:
    return "caption", rng.choice(language.CAPTION_PROMPTS), language.caption(scene, rng)


def _question_turn(scene: Scene, rng: Rng, kind: str, draw: Draw, words: Words) -> tuple[str, str, str] | None:
    draft = draw(scene, rng)
    if draft is None:
        return None
    if isinstance(draft, Pair):
        return (kind, draft.yes, "yes") if rng.below(2) else (kind, draft.no, "no")
    if draft.wrong:
        prompt, answer, _ = with_options(draft, rng.below(len(draft.wrong) + 1), words)
        return kind, prompt, answer
    return kind, draft.text, draft.answer


@lru_cache(maxsize=64)
def _mix(
    weights: tuple[tuple[str, int], ...], kind: str, ruined: bool, exercises: bool
) -> tuple[list[int], list[tuple[str, Draw | None, Words]]]:
    """Cumulative weights and what they stand for (no draw is a caption), among what fits such a scene."""
    bounds: list[int] = []
    entries: list[tuple[str, Draw | None, Words]] = []
    bound = 0
    for name, weight in weights:
        if name != "caption" and name not in SPECS:
            raise ValueError(f"There is no task {name!r} to weigh: choose among caption, {', '.join(TASKS)}.")
        if name == "caption":
            fitting: list[tuple[int, Draw | None]] = [(1, None)]
        else:
            fitting = [
                (family.weight, family.draw)
                for family in (*SPECS[name].families, *(EXERCISES.get(name, ()) if exercises else ()))
                if family.kind in (None, kind) and (family.qualities == ("ruined",)) == ruined
            ]
        total = sum(share for share, _ in fitting)
        for share, draw in fitting:
            bound += (weight * share << 20) // total
            bounds.append(bound)
            entries.append((name, draw, ENGLISH if draw is None else SPECS[name].words))
    if not bound:  # nothing that was asked for fits: a caption always does
        return [1], [("caption", None, ENGLISH)]
    return bounds, entries
