"""Trains the reference models from scratch: first the vision tower alone, then the language model on top of it.

    python -m diffprune_lab.pretrain.llava --model scenes-llava --stage tower --out out/tower
    python -m diffprune_lab.pretrain.llava --model scenes-llava --stage language --init out/tower --out out/first
    python -m diffprune_lab.pretrain.llava --model scenes-llava --stage language --init out/first --out out/next \
        --round 1
    python -m diffprune_lab.pretrain.llava --model scenes-llava --stage package --init out/next --out weights

The tower stage has dense targets (`supervision.py`). In the language stage the tower is frozen, so that tokens of the
background never learn to carry what the rest of the picture shows; every picture comes with many turns (`turns.py`),
and the visual prefix is of any length and make-up (`prefixes.py`).

Pictures are never repeated: each stage and round has its own range of training scenes. The learning rate follows the
elapsed share of the time (or of --steps), so a run always ends annealed. A run with --steps is determined by its seed
up to the rounding of the device; the log of a timed run says how many steps it took.
"""

import random
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune_lab.pretrain import passes, prefixes, supervision, trainer, turns
from diffprune_lab.pretrain.feed import KINDS_OF_TURN, Batch, Make, draw_batch, tower_batch
from diffprune_lab.pretrain.package import package
from diffprune_lab.pretrain.trainer import Family, Logged, Run, Settings
from diffprune_lab.scenes import reference
from diffprune_lab.scenes.tasks import TASKS
from diffprune_lab.scenes.world import KINDS, make_scene


