"""PrunedVLM: a Hugging Face vision-language model that keeps only the visual tokens that matter.

    TRAINING    encode -> restrict (all N tokens, each weakened by its weight) -> project, splice -> loss
    INFERENCE   encode -> deploy   (K of N tokens, as they are)                -> project, splice -> generate

Both paths are below, side by side. The base model is frozen, called by its own parts and never patched.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffprune.backbones.base import NEWLINE_RULES, Backbone, Batch, Exchange
from diffprune.checkpoint import push, save, vision_state
from diffprune.decoding import Decoder, make_decoder
from diffprune.methods.base import Kept, Pruner, Restricted
from diffprune.methods.options import parse_method
from diffprune.ops.noise import Generators
from diffprune.registry import BACKBONES
from diffprune.restriction import restrict
from diffprune.results import Row
from diffprune.tiles import BUDGETS, PerTile
from diffprune.types import Budget, ImageSelection, LMInputs, Selection, VisualTokens

logger = logging.getLogger("diffprune")


class PrunedVLM(nn.Module):
    """Any loaded Hugging Face VLM with any pruning method around it.

    Args:
        model: The loaded model, of a supported family (`dp.backbones()`). It is frozen and stays untouched.
        processor: Its processor.
        method: A method's name (`dp.methods()`), which may hold options (`fastv[layer=3]`), or a built `Pruner`.
        keep: The budget: an int is tokens per image, a float a share. Every call may give its own.
        positions: "original" keeps the position each token had before anything was dropped; "packed" numbers what is
            left without gaps, for engines that can do no other. Default: original, but with a method's `native=True`
            packed where its release does so and a position is one number.
        newline: Which newline tokens stay in families that have them (LLaVA-NeXT, LLaVA-OneVision): "rows" (where the
            row keeps a token), "all" or "none". They are never counted in K.
        budget: "global" spends K over the whole picture, "per_tile" gives each tile of a picture its share of K.
        options: Of the method.

    Example:
        vlm = PrunedVLM(model, processor, method="feature_norm", keep=0.111)
        vlm.generate(images=[image], text="What does the sign say?", max_new_tokens=32)
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        *,
        method: str | Pruner = "full",
        keep: int | float = 1.0,
        positions: str | None = None,
        newline: str = "rows",
        budget: str = "global",
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, PrunedVLM):
            raise ValueError("the model is a PrunedVLM already; give its base: PrunedVLM(vlm.base, ...)")
        if positions not in (None, "original", "packed"):
            raise ValueError(f'positions={positions!r} is unknown; choose "original" or "packed"')
        if newline not in NEWLINE_RULES:
            raise ValueError(f"newline={newline!r} is unknown; choose {', '.join(NEWLINE_RULES)}")
        if budget not in BUDGETS:
            raise ValueError(f"budget={budget!r} is unknown; choose {' or '.join(BUDGETS)}")
        # Held in a tuple, so that the frozen base is no submodule: never in a state dict, never moved or trained.
        self._base = (model.requires_grad_(False).eval(),)
        self.backbone = wrap_backbone(model, processor)
        self.backbone.keeps_newlines = newline
        if isinstance(method, str):
            named = parse_method(method)
            if twice := sorted(named.options.keys() & options.keys()):
                raise ValueError(f"option {twice[0]!r} of method {method!r} is given beside it too; give it once")
            method = named.build(block=self.backbone.block, language=self.backbone.language, **options)
        elif options:
            raise ValueError(f"options {', '.join(options)} given beside a built method; give them to the method")
        if method.is_inside and positions == "packed":
            raise ValueError(
                f'method {method.name!r} drops inside the language model, where positions="packed" has no meaning; '
                "leave it out, or see the method's own options"
            )
        if method.is_inside and budget == "per_tile":
            raise ValueError(
                f"budget='per_tile' is for choices before the language model; {method.name!r} makes its own inside"
            )
        self.budget = Budget(keep, method.rounding)
        self._given_positions = positions
        self.positions = positions or self._own_positions(method)
        missing = method.needs - self.backbone.provides - {"llm_attention"}
        if missing:
            raise ValueError(
                f"method {method.name!r} needs {', '.join(sorted(missing))}, which the {self.backbone.family} family "
                f"cannot give; it gives {', '.join(sorted(self.backbone.provides))}"
            )
        device = self.base.get_input_embeddings().weight.device
        refuse_offloaded(self.backbone, device)
        self.method = cast(Pruner, method.to(device))
        # Budgets the method was trained for, the smallest first; empty where that is not known.
        self.trained_for: tuple[int | float, ...] = ()
        self.budget_rule = budget
        self.decoder: Decoder = make_decoder(self.backbone, self.method)
        self.fast: Any = None  # a `fast.FastPath` after compile()
        self._said: set[str] = set()

    @property
    def base(self) -> Any:
        """The untouched Hugging Face model."""
        return self._base[0]

    @property
    def processor(self) -> Any:
        return self.backbone.processor

    def with_method(self, method: str | Pruner, *, keep: int | float | None = None, **options: Any) -> "PrunedVLM":
        """Another method around the same model, with the same rules for positions, newlines and tiles."""
        return PrunedVLM(
            self.base,
            self.processor,
            method=method,
            keep=self.budget.keep if keep is None else keep,
            positions=self._given_positions,
            newline=self.backbone.keeps_newlines,
            budget=self.budget_rule,
            **options,
        )

    def _own_positions(self, method: Pruner) -> str:
        """The rule of a method before the language model; one inside it counts anew by itself."""
        is_free = self.backbone.plain_positions and not method.is_inside
        return method.positions if is_free else "original"

    def compile(self, **options: Any) -> Any:  # type: ignore[override]  # the inherited one would compile the loss
        """Build the fast path (static shapes; CUDA graphs on a GPU) and report on it; `generate` stays the same call.

        Args:
            options: keep, batch_sizes, text_buckets, image_sizes, max_new_tokens, fuse and more: `fast.FastPath`.
        """
        from diffprune.fast import compile_vlm

        return compile_vlm(self, **options).report

    @property
    def rule(self) -> Pruner | PerTile:
        """What chooses tokens: the method, or the method tile by tile."""
        return PerTile(self.method) if self.budget_rule == "per_tile" else self.method

    # ------------------------------------------------------------------------------------- training: throttle

    def loss(
        self,
        batch: Batch,
        *,
        tau: float | Tensor = 1.0,
        keep: int | float | Tensor | None = None,
        generator: Generators = None,
        hard: bool = False,
        tokens: VisualTokens | None = None,
        num_targets: int | Tensor | None = None,
        remove_below: float = 0.0,
        return_alpha: bool = False,
    ) -> Any:
        """Caption loss with every token weakened by its weight and none dropped: what is run is what is differentiated.

        Args:
            batch: From `prepare(images, text, answers)`.
            tau: Temperature of Soft Top-K; smaller is harder.
            keep: The budget of this step; a tensor of counts gives every image its own.
            generator: Of the noise; one per image makes a row independent of its batch.
            hard: Drop instead of throttling: the loss of the deployed path, for validation.
            tokens: The batch's visual tokens, where they are encoded already.
            num_targets: What the summed loss is divided by; default: the batch's own answer tokens.
            remove_below: Tokens with a weight below this leave the sequence, all but the K best; see `restriction`.
            return_alpha: Give the weights of the visual tokens too, as (loss, alpha). Rows are prompts where a method
                chooses inside the language model; all are 1 where it learns from pictures alone.
        """
        tokens = self.encode(batch) if tokens is None else tokens  # [B, N, D]
        k, kept = self.counts(tokens, keep), None  # [B]
        if tokens is not None and hard:
            kept = self.rule.deploy(tokens, k)  # what generate() does
        elif tokens is not None:
            noise = {"tau": tau, "generator": generator, "remove_below": remove_below}
            tokens, kept = restrict(self.rule, tokens, k, **noise)  # Eqs. 5 and 6, D_phi of Section 4.3
            if kept.own_loss is not None:
                share = 1.0 if num_targets is None else (batch.labels != -100).sum() / num_targets  # type: ignore[union-attr]
                return (kept.own_loss * share, kept.alpha) if return_alpha else kept.own_loss * share
        lm = self.splice(batch, tokens, kept)  # [B, T, L]
        loss, alpha = self.decoder.loss(
            lm,
            self.prompt_counts(batch, k),
            kept,
            tau=None if hard else tau,
            generator=generator,
            num_targets=num_targets,
        )
        return (loss, alpha) if return_alpha else loss

    forward = loss

    # ------------------------------------------------------------------------------------- inference: drop

    @torch.inference_mode()
    def generate(
        self,
        images: Any = None,
        text: str | Sequence[str] = "",
        *,
        keep: int | float | None = None,
        chat: bool = True,
        return_ids: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Answers with K visual tokens per image: a string for one prompt, a list for several.

        Args:
            images: For one prompt its images; for several prompts one entry each (an image, a list, or None).
            text: A question (it is put into the chat template) or a prompt with its placeholders.
            keep: The budget of this call.
            chat: Put questions into the model's chat template.
            return_ids: Give the new token ids [B, T] instead of text.
            kwargs: Go to the model's own `generate`: max_new_tokens, do_sample, num_beams, cache_implementation, ...
        """
        self._refuse(kwargs)
        if kwargs.get("num_return_sequences", 1) != 1 and not return_ids:
            raise ValueError("num_return_sequences gives a prompt several answers; take them with return_ids=True")
        batch = self.backbone.prepare(images, text, chat=chat)
        ids = None if self.fast is None else self.fast.answer(batch, keep=keep, **kwargs)
        if ids is None:
            tokens = self.encode(batch)  # [B, N, D]
            k = self.counts(tokens, keep)  # [B]
            kept = None if tokens is None else self.rule.deploy(tokens, k)  # H_K: x [B, K, D], index [B, K]
            lm = self.splice(batch, tokens, kept)  # [B, T, L]
            ids = self.decoder.generate(lm, self.prompt_counts(batch, k), **kwargs)
        if return_ids:
            return ids
        answers = [answer.strip() for answer in self.backbone.tokenizer.batch_decode(ids, skip_special_tokens=True)]
        return answers[0] if isinstance(text, str) else answers

    @torch.inference_mode()
    def select(
        self, images: Any, text: str | Sequence[str] | None = None, *, keep: int | float | None = None
    ) -> Selection:
        """What the method keeps of each image, with its scores, its grid and where each token looks."""
        if not isinstance(images, list | tuple) or not images:
            raise ValueError(f"select() was given {type(images).__name__} without an image; give a list of images")
        if text is None:
            text = [""] * len(images)
        tokens = self.encode(self.backbone.prepare(images, text))
        if tokens is None:
            raise ValueError("select() was given no image; give at least one")
        kept, logits = self.rule.choose(tokens, self.counts(tokens, keep))
        entries = []
        for row, grid in enumerate(tokens.grid):
            real = int(tokens.mask[row].sum())
            entries.append(
                ImageSelection(
                    keep=kept[row][kept[row] >= 0].clone(),
                    logits=None if logits is None else logits[row, :real].float().clone(),
                    grid=grid,
                    boxes=None if tokens.boxes is None else tokens.boxes[row, :real].clone(),
                )
            )
        return Selection(tuple(entries))

    # ------------------------------------------------------------------------------------- the steps between

    def prepare(
        self,
        images: Any,
        text: str | Sequence[str],
        answers: Sequence[str] | None = None,
        *,
        later: Sequence[Sequence[Exchange]] | None = None,
        chat: bool = True,
    ) -> Batch:
        """A batch for `loss` (with answers, and `later` exchanges of a conversation) or `logits` (without)."""
        return self.backbone.prepare(images, text, answers=answers, later=later, chat=chat)

    def encode(self, batch: Batch) -> VisualTokens | None:
        """Visual tokens of the batch's images with what the method needs; None where there is no image."""
        if batch.num_images == 0:
            return None
        with torch.no_grad():
            return self.backbone.encode(batch, self.method.needs)

    def splice(self, batch: Batch, tokens: VisualTokens | None, kept: Kept | Restricted | None) -> LMInputs:
        """What the language model is given: text and the kept tokens, projected, in one sequence."""
        if tokens is None or kept is None:
            return self.backbone.splice(batch, None, None, None, positions=self.positions)
        visual = self.backbone.project(kept.x.to(tokens.x.dtype))  # [B, K, L]
        lm = self.backbone.splice(batch, tokens, visual, kept.index, positions=self.positions)
        if kept.soft_mask is None:
            return lm
        assert lm.origin is not None
        index = lm.origin.index  # -1 at text, to which all attend
        soft_mask = torch.where(index < 0, 1.0, kept.soft_mask.flatten()[index.clamp_min(0)])
        return replace(lm, soft_mask=soft_mask)

    def lm_inputs(self, batch: Batch, tokens: VisualTokens | None, *, keep: int | float | None = None) -> LMInputs:
        """What the language model is given on the deployed path."""
        kept = None if tokens is None else self.rule.deploy(tokens, self.counts(tokens, keep))
        return self.splice(batch, tokens, kept)

    @torch.inference_mode()
    def logits(self, batch: Batch, *, keep: int | float | None = None) -> tuple[Float[Tensor, "B T V"], LMInputs]:
        """Next-token logits of the pruned prefill, and the inputs they belong to."""
        if self.method.is_inside:
            raise ValueError(f"{self.method.name} chooses inside the language model; use PrunedVLM.generate with it")
        lm = self.lm_inputs(batch, self.encode(batch), keep=keep)
        return self.backbone.logits(lm), lm

    def budget_of(self, keep: int | float | None) -> Budget:
        """The budget of a call, which the method may round in its own way; the model's own where none is given."""
        return self.budget if keep is None else Budget(keep, self.method.rounding)

    def counts(self, tokens: VisualTokens | None, keep: int | float | Tensor | None = None) -> Any:
        """Tokens to keep of each image [B], from the budget of a call; None where there is no image."""
        if tokens is None or isinstance(keep, Tensor):
            return keep if tokens is not None else None
        budget = self.budget_of(keep)
        if isinstance(budget.keep, int) and budget.keep > int(tokens.counts.min()):
            self._say_once(f"keep={budget.keep} is more than an image has ({int(tokens.counts.min())}): all are kept")
        return budget.counts(tokens.mask)

    def prompt_counts(self, batch: Batch, counts: Int[Tensor, " I"] | None) -> Int[Tensor, " B"] | None:
        """Tokens that stay in each prompt: the sum over its images."""
        if counts is None:
            return None
        rows = torch.tensor(batch.row_of_image, device=counts.device)
        return counts.new_zeros(len(batch.features["input_ids"])).index_add_(0, rows, counts)

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        chunk = kwargs.get("prefill_chunk_size", getattr(self.base.generation_config, "prefill_chunk_size", None))
        if chunk:
            raise ValueError(f"prefill_chunk_size={chunk} gives other tokens with embeddings as input; leave it out")
        for key in ("input_ids", "inputs_embeds", "pixel_values", "position_ids", "attention_mask"):
            if key in kwargs:
                raise ValueError(f"{key} is made by the pruned path; give images and text instead")

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning(sentence)

    # ------------------------------------------------------------------------------------- save and load

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        base_id: str | None = None,
        notes: str = "",
        card_rows: Sequence[Row] | None = None,
    ) -> None:
        """Write the pruner (never the base model, never the throttler) with what it needs to be loaded safely.

        Args:
            base_id: The name to load the base model by; default: the one it was loaded by.
            notes: Kept in the config.
            card_rows: Measured rows (`read_results(path).rows`) for the table of the model card.
        """
        save(self, directory, base_id=base_id, notes=notes, card_rows=card_rows)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        keep: int | float | None = None,
        base: nn.Module | None = None,
        processor: Any = None,
        allow_other_base: bool = False,
        **model_kwargs: Any,
    ) -> "PrunedVLM":
        """A saved pruner on its base model: a local folder or a hub id; see `diffprune.loading`."""
        from diffprune.loading import load_pruned_vlm

        return load_pruned_vlm(
            cls,
            directory,
            keep=keep,
            base=base,
            processor=processor,
            allow_other_base=allow_other_base,
            model_kwargs=model_kwargs,
        )

    def push_to_hub(
        self, repo_id: str, *, base_id: str | None = None, card_rows: Sequence[Row] | None = None, **kwargs: Any
    ) -> Any:
        """Save the pruner as `save_pretrained` does and upload it to the hub under `repo_id`."""
        return push(self, repo_id, base_id=base_id, card_rows=card_rows, **kwargs)


def wrap_backbone(model: nn.Module, processor: Any) -> Backbone:
    """The backbone for a loaded model, by its `model_type`."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in BACKBONES:
        raise ValueError(
            f"model type {model_type!r} is not supported; there are {', '.join(BACKBONES.names())}. "
            "docs/add_a_backbone.md shows how to add one in one file"
        )
    family = BACKBONES.get(cast(str, model_type))
    if not issubclass(family, Backbone):
        raise ValueError(f"model type {model_type!r} is an image classifier, not a vision-language model")
    return family(model, processor)


def refuse_offloaded(backbone: Backbone, device: torch.device) -> None:
    """An error where weights that are read here, of embeddings, tower or projector, lie on a disk or another device."""
    elsewhere = {str(value.device) for value in vision_state(backbone).values() if value.device.type == "meta"}
    if device.type == "meta" or elsewhere:
        raise ValueError(
            "device_map has offloaded the model's embeddings, vision tower or projector, and tokens are scored beside "
            "them; give these a device (or load a smaller dtype): only decoder layers may be offloaded"
        )
