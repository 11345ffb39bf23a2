"""What is left of three sizes of one native-resolution model at five pruning rates (paper, appendix figure).

For every size a scorer is trained by the recipe of all reference models, and one by the paper's (`PAPER`); `DIVERSE` is
the first one's scorer with the other choice. The model answers the kinds of task of the paper's Qwen table through the
deployed path, beside random choice, methods without training and the oracle.
The models are `scenes-qwen-s`, `-m` and `-l`, trained by `runs/scaling.sh`.

Each (size, method, seed) is answered by itself and kept in a file of its own, so that several processes can share the
work and a run that was cut short goes on where it stopped; `collect` makes the results file from what is there.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffprune.atomic import write_text
from diffprune.config import RunConfig, make_config
from diffprune.evaluate.answers import SUFFIX, Sheet, read_sheet, write_sheet
from diffprune.evaluate.encoded import EncodedQuestions, Progress, encode_questions
from diffprune.evaluate.join import choose_runs, join_sheets
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import Measurement, evaluate
from diffprune.evaluate.scoring import make_sheet
from diffprune.loading import load_base
from diffprune.methods.base import NEEDS, Pruner
from diffprune.methods.options import FORM, parse_method, require_weights
from diffprune.model import PrunedVLM
from diffprune.results import write_results
from diffprune_lab.probes.origins import note_origin, read_origins
from diffprune_lab.probes.store import Row, locked, rounded
from diffprune_lab.scenes import qwen
from diffprune_lab.scenes.qwen import QwenSpec, save_model
from diffprune_lab.scenes.reference import checksums
from diffprune_lab.scenes.source import SCENES_TASKS
from diffprune_lab.scenes.tasks import PREFIX

NAME = "scaling"
BACKBONES = tuple(qwen.SPECS)
TASKS = tuple(PREFIX + kind for kind in ("mmbench", "mme", "pope", "scienceqa", "textvqa"))  # of the paper's Qwen table
RATES = {0.75: 25.0, 0.5: 50.0, 0.3333: 66.7, 0.2222: 77.8, 0.1111: 88.9, 0.0556: 94.4}  # share that stays: % pruned
LEARNED, DIVERSE = "diffprune", "diffprune-diverse"
PAPER = f"{LEARNED}[recipe=paper]"
UNTRAINED = ("random", "fastv", "holov", "divprune", "visionzip", "gots", "mmtok", "hidden_norm", "oracle")
METHODS = {  # measured by default; a trial takes one of each kind, to be done in seconds
    "full": (LEARNED, DIVERSE, PAPER, *UNTRAINED),
    "tiny": (LEARNED, "random", "divprune"),
}
SEEDS = (42, 123, 456)
MADE = ("answers", "scorers")  # folders in the working folder
SETTINGS_FILE = "settings.txt"  # there: how they were made
WEIGHTS_FILE = "weights-{backbone}.txt"  # there: of which weights of a model they are
NO_SEED = 0  # what neither is trained nor draws is measured once
NOTE = (
    "models scenes-qwen-s, -m and -l (Qwen2.5-VL classes on one tower trained on scenes, decoders tuned from those of "
    "scenes-nano, scenes-llava and scenes-llava grown); pictures of 160 to 272 pixels a side, so 100 to 289 visual "
    "tokens; the tasks are stand-ins; retention is the mean over the five kinds of task of the paper's Qwen table"
)
TINY_SPEC = QwenSpec(
    vision_width=32, vision_blocks=2, vision_hidden=32, text_width=32, text_layers=3, text_hidden=32, head_width=16
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """How much is done; the tiny size measures nothing."""

    steps: int
    batch: int
    held_out: int
    questions: int
    keeps: tuple[float, ...] = tuple(RATES)
    answer_batch: int = 256

    @property
    def note(self) -> str:
        """What a reader of the numbers must know of them."""
        return f"{self.steps} steps of {self.batch} captions for a scorer, {self.questions} scored questions a task"


SIZES = {
    "full": ScalingSettings(steps=1200, batch=16, held_out=128, questions=300),
    "tiny": ScalingSettings(steps=1, batch=2, held_out=0, questions=1, keeps=(0.5, 0.1111), answer_batch=32),
}


class Part(NamedTuple):
    """What is answered in one go: a method at every budget."""

    backbone: str
    method: str
    seed: int


def parts(backbones: Iterable[str], methods: Iterable[str], seeds: Sequence[int]) -> list[Part]:
    """Everything that is asked for; a method that has no use for a seed comes once."""
    return [
        Part(backbone, method, seed)
        for backbone in backbones
        for method in methods
        for seed in (seeds if _has_seed(method) else (NO_SEED,))
    ]


def check_methods(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once; an error where one cannot be measured here."""
    found = tuple(dict.fromkeys(name for name in names if name))
    for name in found:
        if is_learned(name):
            run_config(Path("model"), name, SEEDS[0], SIZES["tiny"])  # refuses what it does not know
        elif name != "oracle":
            require_weights(parse_method(name).name)
    if not found:
        raise ValueError(f"no method was named; choose from {', '.join(METHODS['full'])}")
    return found


