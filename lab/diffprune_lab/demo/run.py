"""Train two scorers on the frozen embedded model, compare them with other methods, and write what came out."""

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffprune.evaluate.encoded import Progress, encode_questions
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import Measurement, evaluate
from diffprune.loading import load_base
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.recipes import Recipe, recipe_values
from diffprune.registry import METHODS
from diffprune.results import check_rows, command_line, device_name, library_versions, source_commit
from diffprune.speed.flops import prefill_flops
from diffprune.types import Budget
from diffprune_lab.demo.examples import Example, ask_larger, make_examples
from diffprune_lab.demo.page import render_page
from diffprune_lab.demo.story import BUDGETS, MODEL, TRAINED_BUDGETS, Settings, Story
from diffprune_lab.scenes.captions import train_on_captions
from diffprune_lab.scenes.reference import ASSETS
from diffprune_lab.scenes.source import SCENES_TASKS

LEARNED: dict[str, Recipe] = {"diffprune": "bridge", "gumbel_ste": "default"}  # what is trained, and by which recipe
DIVERSE = "diffprune-diverse"  # the same trained scorer with another choice, where the library has it
OTHERS = ("gots", "divprune", "cls_attention", "uniform_grid", "random")  # the strong ones first
LARGER = "scenes-llava"  # shown where a pruner trained for it lies beside its weights
LARGER_PICTURES = 4


@dataclass(slots=True)
class Clock:
    """Seconds of each part, in the order in which they were done."""

    parts: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.parts[part] = now - self.last
        self.last = now


def run_demo(out: Path, settings: Settings, progress: Progress) -> Story:
    """The whole job; `out` gets the page, the summary, the trained pruner and a picture to ask about."""
    clock = Clock()
    base, processor = load_base(MODEL)
    vlm = PrunedVLM(base, processor, method="full")
    clock.lap("load")

    trained: dict[str, PrunedVLM] = {}
    losses: dict[str, list[float]] = {}
    for name, recipe in LEARNED.items():
        values = recipe_values(recipe, name)
        torch.manual_seed(settings.seed)  # both scorers start from the same weights
        pruned = PrunedVLM(base, processor, method=name, keep=BUDGETS[1], **values.get("method", {}))
        losses[name] = train_on_captions(
            pruned,
            steps=settings.steps,
            seconds=settings.seconds,
            batch_size=settings.batch_size,
            budgets=TRAINED_BUDGETS,
            remove_below=values.get("remove_below", 0.0),
            seed=settings.seed,
            on_step=lambda done, _, stage=f"train {name}": progress(stage, int(99 * done), 100),
        )
        progress(f"train {name}", 100, 100)
        pruned.method.eval()
        trained[name] = pruned
        clock.lap(f"train {name}")

    others = {name: build_method(name, block=vlm.backbone.block) for name in OTHERS}
    diverse = _diverse(trained["diffprune"])
    needs = frozenset().union(*(method.needs for method in others.values()))
    encoded = encode_questions(vlm, SCENES_TASKS.build(count=settings.questions), needs=needs, progress=progress)
    clock.lap("encode pictures")

    learned = {name: pruned.method for name, pruned in trained.items()}
    methods = learned | diverse | others | {"oracle": encoded.oracle()}
    measurements = [
        Measurement(name, keep, settings.seed, method) for name, method in methods.items() for keep in BUDGETS
    ]
    answers = evaluate(vlm, encoded, measurements, progress=progress)
    rows = quality_rows(answers, answers[0])
    check_rows(rows)
    clock.lap("answer")

    examples = make_examples(vlm, encoded, answers)
    larger = _larger_examples(examples[:LARGER_PICTURES])
    num_visual = encoded.tokens.x.shape[1]
    num_text = sum(map(len, encoded.ids)) / len(encoded.ids) - num_visual
    story = Story(
        settings=settings,
        num_parameters=sum(parameter.numel() for parameter in base.parameters()),
        num_visual=num_visual,
        num_text=num_text,
        num_prompts=len(encoded.ids),
        rows=rows,
        chance={task.name: task.chance for task in encoded.tasks},
        losses=losses,
        flops={
            kept: prefill_flops(vlm.base.config.text_config, kept + round(num_text)) for kept in (num_visual, *BUDGETS)
        },
        scorer_parameters=trained["diffprune"].method.parameter_counts()["scorer"],  # type: ignore[operator]
        examples=examples,
        larger=larger,
        seconds=clock.parts,
        device=device_name(),
        versions=library_versions(),
        command=command_line(),
    )
    clock.lap("pictures")
    _write(out, story, trained["diffprune"])
    progress("write the page", 1, 1)
    return story


def summary(story: Story) -> dict[str, Any]:
    """What `summary.json` holds: a results file's entries and the seconds of each part."""
    return {
        "name": "demo",
        "command": story.command,
        "commit": source_commit(),
        "device": story.device,
        "versions": story.versions,
        "seeds": [story.settings.seed],
        "seconds": story.seconds | {"total": sum(story.seconds.values())},
        "questions": story.num_prompts,
        "steps": {name: len(values) for name, values in story.losses.items()},
        "prefill_flops": {str(kept): flops for kept, flops in story.flops.items()},
        "rows": story.rows,
        "notes": "Procedural stand-ins for the ten benchmarks, a small model trained by us: no claim about a real one.",
    }


def _diverse(trained: PrunedVLM) -> dict[str, Any]:
    """The trained scorer with the choice by worth times diversity; nothing where the library has no such method."""
    if DIVERSE not in METHODS.declared:
        return {}
    method = build_method(DIVERSE, block=trained.backbone.block)
    method.scorer = trained.method.scorer
    return {DIVERSE: method.eval()}


def _larger_examples(examples: Sequence[Example]) -> list[Example]:
    """What the larger model with its own pruner answers to these questions; none where it is not installed."""
    folder = ASSETS / f"{LARGER}-diffprune"
    if not folder.is_dir():
        return []
    base, processor = load_base(LARGER)
    vlm = PrunedVLM.from_pretrained(folder, base=base, processor=processor)
    rows, columns = examples[0].grid
    shares = [Budget(keep / (rows * columns)) for keep in BUDGETS]
    num_visual = vlm.base.config.image_seq_length
    return ask_larger(vlm, examples, [share.count(num_visual) for share in shares])


def _write(out: Path, story: Story, pruned: PrunedVLM) -> None:
    """Everything beside its place first, then moved there, the page last: a failed run leaves `out` as it was."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        new = Path(temporary)
        pruned.save_pretrained(new / "pruner", base_id=MODEL, notes="trained by `diffprune demo`")
        story.examples[0].picture.save(new / "picture.png")
        (new / "summary.json").write_text(json.dumps(summary(story), indent=1), encoding="utf-8")
        (new / "index.html").write_text(render_page(story, out), encoding="utf-8")
        shutil.rmtree(out / "pruner", ignore_errors=True)
        for name in ("pruner", "picture.png", "summary.json", "index.html"):
            (new / name).replace(out / name)
