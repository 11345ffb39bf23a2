"""The probes coherence, landscape and alignment on trained scorers of a vision-language model of one of the worlds.

On classifiers (`bench.py`) everything is trained here. These scorers come from `diffprune train`, and the loss is that
of captions: what the paper's claims are about. A run's folder has to hold its last checkpoint, for the throttler.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffprune.backbones.prompts import Batch
from diffprune.config import RunConfig
from diffprune.evaluate.throttled import load_throttled, run_config
from diffprune.methods.base import Kept, Restricted, TrainablePruner
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.ops import hard_mask
from diffprune.restriction import restrict
from diffprune.train.sampler import noise_generator
from diffprune.train.sources import open_feed
from diffprune.types import Budget, VisualTokens
from diffprune_lab.probes import alignment, coherence, landscape
from diffprune_lab.probes.bench import PLAIN
from diffprune_lab.probes.landscape import fast_float32, filter_normalised, stepwise_variation, walk
from diffprune_lab.probes.store import SEEDS, Cell, Row, Store
from diffprune_lab.scarce.digest import frozen_digest
from diffprune_lab.scenes.reference import ASSETS

WORLDS = ("scenes", "scarce")
RECIPES = {"bridge": "diffprune", "paper": PLAIN}  # how a run of DiffPrune is called in the tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSettings:
    """How much is done.

    Args:
        batches: Of `captions` captions each, whose gradients are compared.
        keep: Budget of gradients and losses; gradients at the start also at `other_keep`.
        line: Points along one direction, at each the loss of `line_captions` captions.
        keeps: Budgets at which throttled and hard answers are compared, over `held_out` captions.
    """

    name: str
    batches: int = 32
    captions: int = 16
    keep: float = 0.1111
    other_keep: float = 0.2222
    line: int = 101
    line_captions: int = 32
    keeps: tuple[float, ...] = (0.2222, 0.1111, 0.0556, 0.0278, 0.0139, 0.0069)
    held_out: int = 256


SIZES = {
    "full": ScorerSettings(name="full"),
    "tiny": ScorerSettings(
        name="tiny", batches=3, captions=2, line=3, line_captions=2, keeps=(0.1111, 0.0278), held_out=4
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """An ended run of `diffprune train`, and what its scorer is called in the tables."""

    folder: Path
    config: RunConfig
    method: str

    @classmethod
    def of(cls, folder: Path, backbone: str) -> "Run":
        config = run_config(folder)
        if config is None or config.data.name not in WORLDS or config.backbone.name != backbone:
            raise ValueError(f"{folder} is no run of `diffprune train` on {backbone}; give the folder of one")
        name = RECIPES.get(config.recipe, "") if config.method.name == "diffprune" else config.method.name
        if name not in ("diffprune", PLAIN, "gumbel_ste"):
            raise ValueError(
                f"{folder} is a run of {config.method.name} by the recipe {config.recipe}; give runs of diffprune by "
                "the recipes bridge and paper, and of gumbel_ste"
            )
        return cls(folder, config, name)


@dataclass(frozen=True, slots=True)
class Captions:
    """Encoded pictures with their captions."""

    batch: Batch
    tokens: VisualTokens
    ids: tuple[int, ...]

    def noise(self, seed: int) -> list[torch.Generator]:
        """Of each picture, the same at every call."""
        return [noise_generator(self.tokens.x.device, seed, "probe", one) for one in self.ids]

    def counts(self, keep: float) -> Int[Tensor, " B"]:
        return Budget(keep).counts(self.tokens.mask)


class ScorerBench:
    """Runs on one model, which is loaded once, and the captions they are asked about.

    Args:
        folders: Of runs.
        backbone: The model that all of them must be of.
        say: Gets a line about what happens.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        backbone: str,
        settings: ScorerSettings,
        *,
        device: str,
        seeds: Sequence[int] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not folders:
            raise ValueError(
                f"no run on {backbone} was named; give the folders of runs of `diffprune train` with --weights"
            )
        runs = [Run.of(folder, backbone) for folder in folders]
        self.runs = [run for run in runs if not seeds or run.config.seed in seeds]
        if not self.runs:
            raise ValueError(f"no run has a seed of {', '.join(map(str, seeds))}; leave --seeds out to take them all")
        self.backbone, self.settings, self.device, self.say = backbone, settings, device, say
        self.base = PrunedVLM.from_pretrained(self.runs[0].folder)
        self.base.base.to(device)
        self._captions: dict[tuple[int, int], list[Captions]] = {}  # the same for all runs

    @property
    def world(self) -> str:
        return self.runs[0].config.data.name

    def captions(self, count: int, size: int) -> list[Captions]:
        """The first held-out captions, `size` at a time."""
        if (count, size) in self._captions:
            return self._captions[count, size]
        config = self.runs[0].config
        feed = open_feed(replace(config.data, validation=count), config.seed)
        samples = [row for row in feed.validation() if hasattr(row, "answer")]
        found = []
        for start in range(0, count, size):
            some = samples[start : start + size]
            batch, tokens = feed.encode(self.base, some)  # type: ignore[arg-type]
            found.append(Captions(batch, tokens, tuple(sample.id for sample in some)))
        self._captions[count, size] = found
        return found

    def trained(self, run: Run) -> PrunedVLM:
        """The model with a run's scorer and throttler."""
        saved = PrunedVLM.from_pretrained(run.folder, base=self.base.base, processor=self.base.processor)
        return self._with(load_throttled(run.folder, saved.method)[0])

    def start(self, run: Run, trained: PrunedVLM) -> PrunedVLM:
        """The model with a run's scorer as it was built, but for its head, which is random here.

        At zero all logits are equal, only the head would have a gradient, and there would be no landscape. What noise
        was calibrated to is no learning and is taken over.
        """
        method = run.config.method
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.config.seed)
            new = build_method(method.name, block=self.base.backbone.block, **method.options)
            head = new.scorer.head  # type: ignore[union-attr]
            assert isinstance(head, nn.Linear)
            head.reset_parameters()
        state = trained.method.state_dict()
        new.load_state_dict({name: state[name] for name in state if name.startswith("throttle_noise.")}, strict=False)
        return self._with(new)

    def _with(self, method: nn.Module) -> PrunedVLM:
        assert isinstance(method, TrainablePruner)
        return PrunedVLM(self.base.base, self.base.processor, method=method.to(self.device).eval())

    def moments(self, run: Run) -> Iterator[tuple[float, float, PrunedVLM]]:
        """Share of the training that has passed, its temperature then, and the model: at the start and at the end."""
        trained, tau = self.trained(run), run.config.tau
        yield 0.0, tau.start, self.start(run, trained)
        yield 1.0, tau.end, trained


