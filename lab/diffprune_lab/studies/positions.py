"""What kept tokens lose where they are numbered without gaps: original against packed positions, and writes the table.

    python -m diffprune_lab.studies.positions --model scenes-llava=scenes-llava --model scenes-qwen-m=WEIGHTS \\
        --pruner scenes-llava=runs/a,runs/b,runs/c --pruner scenes-qwen-m=runs/d,runs/e,runs/f \\
        --out results/scenes_positions.json

Every model answers the same questions twice. Percentages are of the full model at its own, original positions in both
cases: a model whose positions are three numbers is another one when it counts by one. Packed rows carry the `lead` of
the original ones over them. Answers are written down as they come, one file for each model and rule beside the results
file; started again, it goes on.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffprune.evaluate.answers import OTHERWISE
from diffprune.evaluate.session import Asked, Outcome, Session
from diffprune.fitting import POSITIONS
from diffprune_lab.studies import by_model


def measure(name: str, asked: Asked) -> by_model.Measured:
    """Rows of one model by both rules, with its name, and what must be said of it."""
    outcomes: dict[str, Outcome] = {}
    for rule in POSITIONS:
        assert asked.out is not None
        out = asked.out.with_name(f"{asked.out.stem}-{rule}.json")
        outcomes[rule] = Session(replace(asked, positions=rule, out=out)).run()
    return [{"backbone": name, **row} for row in joined_rows(outcomes)], [
        f"{name}: {sentence}" for sentence in dict.fromkeys(s for one in outcomes.values() for s in one.sentences)
    ]


def joined_rows(outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Rows of both rules, each with its `positions`; every percentage is of the full model at original positions."""
    original, packed = (outcomes[rule] for rule in POSITIONS)
    renamed = [replace(one, entry=replace(one.entry, method=one.entry.method + OTHERWISE)) for one in packed.answers]
    return by_model.rows_both_ways(
        [*original.answers, *renamed], key="positions", ways=POSITIONS, origins=original.rows
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    by_model.run(__doc__, measure, arguments, methods="random,divprune", keep="128,64,32")


if __name__ == "__main__":
    main()
