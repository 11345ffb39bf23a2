"""PrunedVLM: a Hugging Face vision-language model that keeps only the visual tokens that matter.

    TRAINING    encode -> restrict (all N tokens, each weakened by its weight) -> project -> splice -> loss
    INFERENCE   encode -> select   (K of N tokens, as they are)                -> project -> splice -> generate

Both paths are below, side by side. The base model is frozen, called by its own parts and never patched.
"""

import dataclasses
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffprune.backbones.base import NEWLINE_RULES, Backbone, Batch, Exchange, real_columns_first
from diffprune.checkpoint import exported_state, fingerprint, save_pruner
from diffprune.inside import loop, training
from diffprune.methods.base import (
    Distillation,
    LayerPruner,
    MergingPruner,
    Pruner,
    Restricted,
    SelfTaughtPruner,
    TrainableLayerPruner,
    TrainablePruner,
)
from diffprune.methods.options import parse_method
from diffprune.ops import hard_mask, linear_gate, take_tokens
from diffprune.ops.noise import Generators, draw_normal
from diffprune.registry import BACKBONES
from diffprune.results import Row
from diffprune.tiles import BUDGETS, PerTile
from diffprune.types import Budget, ImageSelection, LMInputs, Selection, VisualTokens

logger = logging.getLogger("diffprune")

ORDERS = ("raster", "native")


