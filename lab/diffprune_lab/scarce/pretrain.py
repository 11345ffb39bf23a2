"""Trains `scarce-llava` from scratch: first the vision tower alone, then the language model on top of it.

    python -m diffprune_lab.scarce.pretrain --stage tower --out out/tower --minutes 4
    python -m diffprune_lab.scarce.pretrain --stage language --init out/tower --out out/first --minutes 9
    python -m diffprune_lab.scarce.pretrain --stage language --init out/first --out out/second --minutes 9 --round 1

A stage fits a ten-minute call and goes on from weights. Pictures are never repeated: each stage and round has its own
range of training scenes. The tower is frozen in the language stage. No scorer is trained here; the checks run methods
without training alone.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffprune.methods.options import parse_method
from diffprune.types import VisualTokens
from diffprune_lab.pretrain import passes as scenes_passes
from diffprune_lab.pretrain import prefixes as scenes_prefixes
from diffprune_lab.pretrain import trainer, turns
from diffprune_lab.pretrain.feed import Batch
from diffprune_lab.pretrain.trainer import Family, Run, Settings, plain_number
from diffprune_lab.scarce import passes, prefixes, reference, targets
from diffprune_lab.scarce.feed import LanguageBatch, ScarceStream, draw_batch, tower_batch
from diffprune_lab.scarce.oracle import rank_tokens
from diffprune_lab.scarce.tasks import KINDS_OF_TURN
from diffprune_lab.scarce.tokens import Tokens, coverage, read_tokens, unit_pixels
from diffprune_lab.scarce.world import make_scene
from diffprune_lab.scenes import reference as scenes_reference

KEEP = 64
CHECKED = (
    "random",
    "feature_norm",
    "cls_attention",
    "gots",
    "divprune",
    "prunesid",
    "agilepruner",
    "holov",
    "vispruner",
)  # as released, without training


@dataclass(frozen=True, slots=True, kw_only=True)
class ScarceSettings(Settings):
    """One run; `python -m diffprune_lab.scarce.pretrain --help` says what is what."""

    pixel_weight: float = targets.PIXEL_WEIGHT
    leak_weight: float = targets.LEAK_WEIGHT
    spread_weight: float = targets.SPREAD_WEIGHT
    binding: float = 0.3


class ScarceRun(Run):
    """What both stages share beyond `Run`: the world, and a check of what methods without training keep."""

    check_seconds, save_seconds = 100.0, 100.0
    draw = staticmethod(draw_batch)
    language, stream = LanguageBatch, ScarceStream

    def __init__(self, settings: ScarceSettings) -> None:
        self.is_tower = settings.stage == "tower"
        super().__init__(settings)
        self.checks = [self.check_batch(start) for start in range(0, 2 * settings.batch, settings.batch)]

    def make(self) -> Any:
        return tower_batch if self.is_tower else self.language_batch

    def read_spec(self) -> scenes_reference.ReferenceSpec:
        return reference.scarce_spec(self.settings.model)

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        return reference.build_tokenizer()

    def check_batch(self, start: int) -> Batch:
        """Validation scenes, with a question of each kind."""
        scenes = [make_scene("validation", start + i, seed=self.settings.seed) for i in range(self.settings.batch)]
        return draw_batch(tower_batch(scenes) | self.language_batch.each_task(scenes), self.device)

    @torch.no_grad()
    def encode(self, batch: Batch) -> tuple[Float[Tensor, "B N D"], Tokens]:
        """Features of all visual tokens, and what they look at."""
        with self.autocast():
            states, _ = scenes_passes.tower_states(
                self.tower, batch["pixels"], last=False, block_function=self.block_function
            )
        return states[:, 1:], read_tokens(batch["labels"])

    @torch.no_grad()
    def choices(self, batch: Batch, features: Float[Tensor, "B N D"]) -> dict[str, Int[Tensor, "B K"]]:
        """The oracle's choice of KEEP tokens and those of methods without training."""
        with self.autocast():
            attention = scenes_passes.cls_attention(self.tower, batch["pixels"]).float()
            projected = features if self.is_tower else self.model.model.multi_modal_projector(features)
        tokens = VisualTokens(
            x=features.float(),
            grid=(targets.GRID, targets.GRID),
            seeds=tuple(range(len(features))),
            cls_attention=attention,
            projected=projected.float(),
        )
        oracle = rank_tokens(unit_pixels(batch["labels"])).topk(KEEP, -1).indices.sort(-1).values
        chosen = {name: parse_method(name).build().select(tokens, KEEP) for name in CHECKED}
        return {"oracle": oracle, **chosen}


