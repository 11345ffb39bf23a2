"""What can still be read from a token that training has throttled: linear probes on both sides of the block.

    python -m diffprune_lab.studies.leak --runs out/study/train/* --out results/scarce_leak.json

Every run is a folder of `diffprune train`, of DiffPrune or one of its ablations in one world, with its last checkpoint:
the throttler is there and not in the saved pruner. The tokens are those that the language model is given at the run's
last temperature with a weight below 0.05. A ridge regression on some scenes, tried on others, reads from such a token

    own     the color of the thing it lies on; on the ground what that is made of
    other   which colors the things have that it shows nothing of

in its features, behind the gate, and behind the block. `added` is what the block makes readable that was not readable
before it: nothing, where a token hears of no other.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

import diffprune_lab
from diffprune.config import RunConfig
from diffprune.evaluate.throttled import Throttle, load_throttled, run_config
from diffprune.model import PrunedVLM
from diffprune.recipes import is_diffprune
from diffprune.types import VisualTokens
from diffprune_lab.probes.store import Cell, Row, Store, collect, interval, mean_and_spread
from diffprune_lab.scarce.digest import frozen_digest
from diffprune_lab.scarce.source import encode_scenes as encode_scarce
from diffprune_lab.scenes.encode import encode_scenes
from diffprune_lab.scenes.reference import ASSETS
from diffprune_lab.studies.contents import WORLDS, Contents

KEY = ("backbone", "recipe", "throttler", "keep", "place", "reads", "stage")
STAGES = ("features", "gate", "block")
PLACES = ("ground", "thing")
LIGHT = 0.05  # tokens of a smaller weight are looked at
RIDGE = 1e-3  # of the mean square of a feature
LEAST = 5  # tokens on each side of what is to be told apart, among those that are fitted
RESAMPLES = 500
NOTE = (
    "percent of the right readings by a ridge regression, mean over what there is to read, on scenes it was not fitted "
    "to, for tokens with a weight below 0.05 that the language model is given at the last temperature; stage: in the "
    "token's features, behind the gate, behind the block; own: the color of the thing the token lies on, on the ground "
    "what that is made of; other: whether each color is there among things that the token shows nothing of, chance 50; "
    "added: behind the block minus behind the gate; intervals over scenes and seeds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is done; `each` is the tokens of a place that are taken of a scene at most."""

    fitted: int
    tried: int
    each: int = 16
    keep: int | float = 0.0556
    at_once: int = 64

    @property
    def note(self) -> str:
        return f"{NOTE}; {self.fitted} scenes fitted, {self.tried} tried, {self.each} tokens of each at most"


SIZES = {"full": Settings(fitted=768, tried=384), "tiny": Settings(fitted=12, tried=8, each=6, at_once=4)}


