"""Why p-MoD scores what it scores: its parts replaced one at a time, on the same questions.

    python -m diffprune_lab.studies.routes runs/p-mod --keep 32 --questions 100 --out out/routes.json

Who goes through a layer, how many, and with what weight are three rules. Each is the trained method's own or a plain
one: a random order, K in every layer, weights of 1. `on_items` has for each layer the share of the tokens sent through
it that show something a text could speak of, and that share among all tokens in its last place.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.evaluate.answers import answers_file, quality_rows, write_sheet
from diffprune.evaluate.runner import Measurement, encode_questions, evaluate, make_sheet
from diffprune.evaluate.sources import find_tasks
from diffprune.inside.state import LayerState, Route
from diffprune.methods.base import LayerPruner
from diffprune.methods.options import build_method
from diffprune.methods.p_mod import PMod
from diffprune.model import PrunedVLM
from diffprune.ops import hard_topk
from diffprune.results import write_results
from diffprune_lab.scenes.oracle import Oracle

TASKS = "gqa,pope,textvqa,vqav2"
SEED = 7  # of the random orders
SHOWS_NOTHING = -1e3  # the oracle's scores of tokens that see no item lie far below

RULES = {  # label: (whose order, how many, whose weights)
    "routers": ("routers", "cosine", "routers"),
    "routers, weights 1": ("routers", "cosine", "one"),
    "first router in every layer, weights 1": ("first", "cosine", "one"),
    "one random order": ("random", "cosine", "routers"),
    "one random order, weights 1": ("random", "cosine", "one"),
    "a random order in each layer, weights 1": ("anew", "cosine", "one"),
    "one random order, K in every layer, weights 1": ("random", "even", "one"),
    "oracle's order": ("oracle", "cosine", "routers"),
}


class Rerouted(LayerPruner):
    """p-MoD with some of its rules replaced.

    Args:
        method: The one whose routers and counts are used.
        rule: A value of `RULES`.
        oracle: Of the pictures that will be asked about.
    """

    def __init__(self, method: PMod, rule: tuple[str, str, str], oracle: Oracle) -> None:
        super().__init__()
        self.method, self.oracle = method, oracle
        self.order, self.counts, self.weights = rule
        self.shares: dict[int, list[float]] = {}
        self.first: Tensor | None = None

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        if self.counts == "even":
            return dict.fromkeys(range(num_layers), min(keep, num_visual))
        return self.method.stages(num_layers, num_visual, keep)

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Route:
        route, valid = self.method.select_at(state, k), state.visual >= 0
        items = self.item_scores(state)
        if self.order == "first":
            self.first = route.weight if state.layer == 0 else self.first  # the tanh keeps the order
            assert self.first is not None
            order = self.first
        elif self.order == "oracle":
            order = items
        else:
            order = self.drawn(state)
        keep = route.keep if self.order == "routers" else hard_topk(order, k, valid)
        on_items = (items > SHOWS_NOTHING).float()
        self.shares.setdefault(state.layer, []).append(float(on_items.gather(1, keep.clamp_min(0)).mean()))
        self.shares.setdefault(-1, []).append(float(on_items.mean()))
        return Route(keep, route.weight if self.weights == "routers" else torch.ones_like(route.weight))

    def item_scores(self, state: LayerState) -> Float[Tensor, "B M"]:
        """The oracle's score of each visual token."""
        origin = state.origin
        scores = self.oracle.score(origin.tokens)
        return scores.gather(1, origin.index % scores.shape[1])  # one picture a prompt, all of it there

    def drawn(self, state: LayerState) -> Float[Tensor, "B M"]:
        """One random number for each place, whatever the picture: in all layers, or in this one."""
        seed = SEED + state.layer if self.order == "anew" else SEED
        numbers = torch.rand(state.visual.shape[1], generator=torch.Generator().manual_seed(seed))
        return numbers.to(state.hidden.device).expand(len(state.visual), -1)

    def on_items(self) -> list[float]:
        """The mean share of each layer, then that of all tokens."""
        layers = sorted(layer for layer in self.shares if layer >= 0)
        return [fmean(self.shares[layer]) for layer in [*layers, -1]] if layers else []


def measure(
    folder: str, out: Path, *, keep: int, questions: int, tasks: str = TASKS, commit: str | None = None
) -> None:
    """Answer with every rule, and write the rows."""
    trained = PrunedVLM.from_pretrained(folder)
    if not isinstance(trained.method, PMod):
        raise ValueError(f"{folder} holds {trained.method.name!r}; give a trained p_mod")
    vlm, backbone = trained.with_method("full"), trained.backbone
    source, names = find_tasks(tasks)
    encoded = encode_questions(vlm, source.build(names, count=questions))
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        untrained = build_method("p_mod", block=backbone.block, language=backbone.language)
    assert isinstance(untrained, PMod)
    oracle = encoded.oracle()
    assert isinstance(oracle, Oracle)
    rerouted = {label: Rerouted(trained.method, rule, oracle) for label, rule in RULES.items()}
    rerouted["routers, untrained"] = Rerouted(untrained, RULES["routers"], oracle)
    planned = [Measurement(label, keep, 0, pruner) for label, pruner in rerouted.items()]
    planned += [
        Measurement("random", keep, 0, build_method("random")),
        Measurement("oracle", keep, 0, oracle),
    ]
    answers = evaluate(vlm, encoded, planned)
    rows = quality_rows(answers, answers[0])
    rows = [
        row | {"on_items": rerouted[row["method"]].on_items()}
        if "retention" in row and row["method"] in rerouted
        else row
        for row in rows
    ]
    notes = "p_mod with its rules replaced one at a time; `routers` is the method itself"
    write_results(out, name=out.stem, rows=rows, seeds=[SEED], notes=notes, commit=commit)
    write_sheet(answers_file(out), make_sheet(encoded, answers))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(
        prog="python -m diffprune_lab.studies.routes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("pruner", help="folder of a trained p_mod")
    parser.add_argument("--keep", type=int, default=32)
    parser.add_argument("--questions", type=int, default=100, help="scored questions a task")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--out", required=True, type=Path, help="results file to write")
    parser.add_argument("--commit", help="to record where there is no git checkout")
    given = parser.parse_args(arguments)
    options = {"keep": given.keep, "questions": given.questions, "tasks": given.tasks, "commit": given.commit}
    measure(given.pruner, given.out, **options)
    print(f"wrote {given.out}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
