"""Trains the scenes-qwen models: first the vision tower of all three, then merger and language model on top of it.

    python -m diffprune_lab.pretrain.qwen --model scenes-qwen-m --stage tower --out out/tower
    python -m diffprune_lab.pretrain.qwen --model scenes-qwen-s --stage language --init out/tower --out out/first
    python -m diffprune_lab.pretrain.qwen --model scenes-qwen-s --stage package --init out/first --out weights/s

As for the other reference models (`pretrain/llava.py`), with pictures of varying size: all pictures of a step have one
height and one width, drawn anew for each step. The tower comes from nothing; a language model on a tower alone starts
from the decoder of another reference model (`qwen_start.py`).
"""

import random
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from diffprune_lab.pretrain import package, passes, prefixes, qwen_passes, trainer, turns
from diffprune_lab.pretrain import qwen_start as start
from diffprune_lab.pretrain import qwen_supervision as supervision
from diffprune_lab.pretrain import supervision as any_supervision
from diffprune_lab.pretrain.feed import Batch, Make, draw_batch, picture_arrays
from diffprune_lab.pretrain.llava import LanguageRun
from diffprune_lab.pretrain.trainer import ROUND_SCENES, Family, Logged, Run, Settings, first_scene
from diffprune_lab.scenes import reference
from diffprune_lab.scenes.qwen import (
    MERGE,
    PATCH,
    SPECS,
    UNIT,
    QwenSpec,
    build_model,
    build_tokenizer,
    qwen_spec,
    save_model,
)
from diffprune_lab.scenes.sizes import SIDES, resize
from diffprune_lab.scenes.world import make_scene

LEAK_RAMP = (0.1, 0.4)  # share of a tower's first run over which the leak comes to count
CHECK_SIZES = ((176, 240), (240, 176))  # equally many tokens, so that one count is a ninth of both
ALIGNED, ALIGNED_BATCH = 768, 64  # pictures on which a merger is fitted to its decoder, and how many at a time


def at_size(batch: Batch, height: int, width: int) -> Batch:
    """The batch with its pictures, their twins and the owners of their pixels at another size."""
    sized = {name: resize(batch[name], height, width) for name in ("pixels", "twin") if name in batch}
    owner = batch["owner"]
    down, across = (
        ((torch.arange(length, device=owner.device) + 0.5) * (old / length)).long()
        for length, old in zip((height, width), owner.shape[1:], strict=True)
    )
    return {**batch, **sized, "owner": owner.index_select(1, down).index_select(2, across)}


