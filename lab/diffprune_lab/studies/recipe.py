"""What one config gives on several models: retention at 11.1 % by the deployed path, and writes the table.

    python -m diffprune_lab.studies.recipe --model scenes-nano=scenes-nano --model scarce-llava=scarce-llava \\
        --pruner scenes-nano=runs/a,runs/b --pruner scarce-llava=runs/c,runs/d --out results/recipe.json

`runs/recipe.sh` trains the scorers. A model answers the tasks of its own world. Answers are written down as they come,
one file for each model beside the results file; started again, it goes on.
"""

from collections.abc import Sequence
from dataclasses import replace

from diffprune.evaluate.session import Asked, Session
from diffprune_lab.studies import by_model

KEEP = 0.1111  # 64 of 576


def measure(name: str, asked: Asked) -> by_model.Measured:
    """Rows of one model with its name, and what must be said of it."""
    outcome = Session(replace(asked, tasks="scarce" if name.startswith("scarce") else "scenes")).run()
    return [{"backbone": name, **row} for row in outcome.rows], [f"{name}: {said}" for said in outcome.sentences]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    by_model.run(__doc__, measure, arguments, methods="random,oracle", keep=str(KEEP))


if __name__ == "__main__":
    main()