def is_learned(method: str) -> bool:
    """Whether a scorer is trained for it here: DiffPrune, with changes or without, and by the other choice."""
    return method.partition("[")[0].strip() in (LEARNED, DIVERSE)


def read_changes(method: str) -> tuple[dict[str, Any], list[str]]:
    """What `diffprune[noise=matched;tau.start=0.5]` changes: options of the method, and keys of its training."""
    if _choice(method) == "diverse":
        parse_method(method)  # refuses what it does not know
        return {}, []
    _, bracket, rest = method.partition("[")
    if bracket and not rest.endswith("]"):
        raise ValueError(f"method {method!r} cannot be read; {FORM}")
    items = [item.strip() for item in rest[:-1].split(";")] if bracket else []
    dotted = [item for item in items if "." in item.partition("=")[0] or item.startswith("recipe=")]
    keys = [item.partition("=")[0].strip() for item in dotted]
    for key in keys:
        if key == "method.name" or key.startswith("backbone.") or keys.count(key) > 1:
            raise ValueError(f"{key} cannot be changed so in {method!r}; give other keys of a training, each once")
    own = [item for item in items if item not in dotted]
    return parse_method(f"{LEARNED}[{';'.join(own)}]" if own else LEARNED).options, dotted


def _choice(method: str) -> str:
    return "diverse" if method.partition("[")[0].strip() == DIVERSE else "top-k"


def _has_seed(method: str) -> bool:
    return is_learned(method) or (method != "oracle" and parse_method(method).name == "random")