class QwenRun(Run):
    """What both stages share beyond `Run`: another model, and pictures of a size drawn for each step."""

    def __init__(self, settings: Settings) -> None:
        self.sizes = random.Random(settings.seed + 1000 * settings.round)
        super().__init__(settings)
        config = self.model.config
        start, end = (
            torch.tensor([mark], device=self.device)
            for mark in (config.vision_start_token_id, config.vision_end_token_id)
        )
        self.start_ids, self.end_ids = torch.cat((self.start_ids, start)), end

    def read_spec(self) -> QwenSpec:
        return qwen_spec(self.settings.model)

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer()

    def build(self, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
        model = build_model(self.spec, tokenizer, seed=self.settings.seed)
        self.has_decoder = self.settings.init is not None and start.load_start(model, self.settings.init)
        self.whole |= self.has_decoder
        return model

    def find_tower(self) -> nn.Module:
        return self.model.model.visual

    def block(self) -> qwen_passes.BlockParts:
        return qwen_passes.PLAIN

    def compiled_block(self) -> qwen_passes.BlockParts:
        return qwen_passes.BlockParts(
            torch.compile(qwen_passes.project_heads, dynamic=True), torch.compile(qwen_passes.mix_heads, dynamic=True)
        )

    def drawn_size(self, batch: Batch) -> Batch:
        """The batch at a size of this step."""
        return at_size(batch, self.sizes.choice(SIDES), self.sizes.choice(SIDES))


class TowerRun(QwenRun):
    """The tower and its merger learn to name what each language token looks at."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.heads = supervision.TokenHeads(self.spec.text_width).to(self.device)
        if settings.init is None:
            batch = self.validation(96, "cpu")
            item = passes.items_of(batch, UNIT)[0]
            shown = qwen_passes.patches_of(batch["pixels"], PATCH, MERGE)[item > 0].flatten(0, 1)  # [X, C]
            self.tower.cpu()
            qwen_passes.whiten_patches_(self.tower, shown)
            self.tower.to(self.device)

    def make(self) -> Make:
        return supervision.tower_batch

    def validation(self, count: int, device: torch.device | str) -> Batch:
        """Pictures of every kind at the first of the sizes checked."""
        scenes = [
            make_scene("validation", index, kind="sign" if index % 2 else "plain", seed=self.settings.seed)
            for index in range(count)
        ]
        return at_size(draw_batch(picture_arrays(scenes), torch.device(device)), *CHECK_SIZES[0])

    def loss(self, batch: Batch) -> tuple[Tensor, Logged]:
        batch = self.drawn_size(batch)
        grid = qwen_passes.grid_of(batch["pixels"], UNIT)
        item, covers = passes.items_of(batch, UNIT)
        targets = supervision.token_targets(batch["items"], batch["boxes"], item, covers, grid, UNIT)
        both = torch.cat((batch["pixels"], batch["twin"]))
        features = qwen_passes.tower_features(self.tower, both, parts=self.block_function)
        # A leak is looked for as the merger sees it, whose norm makes much of the little that tokens of a plain
        # background hold; less what all tokens have in common, beside which any leak would look small; and with the
        # variance not held constant, for the norm lets tokens come close to each other without becoming small.
        normed = qwen_passes.norm_features(self.tower, features).float()
        normed, twins = (normed - normed.detach().mean((0, 1))).chunk(2)
        features = features.chunk(2)[0]
        loss, right = self.heads(qwen_passes.merge_features(self.tower, features), targets)
        leak = any_supervision.leak(
            normed, twins, batch["pixels"], batch["twin"], UNIT, variance=normed.square().mean()
        )
        return loss + self.leak_weight() * leak, {
            "deviation": features.detach().float().std(),
            "leak": leak.detach(),
            "right": dict(zip(supervision.FIELDS, right.unbind(), strict=True)),
        }

    def leak_weight(self) -> float:
        """Weight of the leak: a tower from nothing first learns to see, then to keep it to itself."""
        first, last = LEAK_RAMP
        share = 1.0 if self.settings.init is not None else (self.clock.share() - first) / (last - first)
        return any_supervision.LEAK_WEIGHT * min(1.0, max(0.0, share))

    def run(self) -> None:
        """Trains, brings the features to deviation 1, saves."""
        self.train([self.tower, self.heads])
        batch = self.validation(self.settings.batch, self.device)
        before = self.plain_features(batch)
        qwen_passes.scale_features_(self.tower, 1 / float(before.std()))
        after = self.plain_features(batch)
        self.log.write(
            deviation_before=float(before.std()),
            deviation=float(after.std()),
            widest_channel=float(after.flatten(0, 1).std(0).max()),
        )
        self.save()

    def plain_features(self, batch: Batch) -> Tensor:
        """The features of all language tokens in float32."""
        with torch.no_grad(), self.autocast():  # a context of its own: one context keeps its casts of the weights
            return qwen_passes.tower_features(self.tower, batch["pixels"]).float()


class QwenLanguageRun(QwenRun, LanguageRun):
    """The merger and the language model learn to answer from prefixes of every kind; the blocks stay as they are."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.tower.merger.requires_grad_(True)
        if self.spec.start is not None and not self.has_decoder:
            self.start_from(self.spec.start)

    def start_from(self, name: str) -> None:
        """Takes over the decoder of a reference model, and logs what it knows on top of this tower."""
        base: Any = reference.load_reference(name)[0]
        base.to(self.device)
        start.grow_decoder_(self.model, base)
        last = first_scene(self.settings) + ROUND_SCENES  # the last of the round, which training does not come to
        count = min(ALIGNED, 16 * self.settings.batch)
        scenes = [make_scene("train", index, seed=self.settings.seed) for index in range(last - count, last)]
        pictures = (
            draw_batch(picture_arrays(scenes[at : at + ALIGNED_BATCH]), self.device)["pixels"]
            for at in range(0, count, ALIGNED_BATCH)
        )
        self.log.write(variance_explained=start.align_merger_(self.tower, base, pictures))
        self.check()

    def count_tokens(self) -> int:
        height, width = CHECK_SIZES[0]
        return (height // UNIT) * (width // UNIT)

    def features(self, batch: Batch, block_function: qwen_passes.BlockParts) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            features = qwen_passes.tower_features(self.tower, batch["pixels"], parts=block_function)
        self.grid = qwen_passes.grid_of(batch["pixels"], UNIT)
        return features, passes.items_of(batch, UNIT)[0]

    def priorities(
        self, items: Tensor, features: Tensor, rules: Tensor, generator: torch.Generator
    ) -> Float[Tensor, "B N"]:
        places = prefixes.raster(*self.grid, self.device)
        return prefixes.priorities(items, features, rules, generator, places=places)

    def answer(
        self, features: Tensor, keep: Tensor, batch: Batch, parts: turns.LayerParts = turns.PLAIN
    ) -> tuple[Tensor, Tensor, turns.TurnLayout]:
        return qwen_passes.answer_loss(
            self.model, features, keep, batch, self.grid, self.start_ids, self.end_ids, parts=parts
        )

    def loss(self, batch: Batch) -> tuple[Tensor, Logged]:
        batch = self.drawn_size(batch)
        rows, columns = qwen_passes.grid_of(batch["pixels"], UNIT)
        self.tokens = rows * columns
        return super().loss(batch)

    def check_batches(self, batches: int = len(CHECK_SIZES)) -> list[Batch]:
        return [at_size(batch, *size) for batch, size in zip(super().check_batches(batches), CHECK_SIZES, strict=True)]

    def check(self) -> None:
        self.tokens = self.count_tokens()
        super().check()

    def run(self) -> None:
        """Trains and saves."""
        self.train([self.tower.merger, self.model.model.language_model, self.model.lm_head])


def package_model(name: str, trained: Path, earlier: list[Path], out: Path) -> None:
    """Writes trained weights in the hub's layout, with a card made from the logs of the runs."""
    model = build_model(qwen_spec(name), build_tokenizer())
    package.load_weights(model, trained)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    runs = [package.read_log(folder) for folder in (trained, *earlier)]
    card = f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# {name}

A Qwen2.5-VL in miniature, trained from scratch on the procedural scenes of diffprune: {parameters:,} parameters in
bfloat16, pictures of any size with one visual token for every {UNIT} x {UNIT} pixels. It knows these scenes and nothing
else.

Prompt: `USER: <|vision_start|><|image_pad|><|vision_end|>\\n{{question}} ASSISTANT:`

{package.training_report("diffprune_lab.pretrain.qwen", runs)}"""
    save_model(name, model, out, card=card)


FAMILY = Family(
    names=SPECS,
    stages={"tower": TowerRun, "language": QwenLanguageRun},
    package=package_model,
    description=__doc__ or "",
)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    trainer.main(FAMILY, arguments)


if __name__ == "__main__":
    main()
