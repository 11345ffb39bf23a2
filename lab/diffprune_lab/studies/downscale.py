"""What a smaller picture does against every method that drops tokens before the language model, and writes the table.

    python -m diffprune_lab.studies.downscale --model scenes-qwen-m=WEIGHTS --pruner scenes-qwen-m=runs/a,runs/b \\
        --model scenes-llava-next=WEIGHTS --out results/scenes_downscale.json

Of each model all questions and hard ones (right with the full model, wrong with the smaller picture). Answers are
written down as they come, one file for each model beside the results file; started again, it goes on.
"""

from collections.abc import Sequence
from dataclasses import replace

from diffprune.evaluate.downscale import DOWNSCALE
from diffprune.evaluate.session import Asked, Session
from diffprune.registry import METHODS
from diffprune_lab.studies import by_model

SHARES = "0.3333,0.2222,0.1111"
CONTROLS = ("random", "uniform_grid")


def before_the_language_model() -> list[str]:
    """Methods without training that drop tokens before the language model, the controls first."""
    kinds = {METHODS.get(name): name for name in METHODS.names()}  # of a rule with two names the last: one row
    found = [name for kind, name in kinds.items() if not kind.trained and kind.place != "inside the LLM"]
    return [*CONTROLS, *(name for name in found if name not in (*CONTROLS, "full"))]


def measure(name: str, asked: Asked) -> by_model.Measured:
    """Rows of one model with its name, over all questions and over the hard ones, and what must be said of it.

    A method that does not fit the model is left out and named; so is `downscale` where no share is reached.
    """
    asked = replace(asked, hard=True, versus=DOWNSCALE)
    methods, said = [*asked.methods.split(","), DOWNSCALE], []
    while True:
        try:
            outcome = Session(replace(asked, methods=",".join(methods))).run()
            break
        except ValueError as error:
            unfit = next(
                (method for method in methods if method != DOWNSCALE and method in str(error).split("'")), None
            )
            if unfit is None:
                raise
            methods.remove(unfit)
            said.append(f"{unfit} was not measured on {name}: {error}")
    sentences = [f"{name}: {sentence}" for sentence in outcome.sentences]
    return [{"backbone": name, **row} for row in outcome.rows], said + sentences


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    by_model.run(__doc__, measure, arguments, methods=",".join(before_the_language_model()), keep=SHARES)


if __name__ == "__main__":
    main()