def caption_loss(vlm: PrunedVLM, captions: Captions, run: Run, *, keep: float, tau: float) -> Float[Tensor, ""]:
    """The throttled loss as the run's training has it, but at this budget and temperature for every picture."""
    return vlm.loss(
        captions.batch,
        tokens=captions.tokens,
        tau=tau,
        keep=captions.counts(keep),
        generator=captions.noise(run.config.seed),
        remove_below=run.config.remove_below,
    )


# --- the probes -------------------------------------------------------------------------------------------------------


def measure_coherence(bench: ScorerBench, run: Run) -> Iterator[Cell]:
    """Cosines between the scorer's gradients on disjoint batches of captions, at the start and at the end."""
    settings = bench.settings
    batches = bench.captions(settings.batches * settings.captions, settings.captions)
    for moment, tau, vlm in bench.moments(run):
        weights = [weight for weight in vlm.method.scorer.parameters() if weight.requires_grad]  # type: ignore[union-attr]
        for keep in (settings.keep, settings.other_keep) if moment == 0 else (settings.keep,):
            gradients = []
            for captions in batches:
                loss = caption_loss(vlm, captions, run, keep=keep, tau=tau)
                parts = torch.autograd.grad(loss, weights, allow_unused=True)
                gradients.append(
                    torch.cat([
                        (torch.zeros_like(weight) if part is None else part).flatten()
                        for part, weight in zip(parts, weights, strict=True)
                    ])
                )  # fmt: skip
            cosine, error = coherence.pairwise_cosine(torch.stack(gradients))
            key = {"backbone": bench.backbone, "method": run.method, "keep": keep, "moment": moment}
            yield Cell(key, run.config.seed, {"cosine": cosine, "error": error, "tau": tau})


def measure_landscape(bench: ScorerBench, run: Run) -> Iterator[Cell]:
    """How rough the loss is along a random direction around the start, and around the end of training."""
    settings, seed = bench.settings, run.config.seed
    (captions,) = bench.captions(settings.line_captions, settings.line_captions)
    for moment, first, vlm in bench.moments(run):
        weights = list(vlm.method.scorer.parameters())  # type: ignore[union-attr]
        start = [weight.detach().clone() for weight in weights]
        direction = filter_normalised(start, seed * 10 + 1)
        taus = (first,) if run.method == "gumbel_ste" or moment else (first, run.config.tau.end)  # it has one loss
        for tau in taus:

            def loss(tau: float = tau, vlm: PrunedVLM = vlm) -> Float[Tensor, ""]:
                with fast_float32(bench.device):
                    return caption_loss(vlm, captions, run, keep=settings.keep, tau=tau)

            line = walk(weights, start, [direction], settings.line, loss)
            key = {"backbone": bench.backbone, "method": run.method, "moment": moment, "tau": tau}
            yield Cell(key, seed, {"variation": stepwise_variation(line), "curves": {"line": line.tolist()}})