class TowerRun(Run):
    """The tower learns to name what its tokens look at."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.heads = supervision.TowerHeads(self.spec.vision_width).to(self.device)
        if settings.init is None:
            scenes = [make_scene("validation", index, kind="sign" if index % 2 else "plain") for index in range(256)]
            batch = draw_batch(tower_batch(scenes), torch.device("cpu"))
            self.tower.cpu()
            passes.whiten_patches_(self.tower, batch["pixels"], passes.items_of(batch, self.spec.patch)[0])
            self.tower.to(self.device)

    def make(self) -> Make:
        return tower_batch

    def loss(self, batch: Batch) -> tuple[Tensor, Logged]:
        item, covers = passes.items_of(batch, self.spec.patch)
        targets = supervision.token_targets(batch["items"], item, covers)
        both = torch.cat((batch["pixels"], batch["twin"]))
        features, last = passes.tower_states(self.tower, both, last=True, block_function=self.block_function)
        (features, twins), last = features.chunk(2), last.chunk(2)[0]
        loss, right = self.heads(features, last, targets, batch["summary"], batch["pairs"])
        leak = supervision.leak(features[:, 1:], twins[:, 1:], batch["pixels"], batch["twin"], self.spec.patch)
        names = supervision.TowerHeads.accuracy_names()
        return loss + supervision.LEAK_WEIGHT * leak, {
            "deviation": features.detach().float().std(),
            "leak": leak.detach(),
            "right": dict(zip(names, right.unbind(), strict=True)),
        }

    def run(self) -> None:
        """Trains, brings the features to deviation 1, saves."""
        self.train([self.tower, self.heads])
        scenes = [make_scene("validation", index, seed=self.settings.seed) for index in range(self.settings.batch)]
        batch = draw_batch(tower_batch(scenes), self.device)
        before = self.plain_features(batch)
        passes.scale_features_(self.tower, 1 / float(before.std()))
        after = self.plain_features(batch)
        with torch.no_grad(), self.autocast():
            attention = passes.cls_attention(self.tower, batch["pixels"])
        on_item = (passes.items_of(batch, self.spec.patch)[0] > 0).float()
        readable = torch.tensor([scene.quality != "ruined" for scene in scenes], device=self.device)
        seen = (attention * on_item).sum(-1) / attention.sum(-1)
        self.log.write(
            deviation_before=float(before.std()),
            deviation=float(after.std()),
            widest_channel=float(after.flatten(0, 1).std(0).max()),
            cls_attention_on_items=float(seen[readable].mean()),
            tokens_on_items=float(on_item[readable].mean()),
        )
        self.save()

    def plain_features(self, batch: Batch) -> Tensor:
        """The features of all visual tokens in float32."""
        with torch.no_grad(), self.autocast():  # a context of its own: one context keeps its casts of the weights
            states, _ = passes.tower_states(self.tower, batch["pixels"], last=False)
        return states[:, 1:].float()


class LanguageRun(Run):
    """The projector and the language model learn to answer from prefixes of every kind."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.tower.requires_grad_(False)
        self.tokens = self.count_tokens()
        self.dice = random.Random(settings.seed + 1000 * settings.round)
        self.generator = torch.Generator(self.device).manual_seed(settings.seed + 1000 * settings.round)
        self.checks = self.check_batches()

    def make(self) -> Make:
        return self.language_batch

    def count_tokens(self) -> int:
        """Visual tokens of a picture."""
        return self.spec.grid**2

    def features(self, batch: Batch, block_function: Any) -> tuple[Tensor, Tensor]:
        """(features, items) of all visual tokens."""
        with torch.no_grad():
            states, _ = passes.tower_states(self.tower, batch["pixels"], last=False, block_function=block_function)
        return states[:, 1:], passes.items_of(batch, self.spec.patch)[0]

    def priorities(
        self, items: Tensor, features: Tensor, rules: Tensor, generator: torch.Generator
    ) -> Float[Tensor, "B N"]:
        """The priority of each token by the rule of its row."""
        return prefixes.priorities(items, features, rules, generator)

    def draw_priorities(self, items: Tensor, features: Tensor) -> Float[Tensor, "B N"]:
        """The priority of each token in a training step, by a rule drawn for each row."""
        rules = prefixes.draw_rules(len(items), self.device, self.generator)
        return self.priorities(items, features, rules, self.generator)

    def answer(
        self, features: Tensor, keep: Tensor, batch: Batch, parts: turns.LayerParts = turns.PLAIN
    ) -> tuple[Tensor, Tensor, turns.TurnLayout]:
        """(loss, guesses, layout) of the batch's turns, given the kept tokens."""
        return passes.answer_loss(self.model, features, keep, batch, self.start_ids, parts=parts)

    def loss(self, batch: Batch) -> tuple[Tensor, Logged]:
        features, items = self.features(batch, self.block_function)
        count = prefixes.draw_length(self.tokens, self.dice.random(), self.dice.random(), full=self.settings.full)
        if count == self.tokens:
            keep = torch.arange(count, device=self.device).expand(len(items), -1)
        else:
            keep = prefixes.take_prefix(self.draw_priorities(items, features), count)
        loss, guesses, layout = self.answer(features, keep, batch, self.parts)
        known = layout.target != turns.IGNORE
        return loss, {"kept": float(count), "right": ((guesses == layout.target) & known).sum() / known.sum()}

    def check_batches(self, batches: int = 2) -> list[Batch]:
        """Validation scenes of every kind with a turn of each task."""
        made, size = [], self.settings.batch
        for start in range(0, batches * size, size):
            scenes = [
                make_scene("validation", index, kind=KINDS[index % len(KINDS)], seed=self.settings.seed)
                for index in range(start, start + size)
            ]
            made.append(draw_batch(self.language_batch.each_task(scenes), self.device))
        return made

    @torch.no_grad()
    def check(self) -> None:
        """Logs the share of right answers by task, with the whole prefix and with parts of it."""
        ninth = self.tokens // 9
        conditions = {
            "full": ("random", self.tokens),
            "random": ("random", ninth),
            "objects": ("objects", ninth),
            "objects_half": ("balanced", ninth // 2),
            "background": ("background", ninth),
        }
        for name, (rule, count) in conditions.items():
            right, asked = torch.zeros(2, len(KINDS_OF_TURN), device=self.device)
            generator = torch.Generator(self.device).manual_seed(self.settings.seed)
            for batch in self.checks:
                with self.autocast():
                    features, items = self.features(batch, self.plain_block)
                    rules = torch.full((len(items),), list(prefixes.RULES).index(rule), device=self.device)
                    keep = prefixes.take_prefix(self.priorities(items, features, rules, generator), count)
                    _, guesses, layout = self.answer(features, keep, batch)
                kinds = batch["kinds"]
                there = kinds >= 0
                hits = passes.right_turns(guesses, layout, kinds.shape[1])[there]
                right.index_add_(0, kinds[there], hits)
                asked.index_add_(0, kinds[there], torch.ones_like(hits))
            shares = (right / asked.clamp(min=1)).tolist()
            self.log.write(
                check=name,
                kept=count,
                step=self.clock.step,
                mean=round(sum(shares[1:]) / len(TASKS), 4),
                right={kind: round(share, 3) for kind, share in zip(KINDS_OF_TURN, shares, strict=True)},
            )

    def run(self) -> None:
        """Trains and saves."""
        parts = self.model.model
        self.train([parts.multi_modal_projector, parts.language_model, self.model.lm_head])


LLAVA = Family(
    names=reference.SPECS,
    stages={"tower": TowerRun, "language": LanguageRun},
    package=package,
    description=__doc__ or "",
)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    trainer.main(LLAVA, arguments)


if __name__ == "__main__":
    main()
