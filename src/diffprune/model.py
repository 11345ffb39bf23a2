"""PrunedVLM: a Hugging Face vision-language model that keeps only the visual tokens that matter.

    TRAINING    encode -> restrict (all N tokens, each weakened by its weight) -> project, splice -> loss
    INFERENCE   encode -> deploy   (K of N tokens, as they are)                -> project, splice -> generate

Both paths are below, side by side. The base model is frozen, called by its own parts and never patched.
"""

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffprune import fitting
from diffprune.arguments import read_request
from diffprune.backbones.prompts import Batch, Exchange
from diffprune.chat import Talking
from diffprune.decoding import Decoder, make_decoder
from diffprune.losses import check_prompts, share_of
from diffprune.memory import Memory
from diffprune.methods.base import Kept, Pruner, Restricted
from diffprune.ops.arguments import checked_methods
from diffprune.ops.noise import Generators
from diffprune.ops.transfer import to_device
from diffprune.pretrained import SavedPruner
from diffprune.restriction import by_prompt, restrict, with_soft_mask
from diffprune.tiles import PerTile
from diffprune.types import Budget, Keep, LMInputs, Selection, VisualTokens, check_counts, counts_of_each

logger = logging.getLogger("diffprune")


@checked_methods("__init__", "generate", "select", "prepare", "loss", "logits", "with_method", but=("keep",))
class PrunedVLM(SavedPruner, Talking, nn.Module):
    """Any loaded Hugging Face VLM with any pruning method around it.

    Args:
        model, processor: Loaded, of a supported family (`dp.backbones()`). The model is frozen and stays untouched.
        method: A name (`dp.methods()`), which may hold options (`fastv[layer=3]`), or a built `Pruner`; default: full.
        keep: The budget: an int is tokens per image, a float a share; needs a method. Every call may give its own.
        positions: "original" keeps the position each token had; "packed" numbers what is left without gaps. Default:
            original, but with a method's `native=True` packed where its release does so and a position is one number.
        newline: Which newline tokens stay in families that have them (LLaVA-NeXT, LLaVA-OneVision): "rows" (where the
            row keeps a token or had none to lose), "all" or "none". They are never counted in K.
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
        method: str | Pruner | None = None,
        keep: int | float | None = None,
        positions: str | None = None,
        newline: str = "rows",
        budget: str = "global",
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, PrunedVLM):
            raise ValueError("the model is a PrunedVLM already; give its base: PrunedVLM(vlm.base, ...)")
        fitting.check_rules(positions, newline, budget, keep=keep if method is None else None)
        model = fitting.plain_model(model)
        # Held in a tuple, so that the frozen base is no submodule: never in a state dict, never moved or trained.
        self._base = (model.requires_grad_(False).eval(),)
        self.backbone = fitting.wrap_backbone(model, processor)
        self.backbone.keeps_newlines = newline
        method = fitting.build_for(self.backbone, "full" if method is None else method, options)
        fitting.check_fit(method, self.backbone, positions, budget)
        device = self.base.get_input_embeddings().weight.device
        fitting.refuse_offloaded(self.backbone, device)
        self.method = cast(Pruner, method.to(device))
        self.budget, self.budget_rule = Budget(1.0 if keep is None else keep, method.rounding), budget
        # A method inside the language model counts anew by itself, and three numbers for a place stay as they are.
        own = method.positions if self.backbone.plain_positions and not method.is_inside else "original"
        self._given_positions, self.positions = positions, positions or own
        self.trained_for: tuple[int | float, ...] = ()  # budgets, the smallest first; empty where that is not known
        self.artefact: dict[str, Any] = {}  # what the config.json said that it was loaded from, or will say
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

    def compile(self, **options: Any) -> Any:  # type: ignore[override]  # the inherited one would compile the loss
        """Build the fast path (static shapes; CUDA graphs on a GPU) and report on it; `generate` stays the same call.

        Args:
            options: keep, batch_sizes, text_buckets, image_sizes, max_new_tokens, fuse and more: `fast.FastPath`.
        """
        from diffprune.fast import compile_vlm

        fitting.refuse_compiling(self.base)
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
        num_prompts: int | None = None,
        remove_below: float = 0.0,
        return_alpha: bool = False,
    ) -> Any:
        """Caption loss with every token weakened by its weight and none dropped: what is run is what is differentiated.

        Args:
            batch: From `prepare(images, text, answers)`.
            tau: Temperature of Soft Top-K, smaller is harder; a tensor gives every image its own.
            keep: The budget of this step; a tensor of counts gives every image its own.
            generator: Of the noise; one per image makes a row independent. Inside the language model both go by prompt.
            hard: Drop instead of throttling: the loss of the deployed path, for validation.
            tokens: The batch's visual tokens, where they are encoded already.
            num_targets: What the summed loss is divided by; default: the batch's own answer tokens.
            num_prompts: Of the global batch, of which this is a part; a mean over prompts (a penalty) gets its share.
            remove_below: Tokens with a weight below this leave the sequence, all but the K best; see `restriction`.
            return_alpha: Give (loss, alpha) with the visual tokens' weights: of prompts, where a method chooses inside.
        """
        check_prompts(num_prompts)
        tokens = self.encode(batch) if tokens is None else tokens  # [B, N, D]
        k = self.counts(tokens, keep)  # [B]
        step: dict[str, Any] = {"tau": None} if hard else {"tau": tau, "generator": generator}
        if tokens is None or hard:
            kept = None if tokens is None else self.rule.deploy(tokens, k)  # as generate() does
        else:
            tokens, kept = restrict(self.rule, tokens, k, remove_below=remove_below, **step)  # Eqs. 5, 6; Section 4.3
            kept = by_prompt(kept, batch.mean_by_prompt)
        if kept is not None and kept.own_loss is not None:  # a method that learns from pictures alone
            loss, alpha = share_of(kept.own_loss, batch.labels, num_targets, num_prompts), kept.alpha
        else:
            lm = self.splice(batch, tokens, kept)  # [B, T, L]
            more: dict[str, Any] = {"num_targets": num_targets, "num_prompts": num_prompts}
            if tokens is not None and kept is not None and kept.distillation is not None and kept.index is not None:
                more["whole"] = self.splice(batch, tokens, Kept(tokens.x, tokens.everything))
            loss, alpha = self.decoder.loss(lm, self.prompt_counts(batch, k), kept, **more, **step)
        return (loss, alpha) if return_alpha else loss

    forward = loss
    # ------------------------------------------------------------------------------------- inference: drop

    @torch.inference_mode()
    def generate(
        self,
        images: Any = None,
        text: str | Sequence[str] = "",
        *,
        messages: Any = None,
        keep: Keep | None = None,
        chat: bool = True,
        return_ids: bool = False,
        memory: Memory | None = None,
        **kwargs: Any,
    ) -> Any:
        """Answers with K visual tokens per image: a string for one prompt, a list for several.

        Args:
            images: For one prompt its images; for several prompts one entry each (an image, a list, or None).
            text: A question (it is put into the chat template) or a prompt with its placeholders.
            messages: A conversation in the OpenAI or transformers form instead, or a list of them.
            keep: The budget of this call; a list is one for each picture, in their order.
            chat: Put questions into the model's chat template.
            return_ids: Give the new token ids [B, T] instead of text.
            memory: Of the conversation, where this is one of its turns; see `chat`.
            kwargs: Go to the model's own `generate`: max_new_tokens, do_sample, streamer, ... What the processor gave
                for a prompt is taken too (`**inputs`); then ids come back as from transformers, the prompt in front.
        """
        asked = read_request(self.backbone, images, text, messages, kwargs, chat=chat, return_ids=return_ids)
        batch, out = asked.batch, None
        if self.fast is not None and memory is None:
            out = self.fast.answer(batch, keep=keep, **asked.kwargs)
        if out is None:
            tokens = self.encode(batch) if memory is None else memory.encode(self, batch)  # [B, N, D]
            k = self.counts(tokens, keep)  # [B]
            kept = None if tokens is None else self.rule.deploy(tokens, k)  # H_K: x [B, K, D], index [B, K]
            lm = self.splice(batch, tokens, kept)  # [B, T, L]
            out = self.decoder.generate(lm, self.prompt_counts(batch, k), memory=memory, **asked.kwargs)
        return asked.answers(self.backbone, out)

    @torch.inference_mode()
    def select(self, images: Any, text: str | Sequence[str] | None = None, *, keep: Keep | None = None) -> Selection:
        """What the method keeps of each image, with its scores, its grid and where each token looks."""
        if not isinstance(images, list | tuple) or not images:
            raise ValueError(f"select() was given {type(images).__name__} without an image; give a list of images")
        tokens = self.encode(self.backbone.prepare(images, [""] * len(images) if text is None else text))
        if tokens is None:
            raise ValueError("select() was given no image; give at least one")
        kept, logits = self.rule.choose(tokens, self.counts(tokens, keep))
        return Selection.of(tokens, kept, logits)

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
        return lm if kept.soft_mask is None else with_soft_mask(lm, kept.soft_mask)

    def lm_inputs(self, batch: Batch, tokens: VisualTokens | None, *, keep: Keep | None = None) -> LMInputs:
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

    def counts(self, tokens: VisualTokens | None, keep: Keep | Tensor | None = None) -> Any:
        """Tokens to keep of each image [B], from the budget of a call; None where there is no image."""
        if tokens is None:
            return None
        if isinstance(keep, Tensor):
            check_counts(keep, len(tokens))
            return to_device(keep, tokens.x.device).minimum(tokens.counts)
        if self.method.name == "full":
            fitting.refuse_full_budget(keep)
        if isinstance(keep, Sequence) and not isinstance(keep, str | bytes):
            return counts_of_each(keep, tokens.mask, self.method.rounding)
        budget = self.budget_of(cast(Any, keep))
        if isinstance(budget.keep, int) and budget.keep > int(tokens.counts.min()):
            self._say_once(f"keep={budget.keep} is more than an image has ({int(tokens.counts.min())}): all are kept")
        return budget.counts(tokens.mask)

    def prompt_counts(self, batch: Batch, counts: Int[Tensor, " I"] | None) -> Int[Tensor, " B"] | None:
        """Tokens that stay in each prompt: the sum over its images."""
        return None if counts is None else batch.sum_by_prompt(counts)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            logger.warning(sentence)
        self._said.add(sentence)