def measure_alignment(bench: ScorerBench, run: Run) -> Iterator[Cell]:
    """Captions read with the same scorer throttled, at its last temperature, and hard."""
    settings, config, vlm = bench.settings, run.config, bench.trained(run)
    parts = bench.captions(settings.held_out, settings.captions)
    for keep in settings.keeps:
        soft, hard, weight = zip(*(both_ways(vlm, captions, config, keep) for captions in parts), strict=True)
        throttled, dropped = (torch.cat(one).double().cpu() for one in (soft, hard))  # [M, 2] each
        values = alignment.side_by_side(READ, throttled, dropped, torch.cat(weight))
        key = {"backbone": bench.backbone, "method": run.method, "keep": keep}
        yield Cell(key, config.seed, values)


READ = ("top1", "loss")


@torch.no_grad()
def both_ways(
    vlm: PrunedVLM, captions: Captions, config: RunConfig, keep: float
) -> tuple[Float[Tensor, "B 2"], Float[Tensor, "B 2"], Float[Tensor, " B"]]:
    """What is read of each caption throttled and hard, and the share of the soft weights on the tokens kept."""
    k, noise = captions.counts(keep), captions.noise(config.seed)
    tokens, kept = restrict(
        vlm.rule, captions.tokens, k, tau=config.tau.end, generator=noise, remove_below=config.remove_below
    )
    soft = answers_read(vlm, captions.batch, tokens, kept)
    hard = answers_read(vlm, captions.batch, captions.tokens, vlm.rule.deploy(captions.tokens, k))
    return soft, hard, (kept.alpha * hard_mask(kept.logits, k)).sum(-1) / k


def answers_read(vlm: PrunedVLM, batch: Batch, tokens: VisualTokens, kept: Kept | Restricted) -> Float[Tensor, "B 2"]:
    """Of each picture the percent of its caption's words that are said at first, each after the right ones, and the
    mean loss of a word."""
    states = vlm.decoder.states(vlm.splice(batch, tokens, kept), None, tau=None, generator=None)
    wanted = states.targets != -100
    row = wanted.nonzero()[:, 0]
    logits, targets = vlm.backbone.model.lm_head(states.hidden[wanted]).float(), states.targets[wanted]
    right = 100.0 * (logits.argmax(-1) == targets)
    each = torch.stack([right.float(), F.cross_entropy(logits, targets, reduction="none")], -1)
    total = torch.zeros(len(wanted), 2, device=each.device).index_add_(0, row, each)
    return total / wanted.sum(-1, keepdim=True)


# --- files ------------------------------------------------------------------------------------------------------------

Measure = Callable[[ScorerBench, Run], Iterator[Cell]]
PROBES: dict[str, tuple[Measure, tuple[str, ...], Callable[[Sequence[Row]], list[Row]], str]] = {
    "coherence": (measure_coherence, coherence.KEY, coherence.summarise, coherence.NOTE.split("; box:")[0]),
    "landscape": (measure_landscape, (*landscape.KEY, "moment"), landscape.summarise, landscape.NOTE),
    "alignment": (
        measure_alignment,
        (*alignment.KEY, "method"),
        partial(alignment.summarise, names=READ),
        "top1: percent of the words of held-out captions that are said at first, each after the right ones; loss: of "
        "a word; gap: throttled minus hard, paired by picture; weight: share of the soft weights that lies on the K "
        "tokens kept",
    ),
}


def open_store(name: str, bench: ScorerBench, out: Path, *, commit: str | None = None) -> Store:
    """A probe's results file, `<world>_<probe>.json`; rows of the second world carry what it was frozen with."""
    _, key, summarise, note = PROBES[name]
    settings, config = bench.settings, bench.runs[0].config
    digest = {"digest": frozen_digest(ASSETS / "scarce-llava")} if bench.world == "scarce" else {}
    captions = {
        "coherence": f"{settings.batches} batches of {settings.captions}",
        "landscape": f"{settings.line} points, {settings.line_captions}",
        "alignment": f"{settings.held_out}",
    }[name]
    return Store(
        path=out / f"{bench.world}_{name}.json",
        notes=f"{note}; {captions} captions; scorers of {config.optim.steps} steps by `diffprune train` on "
        f"{bench.backbone}; size {settings.name}",
        summarise=summarise,
        key_names=key,
        marks=digest,
        commit=commit,
        device="cpu" if torch.device(bench.device).type == "cpu" and torch.cuda.is_available() else None,
    )


def run_probes(
    names: Sequence[str], bench: ScorerBench, out: Path, *, commit: str | None = None
) -> dict[str, tuple[Path, list[Row]]]:
    """The file and the rows of each probe; what a file already holds is not measured again."""
    found = {}
    for name in names:
        store = open_store(name, bench, out, commit=commit)
        for run in bench.runs:
            seed = run.config.seed
            if any(row["method"] == run.method and str(seed) in row[SEEDS] for row in store.rows()):
                continue
            store.add(list(PROBES[name][0](bench, run)))
            bench.say(f"{bench.backbone} {name}: {run.method}, seed {seed}")
        found[name] = store.path, store.rows()
    return found
