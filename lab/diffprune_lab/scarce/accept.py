"""Says whether the second world and its model may be frozen, by methods without training alone.

    python -m diffprune_lab.scarce.accept --weights out/language --out results/scarce_full.json
    python -m diffprune_lab.scarce.accept --weights out/language --out out/all.json --join out/one.json out/other.json

Every method runs at its released defaults, on the validation split. Six lines must hold; none is softened where one
does not. No scorer is trained before they hold.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.evaluate.answers import Answers, Sheet, answers_file, read_sheet, write_sheet
from diffprune.evaluate.encoded import EncodedQuestions, encode_questions
from diffprune.evaluate.join import join_sheets
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import Measurement, Run, answer, evaluate
from diffprune.evaluate.scoring import make_sheet, score_answers
from diffprune.methods.base import NEEDS, Card, LayerPruner, ScoringPruner
from diffprune.methods.options import parse_method
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS
from diffprune.results import read_results, write_results
from diffprune.types import VisualTokens
from diffprune_lab.scarce.digest import frozen_digest
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.reference import NAME, SPECS, load_scarce
from diffprune_lab.scarce.source import SCARCE_TASKS
from diffprune_lab.scarce.tokens import read_tokens

KEEP = 64
ITEM_TOKENS = (0, 1, 2, 3, 4, 6, 8, 12)
CURVE_KEEP = 192


def methods_without_training() -> list[str]:
    """Every method that needs no weights of its own, but the full model."""
    return [name for name in METHODS.names() if name != "full" and not METHODS.get(name).trained]


class ItemTokens(ScoringPruner):
    """Keeps so many tokens of each item, drawn at random, and fills up with ground: for the curve over their number.

    Args:
        items: Of each picture the item of every token, under the number made from its pixels.
        count: Tokens of each item that stay.
    """

    name: ClassVar[str] = "item_tokens"
    card: ClassVar[Card] = Card(idea="Keeps a given number of tokens of each item, and ground.")

    def __init__(self, items: dict[int, Tensor], count: int) -> None:
        super().__init__()
        self.items, self.count = items, count

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        assert tokens.seeds is not None
        rows = []
        for seed in tokens.seeds:
            item = self.items[seed]
            noise = torch.rand(len(item), generator=torch.Generator().manual_seed(seed % 2**63))
            same = (item[:, None] == item) & (noise[:, None] > noise)
            place = same.sum(0)  # tokens of the same item that come before it
            rows.append(torch.where(item > 0, torch.where(place < self.count, 2.0, 0.0), 1.0) + 0.5 * noise)
        return torch.stack(rows).to(tokens.x.device)


def items_of(encoded: EncodedQuestions) -> dict[int, Tensor]:
    """The item of every token of each picture; a letter of a sign is an item of its own here."""
    tokens, scenes = encoded.tokens, encoded.images
    assert tokens.seeds is not None
    found: dict[int, Tensor] = {}
    for start in range(0, len(scenes), 64):
        seen = read_tokens(render(pack(scenes[start : start + 64]), tokens.x.device)[1])
        items = torch.where(seen.letter >= 0, 20 + seen.letter, seen.item)
        found.update(zip(tokens.seeds[start : start + 64], items.cpu(), strict=True))
    return found


def method_runs(vlm: PrunedVLM, names: Sequence[str], keeps: Sequence[int], seeds: Sequence[int]) -> list[Measurement]:
    """Each method at each budget; one that draws at random, with every seed."""
    runs = []
    for name in names:
        named = parse_method(name)
        draws = "seed" in {field.name for field in dataclasses.fields(named.kind.Options)}
        for keep in keeps:
            for seed in seeds if draws else [0]:
                options: dict[str, Any] = {"seed": seed} if draws else {}
                runs.append(Measurement(name, keep, seed, named.build(block=vlm.backbone.block, **options)))
    return runs


def judge(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[tuple[str, bool, str]]:
    """(line, whether it holds, the figures) of each line of the acceptance, from the rows of a results file.

    A method inside the language model shows more than K tokens to its first layers; such methods are listed beside the
    line they have no part in.
    """
    scores = {
        who: {row["task"]: (row["score"], row["chance"]) for row in rows if "task" in row and row["method"] == who}
        for who in ("full", "blind")
    }
    full = statistics.fmean(score for score, _ in scores["full"].values())
    blind = statistics.fmean(score for score, _ in scores["blind"].values())
    chance = statistics.fmean(chance for _, chance in scores["blind"].values())
    kept = {row["method"]: row["retention"] for row in rows if row.get("keep") == KEEP and "retention" in row}
    inside = {name for name in names if issubclass(METHODS.get(name), LayerPruner)}
    others = {name: kept[name] for name in names if name not in inside and name in kept}
    best = max(others, key=lambda name: others[name])
    beside = ", ".join(f"{name} {kept[name]:.1f}" for name in names if name in inside and name in kept)
    return [
        ("full at least 95 of 100", full >= 95, f"{full:.1f}"),
        ("blind at most chance + 5", blind <= chance + 5, f"{blind:.1f}, chance {chance:.1f}"),
        (f"oracle at least 97 % at {KEEP}", kept["oracle"] >= 97, f"{kept['oracle']:.1f}"),
        (f"random at most 65 % at {KEEP}", kept["random"] <= 65, f"{kept['random']:.1f}"),
        (
            f"best method without training between 75 and 93 % at {KEEP}",
            75 <= others[best] <= 93,
            f"{best} {others[best]:.1f}; inside the language model: {beside or 'none measured'}",
        ),
        (
            "feature norm at most random + 10",
            kept["feature_norm"] <= kept["random"] + 10,
            f"{kept['feature_norm']:.1f}, random {kept['random']:.1f}",
        ),
    ]


def ask(given: argparse.Namespace) -> Sheet:
    """What the full model, the oracle, the methods and the blind model say to the questions."""
    names = [name for name in given.methods.split(",") if name] or methods_without_training()
    keeps = list(dict.fromkeys([KEEP, *map(int, given.keep.split(","))]))
    base, processor = load_scarce(given.model, given.weights)
    vlm = PrunedVLM(base.to(given.device), processor, method="full")
    runs = method_runs(vlm, [name for name in names if name != "none"], keeps, _seeds(given))
    needs = frozenset[str]().union(*(run.pruner.needs for run in runs)) & NEEDS
    questions = SCARCE_TASKS.build(split=given.split, count=given.questions)
    encoded = encode_questions(vlm, questions, needs=needs, batch_size=given.batch_size)
    if given.bounds:
        oracle = encoded.oracle()
        runs = [Measurement("oracle", keep, 0, oracle) for keep in keeps] + runs
        runs.append(Measurement("blind", 1.0, 0, vlm.method, blind=True))
    if given.curve:
        items = items_of(encoded)
        runs += [Measurement(f"item_tokens{count}", CURVE_KEEP, 0, ItemTokens(items, count)) for count in ITEM_TOKENS]
    answers = evaluate(vlm, encoded, [], batch_size=given.batch_size)  # the full model
    for run in runs:  # one by one, so that what is there can be read before all is
        try:
            last = _measure(vlm, encoded, run, given.batch_size)
        except ValueError as error:  # a method that does not fit this model is named and not measured
            print(f"{run.method} {run.keep} not measured: {error}", flush=True)
            continue
        answers.append(last)
        mean = statistics.fmean(last.score.values())
        print(f"{run.method} {run.keep} {mean:.1f} in {last.seconds:.1f} s", flush=True)
    return make_sheet(encoded.questions, answers)


def _measure(vlm: PrunedVLM, encoded: EncodedQuestions, run: Measurement, batch_size: int) -> Answers:
    """The answers of one method, where the full model's are there already."""
    pruned = vlm.with_method(run.pruner, keep=run.keep)
    start = time.perf_counter()
    said = answer(pruned, encoded, keep=run.keep, blind=run.blind, batch_size=batch_size)
    held = Run(run, pruned, view=encoded).averages(range(len(said)))
    return score_answers(
        encoded.tasks, run, said, seconds=time.perf_counter() - start, values={} if None in held else {"average": held}
    )