class TowerRun(ScarceRun):
    """The tower learns to say what its tokens look at."""

    def __init__(self, settings: ScarceSettings) -> None:
        super().__init__(settings)
        self.heads = targets.TowerHeads(self.spec.vision_width).to(self.device)
        if settings.init is None:
            batch = draw_batch(tower_batch([make_scene("validation", i) for i in range(128)]), torch.device("cpu"))
            self.tower.cpu()
            everything = torch.ones_like(read_tokens(batch["labels"]).item)
            scenes_passes.whiten_patches_(self.tower, batch["pixels"], everything)
            self.tower.to(self.device)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        seen = read_tokens(batch["labels"])
        wanted = targets.token_targets(
            seen, batch["regions"], batch["grounds"], batch["things"], batch["letters"], batch["litter"]
        )
        both = torch.cat((batch["pixels"], batch["twin"]))
        features, last = scenes_passes.tower_states(self.tower, both, last=True, block_function=self.block_function)
        (features, twins), last = features.chunk(2), last.chunk(2)[0]
        named, given, right, summary = self.heads(
            features, last, wanted, batch["pixels"], batch["summary"], batch["corners"]
        )
        same = targets.unchanged(batch["pixels"], batch["twin"])
        leak = targets.leak(features[:, 1:], twins[:, 1:], same)
        length = targets.length_loss(features[:, 1:], targets.token_lengths(batch["pixels"]))
        spread = targets.spread_loss(features[:, 1:])
        loss = named + self.settings.pixel_weight * given + targets.LENGTH_WEIGHT * length
        loss = loss + self.settings.spread_weight * spread
        return loss + self.settings.leak_weight * leak, {
            "deviation": features.detach().float().std(),
            "leak": leak.detach(),
            "length": length.detach(),
            "pixels": given.detach(),
            "spread": spread.detach(),
            "summary": summary,
            "same": same.float().mean(),
            "right": dict(zip(targets.FIELDS, right.unbind(), strict=True)),
        }

    def check(self) -> None:
        batch = self.checks[0]
        features, seen = self.encode(batch)
        covered = {name: coverage(seen, keep) for name, keep in self.choices(batch, features).items()}
        on_item = (seen.item > 0).float()
        norm = features.float().norm(dim=-1)
        self.log.write(
            check="tower",
            step=self.clock.step,
            deviation=float(features.float().std()),
            widest_channel=float(features.float().flatten(0, 1).std(0).max()),
            tokens_on_items=float(on_item.mean()),
            length_on_items=float((norm * on_item).sum() / on_item.sum() / norm.mean()),
            covered=plain_number(covered),
        )

    def run(self) -> None:
        """Trains, brings the features to deviation 1, saves."""
        self.train([self.tower, self.heads])
        scenes_passes.scale_features_(self.tower, 1 / float(self.encode(self.checks[0])[0].float().std()))
        self.save()