def run_config(folder: Path, method: str, seed: int, settings: ScalingSettings) -> RunConfig:
    """The training of a scorer by the recipe of all reference models, with the changes that the method names."""
    options, overrides = read_changes(method)
    values: dict[str, Any] = {
        "backbone": {"name": "qwen2_5_vl", "weights": str(folder), "dtype": "float32"},
        "method": {"name": LEARNED, **options},
        "budget": {"range": [0.007, 0.2778]},
        "tau": {"start": 2.0, "end": 0.1, "anneal_steps": 0.8},
        "optim": {
            "lr": 5e-4,
            "batch_size": settings.batch,
            "accumulate": 1,
            "steps": settings.steps,
            "precision": "float32",
        },
        "data": {"name": "scenes", "validation": settings.held_out},
        "validation": {"every": 0.34},
        "saving": {"tensorboard": False},
        "seed": seed,
        "recipe": "bridge",
    }
    return make_config(values, overrides)


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """One model, its questions and its scorers, each made when it is first needed.

    Args:
        backbone: Name of the model.
        folder: Where it lies.
        work: Where trained scorers are kept.
        needs: What the methods to come need of the encoder.
    """

    backbone: str
    folder: Path
    work: Path
    settings: ScalingSettings
    device: str
    needs: frozenset[str]
    progress: Progress | None = None

    @cached_property
    def vlm(self) -> PrunedVLM:
        """The full model."""
        model, processor = load_base(self.folder)
        return PrunedVLM(model.to(self.device), processor, method="full")

    @cached_property
    def questions(self) -> EncodedQuestions:
        """The questions with their pictures encoded."""
        return encode_questions(
            self.vlm,
            SCENES_TASKS.build(TASKS, count=self.settings.questions),
            needs=self.needs,
            batch_size=self.settings.answer_batch,
            progress=self.progress,
        )

    def trained(self, method: str, seed: int) -> Pruner:
        """The scorer of this seed, trained here where it is not there yet."""
        from diffprune.train.run import train_pruner

        is_diverse = _choice(method) == "diverse"
        trained = LEARNED if is_diverse else method
        folder = self.work / MADE[1] / f"{self.backbone}-{trained}-{seed}"
        if not (folder / "model.safetensors").exists():
            train_pruner(run_config(self.folder, trained, seed, self.settings), folder, resume=True, quiet=True)
        return PrunedVLM.from_pretrained(
            folder, base=self.vlm.base, processor=self.vlm.processor, method=method if is_diverse else LEARNED
        ).method

    def answer(self, part: Part) -> Sheet:
        """What the full model and the method at every budget say."""
        if is_learned(part.method):
            pruner = self.trained(part.method, part.seed)
        elif part.method == "oracle":
            pruner = self.questions.oracle()
        else:
            options: dict[str, Any] = {"seed": part.seed} if _has_seed(part.method) else {}
            pruner = parse_method(part.method).build(block=self.vlm.backbone.block, **options)
        planned = [Measurement(part.method, keep, part.seed, pruner) for keep in self.settings.keeps]
        answers = evaluate(
            self.vlm, self.questions, planned, batch_size=self.settings.answer_batch, progress=self.progress
        )
        return make_sheet(self.questions.questions, answers)


def find_model(backbone: str, weights: Path | None, work: Path, *, tiny: bool) -> Path:
    """Where a model lies: below `weights`, or made on the spot with random numbers in it for a trial."""
    if weights is None and tiny:
        folder = work / "models" / backbone
        if not (folder / "config.json").exists():
            save_model(backbone, qwen.build_model(TINY_SPEC, qwen.build_tokenizer()), folder, card="A trial.\n")
        return folder
    if weights is not None:
        for folder in (weights / backbone, weights):
            if qwen.named_in(folder) == backbone:
                return folder
    raise ValueError(
        f"there is no {backbone} in {weights}: train it with runs/scaling.sh and name the folder with --weights"
    )


def run_parts(
    todo: Sequence[Part],
    out: Path,
    *,
    weights: Path | None,
    work: Path,
    settings: ScalingSettings,
    device: str,
    tiny: bool = False,
    deadline: float | None = None,
    commit: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> tuple[list[Row], bool]:
    """(rows, whether everything asked for is there); what `work` holds already is not answered again.

    Args:
        weights: Folder with a folder for each model, or of the one model.
        work: Folder for answers and scorers.
        deadline: On `time.monotonic`'s clock; what would probably end later is not begun.
    """
    _claim(work, settings)
    missing = [part for part in todo if not _answers_of(work, part).exists()]
    asked = todo if weights is not None else missing  # what is there needs no model to be collected
    folders = {
        name: find_model(name, weights, work, tiny=tiny) for name in dict.fromkeys(part.backbone for part in asked)
    }
    for name, folder in folders.items():
        _claim_weights(work, name, folder)
    bench: ModelBench | None = None
    longest, is_complete = 0.0, True
    for number, part in enumerate(missing):
        begun = time.monotonic()
        if deadline is not None and begun + longest > deadline:
            is_complete = False
            break
        if bench is None or bench.backbone != part.backbone:
            needs = _needs(other.method for other in missing if other.backbone == part.backbone)
            bench = ModelBench(
                backbone=part.backbone,
                folder=folders[part.backbone],
                work=work,
                settings=settings,
                device=device,
                needs=needs,
                progress=progress,
            )
        try:
            sheet = bench.answer(part)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"{part.backbone} does not fit on {device}; give a smaller --backbone (what was measured is kept)"
            ) from None
        write_sheet(_answers_of(work, part), sheet)
        trained = {"recipe": "paper" if part.method == PAPER else "bridge", "choice": _choice(part.method)}
        note_origin(_answers_of(work, part), commit=commit, **(trained if is_learned(part.method) else {}))
        longest = max(longest, time.monotonic() - begun)
        say(
            f"{part.backbone} {part.method} seed {part.seed}: {time.monotonic() - begun:.0f} s, "
            f"{number + 1} of {len(missing)}"
        )
    return collect(work, out, settings=settings, device=device, commit=commit), is_complete