class PrunedVLM(nn.Module):
    """Any loaded Hugging Face VLM with any pruning method around it.

    Args:
        model: The loaded model, of a supported family (`dp.backbones()`). It is frozen and stays untouched.
        processor: Its processor.
        method: A method's name (`dp.methods()`), which may hold options (`fastv[layer=3]`), or a built `Pruner`.
        keep: The budget: an int is tokens per image, a float a share. Every call may give its own.
        positions: "original" keeps the position each token had before anything was dropped; "packed" numbers what is
            left without gaps, for engines that can do no other. Left out: original, but with a method's `native=True`
            packed where its release does so and a position is one number.
        order: "raster" gives the language model the kept tokens as they lie in the picture; "native" as a method built
            with `native=True` gives them (HoloV, PruneSID, ToMe, VisionZip). Original positions go with their tokens.
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
        order: str = "raster",
        newline: str = "rows",
        budget: str = "global",
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, PrunedVLM):
            raise ValueError("the model is a PrunedVLM already; give its base: PrunedVLM(vlm.base, ...)")
        if positions not in (None, "original", "packed"):
            raise ValueError(f'positions={positions!r} is unknown; choose "original" or "packed"')
        if order not in ORDERS:
            raise ValueError(f"order={order!r} is unknown; choose {' or '.join(ORDERS)}")
        if newline not in NEWLINE_RULES:
            raise ValueError(f"newline={newline!r} is unknown; choose {', '.join(NEWLINE_RULES)}")
        if budget not in BUDGETS:
            raise ValueError(f"budget={budget!r} is unknown; choose {' or '.join(BUDGETS)}")
        if order == "native" and budget == "per_tile":
            raise ValueError("order='native' is for a choice from the whole picture; say budget='global' beside it")
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
        if isinstance(method, LayerPruner) and positions == "packed":
            raise ValueError(
                f'method {method.name!r} drops inside the language model, where positions="packed" has no meaning; '
                "leave it out, or see the method's own options"
            )
        self.budget = Budget(keep, method.rounding)
        self.order = order
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
        if budget == "per_tile" and isinstance(method, LayerPruner):
            raise ValueError(
                f"budget='per_tile' is for choices before the language model; {method.name!r} makes its own inside"
            )
        self.budget_rule = budget
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
            order=self.order,
            newline=self.backbone.keeps_newlines,
            budget=self.budget_rule,
            **options,
        )

    def _own_positions(self, method: Pruner) -> str:
        """The rule of a method before the language model; one inside it counts anew by itself."""
        is_free = self.backbone.plain_positions and not isinstance(method, LayerPruner)
        return method.positions if is_free else "original"

    def compile(self, **options: Any) -> Any:  # type: ignore[override]  # the inherited one would compile the loss
        """Build the fast path (static shapes; CUDA graphs on a GPU) and report on it; `generate` stays the same call.

        Args:
            options: keep, batch_sizes, text_buckets, image_sizes, max_new_tokens, fuse and more: `fast.FastPath`.
        """
        from diffprune.fast import compile_vlm

        if self.order == "native":
            raise ValueError("the fast path keeps raster order; leave order='native' out, or generate() without it")
        return compile_vlm(self, **options).report

    @property
    def rule(self) -> Any:
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
    ) -> Float[Tensor, ""]:
        """Caption loss with every token weakened by its weight and none dropped: what is run is what is differentiated.

        Args:
            batch: From `prepare(images, text, answers)`.
            tau: Temperature of Soft Top-K; smaller is harder.
            keep: The budget of this step; a tensor of counts gives every image its own.
            generator: Of the noise; one per image makes a row independent of its batch.
            hard: Drop instead of throttling: the loss of the deployed path, for validation.
            tokens: The batch's visual tokens, where they are encoded already.
            num_targets: What the summed loss is divided by; the batch's own answer tokens where left out.
            remove_below: Tokens with a weight below this leave the sequence, all but the K best; see `throttle`.
        """
        tokens = self.encode(batch) if tokens is None else tokens
        if tokens is None:
            return self.answer_loss(
                self.backbone.splice(batch, None, None, None, positions=self.positions), num_targets
            )
        if not hard:
            options = {"tau": tau, "keep": keep, "generator": generator, "remove_below": remove_below}
            return self.learn(batch, tokens, num_targets=num_targets, **options)[0]
        if isinstance(self.method, LayerPruner):
            lm, counts = self.splice_all(batch, tokens), self._prompt_counts(batch, tokens, keep)
            hidden, targets = loop.answer_states(self.backbone, lm, self.method, counts)
            return self._cross_entropy(hidden, targets, num_targets)
        return self.answer_loss(self._drop(batch, tokens, self._counts(tokens, keep)), num_targets)

    def learn(
        self,
        batch: Batch,
        tokens: VisualTokens,
        *,
        tau: float | Tensor = 1.0,
        keep: int | float | Tensor | None = None,
        generator: Generators = None,
        num_targets: int | Tensor | None = None,
        remove_below: float = 0.0,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B N"]]:
        """The loss of a training step, whatever the method learns from, and the weights it gave the visual tokens.

        The arguments are those of `loss`. Rows of the weights are prompts where the method chooses inside the language
        model, and all are 1 where it learns from pictures alone.
        """
        method = self.method
        if isinstance(method, SelfTaughtPruner):
            own = method.own_loss(tokens, self._counts(tokens, keep), generator=generator)
            share = 1.0 if num_targets is None else (batch.labels != -100).sum() / num_targets  # type: ignore[union-attr]
            return own * share, tokens.mask.float()
        if isinstance(method, TrainableLayerPruner):
            if remove_below > 0:
                raise ValueError(f"remove_below={remove_below} is for choices before the language model; set it to 0")
            lesson = training.listen(
                self.backbone,
                self.splice_all(batch, tokens),
                method,
                self._prompt_counts(batch, tokens, keep),
                tau=tau,
                generator=generator,
            )
            return self._cross_entropy(lesson.hidden, lesson.targets, num_targets, lesson.penalty), lesson.alpha
        lm, restricted = self.throttle(
            batch, tokens, tau=tau, keep=keep, generator=generator, remove_below=remove_below
        )
        loss = self.answer_loss(lm, num_targets, penalty=restricted.penalty, distillation=restricted.distillation)
        return loss, restricted.alpha

    def throttle(
        self,
        batch: Batch,
        tokens: VisualTokens,
        *,
        tau: float | Tensor = 1.0,
        keep: int | float | Tensor | None = None,
        generator: Generators = None,
        remove_below: float = 0.0,
    ) -> tuple[LMInputs, Restricted]:
        """What the language model is given in training, and the weights that made it.

        Args:
            remove_below: Tokens whose weight has become smaller are really taken out (progressive removal), all but
                the K best; 0 takes none out. As the temperature falls the sequence shortens from N towards K, and what
                is run is still what is differentiated.
        """
        method = self.method
        if not isinstance(method, TrainablePruner):
            raise ValueError(f"method {method.name!r} has nothing to train; loss(..., hard=True) measures it")
        counts = self._counts(tokens, keep)
        restricted: Restricted = self.rule.restrict(tokens, counts, tau=tau, generator=generator)
        if restricted.heard is None:
            tokens = dataclasses.replace(tokens, planes=restrict_planes(tokens, restricted.alpha, generator))
        stays = everything(tokens)
        x = restricted.x
        if remove_below > 0:
            stays = survivors(restricted.alpha, counts, tokens.mask, remove_below)
            x = take_tokens(x, stays)
        visual = self.backbone.project(x.to(tokens.x.dtype))  # [B, N, L], or fewer than N where tokens were removed
        lm = self.backbone.splice(batch, tokens, visual, stays, positions=self.positions)
        if restricted.heard is not None:
            assert lm.origin is not None
            index = lm.origin.index
            heard = torch.where(index < 0, 1.0, restricted.heard.flatten()[index.clamp_min(0)])
            lm = dataclasses.replace(lm, heard=heard)
        return lm, restricted

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
            ids = self._generate_ids(batch, keep, kwargs)
        if return_ids:
            return ids
        answers = [answer.strip() for answer in self.backbone.tokenizer.batch_decode(ids, skip_special_tokens=True)]
        return answers[0] if isinstance(text, str) else answers

    def _generate_ids(self, batch: Batch, keep: int | float | None, kwargs: dict[str, Any]) -> Int[Tensor, "B T"]:
        """New tokens by the reference path."""
        tokens = self.encode(batch)
        if isinstance(self.method, LayerPruner) and tokens is not None:
            lm = self.splice_all(batch, tokens)
            return loop.generate(self.backbone, lm, self.method, self._prompt_counts(batch, tokens, keep), **kwargs)
        return self.backbone.generate(self.lm_inputs(batch, tokens, keep=keep), **kwargs)

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
        kept, logits = self.rule.choose(tokens, self._counts(tokens, keep))
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

    def lm_inputs(self, batch: Batch, tokens: VisualTokens | None, *, keep: int | float | None = None) -> LMInputs:
        """What the language model is given once tokens are dropped."""
        if tokens is None:
            return self.backbone.splice(batch, None, None, None, positions=self.positions)
        return self._drop(batch, tokens, self._counts(tokens, keep))

    @torch.inference_mode()
    def logits(self, batch: Batch, *, keep: int | float | None = None) -> tuple[Float[Tensor, "B T V"], LMInputs]:
        """Next-token logits of the pruned prefill, and the inputs they belong to."""
        lm = self.lm_inputs(batch, self.encode(batch), keep=keep)
        return self.backbone.logits(lm), lm

    def splice_all(self, batch: Batch, tokens: VisualTokens) -> LMInputs:
        """The unpruned sequence, projected and spliced by our own path."""
        return self.backbone.splice(batch, tokens, self.backbone.project(tokens.x), everything(tokens))

    def splice_kept(self, batch: Batch, tokens: VisualTokens, keep: Int[Tensor, "B K"]) -> LMInputs:
        """The sequence with the kept tokens alone, whoever chose them."""
        return self._splice_chosen(batch, tokens, take_tokens(tokens.x, keep), keep)

    def _drop(self, batch: Batch, tokens: VisualTokens, counts: Int[Tensor, " B"]) -> LMInputs:
        if not isinstance(self.method, MergingPruner):
            return self.splice_kept(batch, tokens, self.rule.select(tokens, counts))
        x, keep = self.rule.reduce(tokens, counts)
        return self._splice_chosen(batch, tokens, x, keep)

    def _splice_chosen(
        self, batch: Batch, tokens: VisualTokens, x: Float[Tensor, "B K D"], keep: Int[Tensor, "B K"]
    ) -> LMInputs:
        visual = self.backbone.project(x)  # [B, K, L]
        return self.backbone.splice(batch, tokens, visual, keep, positions=self.positions, order=self.order)

    def answer_loss(
        self,
        lm: LMInputs,
        num_targets: int | Tensor | None = None,
        *,
        penalty: Float[Tensor, ""] | None = None,
        distillation: Distillation | None = None,
    ) -> Float[Tensor, ""]:
        """The answers' summed loss over `num_targets`, and the method's own penalty with this batch's share of them."""
        if lm.labels is None:
            raise ValueError("the batch has no answers to learn from; make it with prepare(images, text, answers)")
        if lm.heard is not None:
            lesson = training.listen(self.backbone, lm)
            if distillation is not None:
                held = self._distance_from_full(lm, lesson, distillation)
                penalty = held if penalty is None else penalty + held
            return self._cross_entropy(lesson.hidden, lesson.targets, num_targets, penalty)
        if self.backbone.two_way(lm) is None:
            lm = real_columns_first(lm)
        assert lm.labels is not None
        return self._cross_entropy(self.backbone.hidden(lm)[:, :-1], lm.labels[:, 1:], num_targets, penalty)

    def _cross_entropy(
        self,
        hidden: Float[Tensor, "B T L"],
        targets: Int[Tensor, "B T"],
        num_targets: int | Tensor | None,
        penalty: Float[Tensor, ""] | None = None,
    ) -> Float[Tensor, ""]:
        wanted = targets != -100
        logits = self.base.lm_head(hidden[wanted])  # the head runs on answer positions alone
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = F.cross_entropy(logits.to(wide), targets[wanted], reduction="sum")
        if penalty is not None:
            total = total + penalty * wanted.sum()
        return total / (wanted.sum() if num_targets is None else num_targets)

    def _distance_from_full(self, lm: LMInputs, lesson: training.Lesson, weights: Distillation) -> Float[Tensor, ""]:
        """How far a pass is from the one in which every token is heard: in what it says, and in the tokens it keeps."""
        with torch.no_grad():
            full = training.listen(self.backbone, dataclasses.replace(lm, heard=None))
        wanted = lesson.targets != -100
        said, told = (
            self.base.lm_head(states[wanted]).float().log_softmax(-1) for states in (lesson.hidden, full.hidden)
        )
        answers = F.kl_div(said, told, reduction="batchmean", log_target=True)
        kept = lesson.kept
        tokens = (lesson.hidden[kept] - full.hidden[kept]).float().square().sum() / (
            kept.sum().clamp(min=1) * lesson.hidden.shape[-1]
        )
        return weights.answers * answers + weights.tokens * tokens

    def budget_of(self, keep: int | float | None) -> Budget:
        """The budget of a call, which the method may round in its own way; the model's own where none is given."""
        return self.budget if keep is None else Budget(keep, self.method.rounding)

    def _counts(self, tokens: VisualTokens, keep: int | float | Tensor | None) -> Int[Tensor, " B"]:
        if isinstance(keep, Tensor):
            return keep
        budget = self.budget_of(keep)
        if isinstance(budget.keep, int) and budget.keep > int(tokens.counts.min()):
            self._say_once(f"keep={budget.keep} is more than an image has ({int(tokens.counts.min())}): all are kept")
        return budget.counts(tokens.mask)

    def _prompt_counts(
        self, batch: Batch, tokens: VisualTokens, keep: int | float | Tensor | None
    ) -> Int[Tensor, " B"]:
        """Tokens that stay in each prompt: the sum over its images."""
        counts = self._counts(tokens, keep)
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
            base_id: The name to load the base model by; the one it was loaded by where left out.
            notes: Kept in the config.
            card_rows: Measured rows (`read_results(path).rows`) for the table of the model card.
        """
        save_pruner(
            directory,
            state=exported_state(self.method.state_dict()),
            config=self.describe(base_id=base_id, notes=notes),
            card_rows=card_rows,
        )

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
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, base_id=base_id, card_rows=card_rows)
            api = HfApi()
            api.create_repo(repo_id, exist_ok=True)
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)

    def describe(self, *, base_id: str | None = None, notes: str = "") -> dict[str, Any]:
        """Everything about this pruner but its weights, as saved in `config.json`."""
        config = self.base.config
        return {
            "method": {"name": self.method.name, "options": dataclasses.asdict(self.method.options)},
            "base": {
                "id": base_id or getattr(config, "_name_or_path", "") or "",
                "revision": getattr(config, "_commit_hash", None),
                "model_type": config.model_type,
                "fingerprint": fingerprint(vision_state(self.backbone).items()),
            },
            "features": {"layer": getattr(config, "vision_feature_layer", None), "before": "projector"},
            "budgets": list(self.trained_for) or [self.budget.keep],
            "positions": self.positions,
            "order": self.order,
            "newline": self.backbone.keeps_newlines,
            "budget": self.budget_rule,
            "notes": notes,
        }


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
        raise ValueError(f"model type {model_type!r} is an image classifier; use diffprune.classifier.PrunedClassifier")
    return family(model, processor)


def refuse_offloaded(backbone: Backbone, device: torch.device) -> None:
    """An error where weights that are read here, of embeddings, tower or projector, lie on a disk or another device."""
    elsewhere = {str(value.device) for value in vision_state(backbone).values() if value.device.type == "meta"}
    if device.type == "meta" or elsewhere:
        raise ValueError(
            "device_map has offloaded the model's embeddings, vision tower or projector, and tokens are scored beside "
            "them; give these a device (or load a smaller dtype): only decoder layers may be offloaded"
        )


def everything(tokens: VisualTokens) -> Int[Tensor, "B N"]:
    """The index tensor that keeps all real tokens."""
    index = torch.arange(tokens.x.shape[1], device=tokens.x.device).expand(len(tokens), -1)
    return torch.where(tokens.mask, index, -1)


def survivors(
    alpha: Float[Tensor, "B N"], k: Int[Tensor, " B"], mask: Bool[Tensor, "B N"], threshold: float
) -> Int[Tensor, "B K"]:
    """Indices of the tokens whose weight reaches the threshold, and of the K heaviest in any case."""
    stays = ((alpha >= threshold) & mask) | hard_mask(alpha, k, mask)
    width = max(1, int(stays.sum(-1).max()))
    order = torch.argsort((~stays).long(), dim=-1, stable=True)[:, :width]  # those that stay first, in raster order
    return torch.where(stays.gather(1, order), order, -1)


def restrict_planes(
    tokens: VisualTokens, alpha: Float[Tensor, "B N"], generator: Generators
) -> tuple[Float[Tensor, "B N D"], ...]:
    """The tokens' other planes (DeepStack), weakened by the same weights as their features.

    Left whole, they would tell the language model what the restricted features no longer may. The noise is as loud as
    the image's own features, whose scale the tower leaves free; the linear gate has a finite slope at any weight.
    """
    gated = []
    for plane in tokens.planes:
        real = tokens.mask[..., None]
        energy = torch.where(real, plane.float().square(), 0.0).sum((1, 2), keepdim=True)
        loudness = (energy / (real.sum(1, keepdim=True) * plane.shape[-1])).sqrt()  # [B, 1, 1]
        noise = draw_normal(plane, tokens.mask, generator) * loudness
        gated.append(linear_gate(plane, alpha, noise=noise.to(plane.dtype)))
    return tuple(gated)


def vision_state(backbone: Backbone) -> dict[str, Tensor]:
    """The weights a pruner depends on: the vision tower's and the projector's."""
    return {
        f"{part}.{key}": value
        for part, module in backbone.vision_modules().items()
        for key, value in module.state_dict().items()
    }