class LanguageRun(ScarceRun):
    """The projector and the language model learn to answer from prefixes of every kind."""

    def __init__(self, settings: ScarceSettings) -> None:
        super().__init__(settings)
        self.tower.requires_grad_(False)
        self.tokens = self.spec.grid**2
        self.dice = random.Random(settings.seed + 1000 * settings.round)
        self.generator = torch.Generator(self.device).manual_seed(settings.seed + 1000 * settings.round)
        self.binding = passes.Binding(self.spec.text_width).to(self.device)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        features, seen = self.encode(batch)
        count = scenes_prefixes.draw_length(
            self.tokens, self.dice.random(), self.dice.random(), full=self.settings.full
        )
        if count == self.tokens:
            keep = torch.arange(count, device=self.device).expand(len(features), -1)
        else:
            rules = prefixes.draw_rules(len(features), self.device, self.generator)
            priority = prefixes.priorities(seen, features, rules, self.generator)
            keep = scenes_prefixes.take_prefix(priority, count)
        loss, guesses, layout, middle = passes.answer_pass(
            self.model, features, keep, batch, self.start_ids, parts=self.parts
        )
        bound, bound_right = self.binding(middle, batch["things"], seen.thing.gather(1, keep))
        known = layout.target != turns.IGNORE
        return loss + self.settings.binding * bound, {
            "kept": float(count),
            "answers": loss.detach(),
            "right": ((guesses == layout.target) & known).sum() / known.sum(),
            "bound": dict(zip(passes.BOUND, bound_right.unbind(), strict=True)),
        }

    @torch.no_grad()
    def check(self) -> None:
        """Logs the share of right answers by kind with all tokens and with the choices of methods without training."""
        names = ("full", "oracle", *CHECKED)
        right, asked = torch.zeros(2, len(names), len(KINDS_OF_TURN), device=self.device)
        covered: dict[str, float] = {name: 0.0 for name in names}
        for batch in self.checks:
            features, seen = self.encode(batch)
            everything = torch.arange(self.tokens, device=self.device).expand(len(features), -1)
            for row, (name, keep) in enumerate({"full": everything, **self.choices(batch, features)}.items()):
                with self.autocast():
                    _, guesses, layout, _ = passes.answer_pass(self.model, features, keep, batch, self.start_ids)
                kinds = batch["kinds"]
                there = kinds >= 0
                hits = scenes_passes.right_turns(guesses, layout, kinds.shape[1])[there]
                right[row].index_add_(0, kinds[there], hits)
                asked[row].index_add_(0, kinds[there], torch.ones_like(hits))
                covered[name] += float(coverage(seen, keep)) / len(self.checks)
        shares = (right / asked.clamp(min=1)).tolist()
        for name, share in zip(names, shares, strict=True):
            self.log.write(
                check=name,
                kept=self.tokens if name == "full" else KEEP,
                step=self.clock.step,
                mean=round(sum(share[1:]) / (len(KINDS_OF_TURN) - 1), 4),
                retained=round(sum(share[1:]) / max(1e-6, sum(shares[0][1:])), 4),
                covered=round(covered[name], 4),
                right={
                    kind.removeprefix("scarce/"): round(part, 3)
                    for kind, part in list(zip(KINDS_OF_TURN, share, strict=True))[1:]
                },
            )

    def run(self) -> None:
        """Trains and saves."""
        parts = self.model.model
        self.train([parts.multi_modal_projector, parts.language_model, self.model.lm_head, self.binding])


SCARCE = Family(
    names=reference.SPECS,
    stages={"tower": TowerRun, "language": LanguageRun},
    package=None,  # `scarce/package.py`
    description=__doc__ or "",
    defaults={"model": reference.NAME, "turns": 11, "full": 0.25},
    settings=ScarceSettings,
    numbers={
        "pixel_weight": "of giving back one's own pixels (tower)",
        "leak_weight": "of what tokens know of elsewhere (tower)",
        "spread_weight": "of tokens unlike each other (tower)",
        "binding": "weight of the reader of visual tokens (language)",
    },
)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    trainer.main(SCARCE, arguments)


if __name__ == "__main__":
    main()
