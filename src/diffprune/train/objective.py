"""What a step descends along, as a module whose parameters are the method's, for Accelerate to wrap."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from diffprune.backbones.base import Backbone
from diffprune.backbones.prompts import Batch
from diffprune.config import RunConfig
from diffprune.methods.random import Random
from diffprune.model import PrunedVLM
from diffprune.ops.transfer import to_device
from diffprune.train.feed import Feed, Sample, prepare_pictures
from diffprune.train.sampler import draw_keep, draw_tau, noise_generator
from diffprune.types import VisualTokens

LossKind = Literal["throttled", "hard", "random"]
BLANK = (Sample(id=-1, picture=Image.new("RGB", (56, 56)), question=".", answer="."),)


class Objective(nn.Module):
    """The loss of a few samples."""

    def __init__(self, vlm: PrunedVLM, config: RunConfig, feed: Feed) -> None:
        super().__init__()
        self.method = vlm.method
        self._vlm = (vlm,)  # in a tuple: the method must not be registered twice
        self.config, self.feed = config, feed
        self.dropped = 0  # tokens of held-out pictures, over all hard losses

    def forward(
        self,
        samples: Sequence[Sample],
        step: int | str,
        tau: float,
        num_targets: Float[Tensor, ""],
        *,
        num_prompts: int | None = None,
        kind: LossKind = "throttled",
        batch: Batch | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The samples' part of the loss, and the sum over them of the budget entropy, sum alpha (1 - alpha).

        Args:
            step: Noise and budgets are drawn from it, the seed and the sample.
            num_targets: Answer tokens of the global batch.
            num_prompts: Its samples.
            kind: "throttled" as in training; "hard": drop as in deployment; "random": drop as many at random.
            batch: The samples as the model takes them, where that is done already.
        """
        (vlm,), config = self._vlm, self.config
        if not samples and not config.backbone.shard:  # all broken: others still wait for this process's gradients
            return self._nothing(), torch.zeros((), device=self.device)
        if not samples:  # others wait for this process's part of every layer too
            loss, entropy = self(BLANK, step, tau, num_targets, kind=kind, batch=prepare_pictures(vlm, BLANK))
            return loss * 0, entropy * 0
        batch, tokens = self.feed.encode(vlm, samples, batch)
        counts = self._budgets(tokens, samples, step)
        if kind == "hard":
            self.dropped += 0 if samples is BLANK else int((tokens.counts.cpu() - counts).sum())
            return vlm.loss(batch, tokens=tokens, keep=counts, hard=True, num_targets=num_targets), num_targets * 0
        if kind == "random":
            lm = vlm.splice(batch, tokens, Random().deploy(tokens, to_device(counts, tokens.x.device)))
            return vlm.decoder.loss(lm, None, None, num_targets=num_targets)[0], num_targets * 0
        if isinstance(step, int):
            vlm.method.at_step(step)
        noise = [noise_generator(tokens.x.device, config.seed, step, sample.id) for sample in samples]
        if vlm.method.learns_from_regions:
            tokens = replace(tokens, regions=self.feed.regions(vlm, tokens, samples))
        loss, alpha = vlm.loss(
            batch,
            tokens=tokens,
            tau=self._temperatures(tau, samples, step),
            keep=counts,
            generator=noise,
            num_targets=num_targets,
            num_prompts=num_prompts,
            remove_below=config.remove_below,
            return_alpha=True,
        )
        if vlm.method.is_inside:  # where all tokens may stay, it is not asked at some layers, or at none
            loss = loss + self._nothing()
        return loss, (alpha.detach() * (1 - alpha.detach())).sum().float()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _nothing(self) -> Float[Tensor, ""]:
        """0, of all parameters: several processes wait for a gradient of each."""
        zeros = [parameter.sum() * 0 for parameter in self.parameters() if parameter.requires_grad]
        return torch.stack(zeros).sum()

    @property
    def backbone(self) -> Backbone:
        (vlm,) = self._vlm
        return vlm.backbone

    def _temperatures(self, tau: float, samples: Sequence[Sample], step: int | str) -> float | Float[Tensor, " B"]:
        if not self.config.tau.drawn:
            return tau
        drawn = [draw_tau(self.config.tau, tau, self.config.seed, step, sample.id) for sample in samples]
        return to_device(torch.tensor(drawn, dtype=torch.float64), self.device)

    def _budgets(self, tokens: VisualTokens, samples: Sequence[Sample], step: int | str) -> Int[Tensor, " B"]:
        """Tokens to keep of each sample, on the CPU, where they can be checked without waiting for the device."""
        keeps = [draw_keep(self.config.budget, self.config.seed, step, sample.id) for sample in samples]
        numbers = [tokens.x.shape[1]] * len(tokens) if tokens.is_full else tokens.counts.tolist()
        (vlm,) = self._vlm
        return torch.tensor([vlm.budget_of(keep).count(int(n)) for keep, n in zip(keeps, numbers, strict=True)])