def _claim(work: Path, settings: ScalingSettings) -> None:
    """Notes in `work` how its answers are made; a `ValueError` where they were made otherwise."""
    note = work / SETTINGS_FILE
    if not (work / MADE[0]).exists():
        write_text(note, settings.note + "\n")
    elif note.read_text(encoding="utf-8").strip() != settings.note:
        raise ValueError(
            f"{work} was made with other settings ({note.read_text(encoding='utf-8').strip()}); give another folder "
            "with --work, or --fresh to start anew"
        )


def _claim_weights(work: Path, backbone: str, folder: Path) -> None:
    """Notes in `work` which weights of a model are used; a `ValueError` where what it holds was made with others."""
    note, own = work / WEIGHTS_FILE.format(backbone=backbone), checksums(folder)
    is_begun = (work / MADE[0] / backbone).exists() or any((work / MADE[1]).glob(f"{backbone}-*"))
    if not is_begun or not note.exists():  # folders from before there were notes have none
        write_text(note, own)
    elif note.read_text(encoding="utf-8") != own:
        raise ValueError(
            f"{work} was made with other weights of {backbone} than those in {folder}; give another folder with "
            "--work, or --fresh to start anew"
        )


def _needs(methods: Iterable[str]) -> frozenset[str]:
    found = frozenset[str]()
    for name in methods:
        if name != "oracle" and not is_learned(name):
            found |= parse_method(name).build().needs  # options may change them
    return found & NEEDS


def _answers_of(work: Path, part: Part) -> Path:
    return work / MADE[0] / part.backbone / f"{part.method}-{part.seed}{SUFFIX}"


def collect(work: Path, out: Path, *, settings: ScalingSettings, device: str, commit: str | None = None) -> list[Row]:
    """Writes `scaling.json` from all answers in `work`; its rows."""
    with locked(out / f"{NAME}.json"):
        rows: list[Row] = []
        seeds: set[int] = set()
        for backbone in BACKBONES:
            files = sorted((work / MADE[0] / backbone).glob(f"*{SUFFIX}"))
            if not files:
                continue
            sheets = [read_sheet(file) for file in files]
            joined, _ = join_sheets(sheets, [str(file) for file in files])
            answers = sorted(joined.answers[1:], key=lambda one: (_place(one.entry.method), one.entry.seed))
            answers = [joined.answers[0], *choose_runs([joined.answers[0], *answers])[1:]]
            seeds |= {one.entry.seed for one in answers if _has_seed(one.entry.method)}
            there = {one.entry.method for one in answers}
            versus = next((name for name in (DIVERSE, LEARNED) if name in there), None)
            origins = read_origins(files, sheets)
            found = quality_rows(answers, joined.answers[0], versus=versus, chance=joined.chance, origins=origins)
            rows += [{"backbone": backbone, **row, **_rate(row)} for row in found]
        if rows:
            is_cpu = torch.device(device).type == "cpu" and torch.cuda.is_available()
            write_results(
                out / f"{NAME}.json",
                name=NAME,
                rows=rounded(rows),
                commit=commit,
                device="cpu" if is_cpu else None,
                seeds=sorted(seeds),
                notes=f"{NOTE}; {settings.note}",
            )
    return rows


def _place(method: str) -> int:
    order = METHODS["full"]
    return order.index(method) if method in order else len(order)


def _rate(row: Row) -> dict[str, float]:
    """Percent of the tokens that are pruned."""
    keep: float = row["keep"]
    return {"pruned": 0.0 if row["method"] == "full" else RATES.get(keep, 100 * (1 - keep))}