class Reading(NamedTuple):
    """How often a probe was right about each thing there is to read [S, G], of how many times, by scene."""

    right: Float[Tensor, "S G"]
    asked: Float[Tensor, "S G"]

    def accuracy(self, times: Float[Tensor, "R S"] | None = None) -> Float[Tensor, " R"]:
        """Percent right, mean over what there is to read, with each scene counted so many times (default: once)."""
        times = self.right.new_ones(1, len(self.right)) if times is None else times
        right, asked = times @ self.right, times @ self.asked
        known = asked > 0
        return 100 * (right / asked.clamp_min(1)).where(known, 0.0).sum(-1) / known.sum(-1).clamp_min(1)


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Study:
    """Scenes of one world, encoded once by the model that all runs share."""

    vlm: PrunedVLM
    world: str
    settings: Settings
    tokens: list[VisualTokens]
    contents: Contents

    @classmethod
    def of(cls, vlm: PrunedVLM, world: str, settings: Settings) -> "Study":
        device = vlm.base.get_input_embeddings().weight.device
        source = WORLDS[world]
        scenes = [source.make("validation", number) for number in range(settings.fitted + settings.tried)]
        parts = [scenes[start : start + settings.at_once] for start in range(0, len(scenes), settings.at_once)]
        tokens, contents = [], []
        for part in parts:
            if world == "scarce":
                tokens.append(encode_scarce(vlm, part, frozenset(), seeds=False).tokens)
            else:
                tokens.append(encode_scenes(vlm, part, seeds=False).tokens)
            rows, _ = tokens[-1].grid[0]
            contents.append(source.contents(part, 192 // rows, device))
        return cls(vlm, world, settings, tokens, Contents(*(torch.cat(parts) for parts in zip(*contents, strict=True))))

    def measure(self, folder: Path, config: RunConfig, vlm: PrunedVLM) -> Iterator[Cell]:
        """What is readable in each place at each stage of one run."""
        pruner, throttle = load_throttled(folder, vlm.method)
        pruner = pruner.to(self.tokens[0].x.device)
        stages, light = self._throttled(pruner, throttle, config.seed)
        key = {
            "backbone": config.backbone.name,
            "recipe": config.recipe,
            "throttler": throttler_name(pruner.options),
            "keep": self.settings.keep,
        }
        for place, here in zip(PLACES, (self.contents.on_ground, self.contents.on_thing), strict=True):
            scene, token = drawn_tokens(here & light, self.settings.each, config.seed)
            own, others = self.contents.own[scene, token], self.contents.others[scene, token]
            classes = WORLDS[self.world].grounds if place == "ground" else WORLDS[self.world].colors
            for reads, wanted in (("own", F.one_hot(own.clamp_min(0), classes).bool()), ("other", others)):
                found = {
                    stage: self._read(x[scene, token], wanted, scene, exclusive=reads == "own")
                    for stage, x in stages.items()
                }
                yield from cells({**key, "place": place, "reads": reads}, config.seed, found, len(scene))

    @torch.no_grad()
    def _throttled(
        self, pruner: Any, throttle: Throttle, seed: int
    ) -> tuple[dict[str, Float[Tensor, "S N D"]], Bool[Tensor, "S N"]]:
        """The tokens at each stage, and which of them are light and yet given to the language model."""
        parts: dict[str, list[Tensor]] = {stage: [] for stage in STAGES}
        light = []
        for number, tokens in enumerate(self.tokens):
            k = self.vlm.budget_of(self.settings.keep).counts(tokens.mask)

            def restrict(tokens=tokens, k=k, number=number) -> Any:
                noise = torch.Generator(tokens.x.device).manual_seed(seed * 1_000_003 + number)
                return pruner.restrict(tokens, k, tau=throttle.tau, generator=noise)

            behind = restrict()
            with without_block(pruner):
                gated = restrict()
            for stage, x in zip(STAGES, (tokens.x, gated.x, behind.x), strict=True):
                parts[stage].append(x.float())
            light.append((behind.alpha < LIGHT) & (behind.alpha >= throttle.remove_below) & tokens.mask)
        return {stage: torch.cat(some) for stage, some in parts.items()}, torch.cat(light)

    def _read(
        self, x: Float[Tensor, "T D"], wanted: Bool[Tensor, "T C"], scene: Int[Tensor, " T"], *, exclusive: bool
    ) -> tuple[Reading, int] | None:
        return read(x, wanted, scene, self.settings.fitted, self.settings.tried, exclusive=exclusive)


@contextmanager
def without_block(pruner: Any) -> Iterator[None]:
    """The pruner with its gate alone."""
    block, pruner.throttle_block = pruner.throttle_block, None
    try:
        yield
    finally:
        pruner.throttle_block = block


def throttler_name(options: Any) -> str:
    """Of a run's gate and block: the paper's, or one of its ablations."""
    return "scale gate" if options.gate == "scale" else f"{options.attention} attention"


def drawn_tokens(here: Bool[Tensor, "S N"], each: int, seed: int) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """Scene and number of some of these tokens, so many of a scene at most, at random."""
    order = torch.rand(here.shape, generator=torch.Generator().manual_seed(seed)).to(here.device)
    order = order.masked_fill(~here, 2.0)
    values, index = order.topk(min(each, here.shape[1]), largest=False)
    scene = torch.arange(len(here), device=here.device)[:, None].expand_as(index)
    return scene[values < 2], index[values < 2]


# --- the probe --------------------------------------------------------------------------------------------------------


def read(
    x: Float[Tensor, "T D"],
    wanted: Bool[Tensor, "T C"],
    scene: Int[Tensor, " T"],
    fitted: int,
    tried: int,
    *,
    exclusive: bool,
) -> tuple[Reading, int] | None:
    """How well a linear probe of the first `fitted` scenes reads the next; None where there is nothing to tell apart.

    Every token is first brought to mean 0 and deviation 1, as the norms of whoever reads it would: a token that was
    merely shrunk is as readable as it was.

    Args:
        wanted: What is there to be read in each token.
        exclusive: One of the columns holds for each token and is guessed; else each column is told to hold or not.

    Returns:
        The reading, and how many guesses there are: chance is one in so many.
    """
    x = F.layer_norm(x.double(), x.shape[-1:], eps=1e-12)
    first = scene < fitted
    known = torch.ones_like(wanted[0]) if len(wanted) else wanted.any(0)
    for which, least in ((first, LEAST), (~first, 1)):
        known &= (wanted[which].sum(0) >= least) & ((~wanted[which]).sum(0) >= least)
    if int(known.sum()) < (2 if exclusive else 1):
        return None
    wanted = wanted[:, known]
    if exclusive:  # tokens that show something else are left out
        x, scene, first, wanted = (one[wanted.any(-1)] for one in (x, scene, first, wanted))
    mean, deviation = x[first].mean(0), x[first].std(0).clamp_min(1e-6)
    x = F.pad((x - mean) / deviation, (0, 1), value=1.0)
    score = x[~first] @ fit(x[first], wanted[first])  # [T, C]
    there = wanted[~first].double()
    if exclusive:
        right = F.one_hot(score.argmax(-1), there.shape[-1]).double() * there
        asked = there
    else:
        said = (score > 0).double()
        right, asked = torch.cat([said * there, (1 - said) * (1 - there)], -1), torch.cat([there, 1 - there], -1)
    by_scene = [
        torch.zeros(tried, asked.shape[-1], dtype=asked.dtype, device=asked.device).index_add_(
            0, scene[~first] - fitted, one
        )
        for one in (right, asked)
    ]
    return Reading(*by_scene), there.shape[-1] if exclusive else 2


def fit(x: Float[Tensor, "T D"], wanted: Bool[Tensor, "T C"]) -> Float[Tensor, "D C"]:
    """Weights whose product with a token is above 0 where a column holds; both sides of a column weigh the same."""
    there = wanted.double()
    share = there / there.sum(0) / 2 + (1 - there) / (1 - there).sum(0) / 2  # [T, C]
    gram = torch.einsum("td,tc,te->cde", x, share, x)
    ridge = RIDGE * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    right = torch.einsum("td,tc->cd", x, share * (2 * there - 1))
    return torch.linalg.solve(gram + ridge, right.unsqueeze(-1)).squeeze(-1).T


def cells(key: Row, seed: int, found: dict[str, tuple[Reading, int] | None], count: int) -> Iterator[Cell]:
    """Each stage's accuracy with its error over scenes; of the block also what it adds to the gate."""
    drawn: dict[str, Tensor] = {}
    for stage, one in found.items():
        if one is None:  # no such token, or all alike
            yield Cell({**key, "stage": stage}, seed, {"tokens": count})
            continue
        reading, guesses = one
        scenes = len(reading.right)
        generator = torch.Generator().manual_seed(0)  # the same scenes for every stage, so that they can be subtracted
        times = torch.multinomial(torch.ones(RESAMPLES, scenes), scenes, replacement=True, generator=generator)
        weights = torch.zeros(RESAMPLES, scenes).scatter_add_(1, times, torch.ones(RESAMPLES, scenes))
        drawn[stage] = reading.accuracy(weights.to(reading.right)).cpu()
        accuracy = float(reading.accuracy())
        values: Row = {"accuracy": accuracy, "error": float(drawn[stage].std()), "chance": 100 / guesses}
        values["tokens"] = count
        if stage == STAGES[-1] and STAGES[1] in drawn:
            before = found[STAGES[1]]
            assert before is not None
            values["added"] = accuracy - float(before[0].accuracy())
            values["added_error"] = float((drawn[stage] - drawn[STAGES[1]]).std())
        yield Cell({**key, "stage": stage}, seed, values)


# --- all runs ---------------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Rows with mean and interval over seeds and scenes, and whether more is read than chance."""
    done = []
    for row in sorted(rows, key=lambda row: [str(row[name]) for name in KEY[:-1]] + [str(STAGES.index(row["stage"]))]):
        accuracy = collect(row, "accuracy")
        if not accuracy:
            done.append({**row, "n_seeds": 0})
            continue
        chance = mean_and_spread(collect(row, "chance"))[0]
        ci95 = interval(accuracy, collect(row, "error"))
        summary: Row = {"n_seeds": len(accuracy), "chance": chance, "accuracy": mean_and_spread(accuracy)[0]}
        summary |= {"ci95": ci95, "is_read": ci95[0] > chance}
        if added := collect(row, "added"):
            summary |= {"added": mean_and_spread(added)[0], "added_ci95": interval(added, collect(row, "added_error"))}
        done.append({**row, **summary})
    return done


def usable(folder: Path) -> tuple[Path, RunConfig] | None:
    """The folder with its config where it holds an ended run of DiffPrune on one of the worlds; else why not, told."""
    config = run_config(folder)
    why = (
        "holds no run of `diffprune train`" if config is None or not (folder / "model.safetensors").is_file()
        else f"is no run of DiffPrune ({config.method.name})" if not is_diffprune(config.method.name)
        else f"is a run on {config.data.name}" if config.data.name not in WORLDS
        else ""
    )  # fmt: skip
    if why:
        print(f"{folder} {why}: passed over", file=sys.stderr)
        return None
    assert config is not None
    return folder, config


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the probes for every run and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", nargs="+", type=Path, required=True, help="folders of `diffprune train`; others are passed over")
    add("--size", choices=tuple(SIZES), default="full", help="tiny: a trial that measures nothing")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, required=True, help="results file; it grows by what is measured")
    add("--commit", help="commit to record where there is no git checkout")
    given = parser.parse_args(arguments)
    diffprune_lab.join()  # where the packages are not installed
    found = [one for one in map(usable, given.runs) if one is not None]
    models = {(config.data.name, config.backbone.name, config.backbone.weights) for _, config in found}
    if len(models) != 1:
        parser.error(f"--runs: {'none can be used' if not models else 'they are of several models'}; give those of one")
    ((world, name, _),) = models
    settings = SIZES[given.size]
    digest = {"digest": frozen_digest(ASSETS / "scarce-llava")} if world == "scarce" else {}
    store = Store(
        path=given.out,
        notes=settings.note,
        summarise=summarise,
        key_names=KEY,
        marks=digest,
        commit=given.commit,
        device="cpu" if given.device == "cpu" else None,
    )
    study: Study | None = None
    for folder, config in found:
        base = {} if study is None else {"base": study.vlm.base, "processor": study.vlm.processor}
        vlm = PrunedVLM.from_pretrained(folder, **base)
        if study is None:
            vlm.base.to(given.device)
            study = Study.of(vlm, world, settings)
        rows = store.add(list(study.measure(folder, config, vlm)))
        print(f"{folder.name}: {len(rows)} rows of {name}", flush=True)
    shown = [row for row in store.rows() if row["stage"] == STAGES[-1]]
    for row in shown:
        if "accuracy" not in row:
            print(f"{row['recipe']:8} {row['throttler']:20} {row['place']:7} {row['reads']:6} nothing to read")
            continue
        low, high = row["ci95"]
        print(
            f"{row['recipe']:8} {row['throttler']:20} {row['place']:7} {row['reads']:6} {row['accuracy']:5.1f} "
            f"({low:.1f} to {high:.1f}), chance {row['chance']:.1f}, the block adds {row.get('added', 0.0):+.1f}"
        )


if __name__ == "__main__":
    main()