def _seeds(given: argparse.Namespace) -> list[int]:
    return [int(seed) for seed in given.seeds.split(",")]


def join(files: Sequence[Path], digest: str) -> Sheet:
    """The answers of several runs to the same questions as one.

    Args:
        digest: Of the world and the weights that are judged; runs of others are refused.
    """
    for file in files:
        if odd := {row.get("digest") for row in read_results(file).rows} - {digest}:
            raise ValueError(
                f"{file} was measured in another world or on other weights ({', '.join(map(str, odd))}) than those "
                f"judged ({digest}): measure it anew."
            )
    return join_sheets([read_sheet(answers_file(file)) for file in files], [str(file) for file in files])[0]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="folder that a language stage wrote")
    add("--model", choices=list(SPECS), default=NAME)
    add("--out", type=Path, required=True, help="results file to write; answers are kept beside it")
    add("--join", type=Path, nargs="*", default=[], help="results files whose answers are judged together")
    add("--questions", type=int, default=100, help="scored questions of each task")
    add("--split", default="validation")
    add("--keep", default=str(KEEP), help="comma-separated budgets; 64 is always among them")
    add("--methods", default="", help="comma-separated, or none; default: every method without training")
    add("--seeds", default="0,1,2", help="of methods that draw at random")
    add("--batch-size", type=int, default=64)
    add("--device", default="cpu")
    add("--commit", help="commit to record where there is no git checkout")
    add("--no-curve", dest="curve", action="store_false", help="leave out the curve over an item's tokens")
    add("--no-bounds", dest="bounds", action="store_false", help="leave out the oracle and the blind model")
    given = parser.parse_args(arguments)
    digest = frozen_digest(given.weights)
    sheet = join(given.join, digest) if given.join else ask(given)
    answers = sheet.answers
    rows = [{**row, "digest": digest} for row in quality_rows(answers, answers[0], chance=sheet.chance)]
    for row in rows:
        if row["method"] in ("full", "blind") and "task" in row:
            print(f"{row['method']:6s} {row['task']:18s} {row['score']:6.1f}  chance {row['chance']:5.1f}")
    for row in sorted((row for row in rows if "retention" in row), key=lambda row: -row["retention"]):
        average = f"  {row['average']:.0f} tokens a layer" if "average" in row else ""
        print(f"{row['method']:16s} {row['keep']!s:4s} {row['retention']:6.1f}{average}")
    measured = {row["method"] for row in rows if row["keep"] == KEEP}
    if {"oracle", "random", "feature_norm"} <= measured and any(row["method"] == "blind" for row in rows):
        for line, holds, figures in judge(rows, [name for name in methods_without_training() if name in measured]):
            print(f"{'holds' if holds else 'FAILS'}  {line}: {figures}")
            rows.append({"line": line, "holds": holds, "figures": figures, "digest": digest})
    notes = f"{len(sheet.questions)} prompts, {given.split} split of the second world; methods as released"
    write_results(given.out, name=given.out.stem, rows=rows, commit=given.commit, seeds=_seeds(given), notes=notes)
    write_sheet(answers_file(given.out), sheet)


if __name__ == "__main__":
    main()
