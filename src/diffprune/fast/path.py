"""FastPath: what `vlm.compile()` builds. Composition over the stock modules; the model stays as it is."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import RLock
from types import NoneType
from typing import Any

import torch

from diffprune.backbones.base import with_needs
from diffprune.backbones.prompts import Batch
from diffprune.fast.answering import Answering
from diffprune.fast.build import Builder
from diffprune.fast.choice import take
from diffprune.fast.finding import Finding, Growth
from diffprune.fast.graphs import is_out_of_memory, on_device
from diffprune.fast.options import NotCompiled, read_options
from diffprune.fast.request import Request
from diffprune.fast.seal import Seal
from diffprune.inside.stream import real_first
from diffprune.ops import hard_topk, take_tokens
from diffprune.types import Keep, LMInputs, counts_of_each

logger = logging.getLogger("diffprune")


class FastPath(Finding, Answering):
    """Static shapes and CUDA graphs for one `PrunedVLM`; see `diffprune.fast` for how the stages are called.

    All requests share the static buffers, so one runs at a time: `generate` and `ttft` of other threads wait for their
    turn. Who calls the stages one by one beside other threads holds `turn()` meanwhile.

    Args:
        options: Of `CompileOptions`.
    """

    def __init__(self, vlm: Any, **options: Any) -> None:
        parts = Builder(vlm, read_options(options))
        self.report = parts.build()
        self.seal = Seal(vlm)
        self._lock = RLock()
        self._left = torch.cuda.Event() if parts.capture else None  # when the last request was through
        self.vlm, self.backbone, self.device, self.capture = vlm, parts.backbone, parts.device, parts.capture
        self.keeps, self.batch_sizes, self.text_buckets = parts.keeps, parts.batch_sizes, parts.text_buckets
        self.max_new_tokens = parts.options.max_new_tokens
        self.decoder, self.tower, self.scorer, self.store = parts.decoder, parts.tower, parts.scorer, parts.store
        self.buckets, self.pictures = parts.buckets, parts.pictures
        self.choosers, self.splicers = parts.choosers, parts.splicers
        self.miscompiled, self.precision = parts.miscompiled, parts.precision
        self.reported: set[str] = set()  # stages for which a shape outside what was compiled was reported
        parts.options = replace(parts.options, share=None)  # the other's graphs are not to live on here
        self.growth: Growth | None = Growth(parts, parts.options.on_demand)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of the model has no fast path: buffers and graphs belong to the weights they were made of."""
        logger.warning("the copy of a compiled model is not compiled; call compile() on the copy")
        return NoneType, ()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The static buffers for this thread alone; on a GPU its stream waits for what other streams still do there."""
        with self._lock, on_device(self.device):
            if self._left is not None:
                self._left.wait()
            try:
                yield
            finally:
                if self._left is not None:
                    self._left.record()

    # ------------------------------------------------------------------------------------- stages

    @torch.inference_mode()
    def prepare(self, batch: Batch, *, keep: Keep | None = None) -> Request:
        """A request with its prompt laid out in the static buffers; `NotCompiled` where nothing compiled holds it."""
        request = self._begin(batch, keep)
        self._lay_out(request)
        return request

    def _lay_out(self, request: Request) -> None:
        """The prompt as the splicer takes it; meanwhile the device encodes, so what was compiled is looked at here."""
        self.seal.check_weights()
        if request.splicer is not None:
            request.splicer.lay_out(
                request.ids,
                request.mask,
                self.backbone.positions(replace(request.batch, features=request.host)),
                image_token_id=self.backbone.image_token_id,
                pad_id=self.backbone.pad_id,
            )

    @torch.inference_mode()
    def encode(self, request: Request) -> None:
        """The vision tower."""
        request.steps = 0
        if request.picture is None:
            request.tokens = self.vlm.encode(request.batch)
            return
        pixels = request.batch.features["pixel_values"]
        request.picture.pixels[: len(pixels)].copy_(pixels, non_blocking=True)
        request.picture.encode()
        request.tokens = request.picture.tokens

    @torch.inference_mode()
    def prune(self, request: Request) -> None:
        """The method's choice."""
        if request.tokens is None:
            return
        method, chooser, tokens = self.vlm.method, request.chooser, request.tokens
        if chooser is not None and request.splicer is not None:
            assert request.picture is not None
            if chooser.keep.shape[1] == request.picture.num_tokens:
                chooser.kept.copy_(request.picture.encoded.x)
                return
            if chooser.prune is not None:
                chooser.prune()
                return
        if request.picture is not None:
            images = request.batch.num_images
            rows = tokens if images == len(tokens) else tokens.take(range(images))
            if chooser is not None and chooser.prune is not None:
                chooser.prune()
                request.tokens, request.chosen, request.merged = rows, chooser.keep[:images], chooser.kept[:images]
                return
            if request.ranking is not None and request.ranking.prune is not None:
                assert isinstance(request.keep, Sequence)
                request.ranking.prune()
                counts = counts_of_each(request.keep, rows.mask, method.rounding)
                request.tokens, request.chosen = rows, hard_topk(request.ranking.logits[:images], counts)
                return
            tokens = with_needs(self.backbone, request.batch, replace(rows, seeds=request.batch.seeds), method.needs)
            request.tokens = tokens
        if isinstance(request.keep, Sequence):  # one for each picture: chosen and spliced as without compile()
            counts = counts_of_each(request.keep, tokens.mask, method.rounding)
        else:
            budget = self.vlm.budget_of(request.keep)
            counts = budget.counts(tokens.mask) if request.picture is None else budget.count(request.picture.num_tokens)
        if method.is_merging:
            request.merged, request.chosen = self.vlm.rule.deploy(tokens, counts)
        else:
            request.chosen = self.vlm.rule.choose(tokens, counts).keep
        assert request.chosen is not None
        if chooser is None or request.splicer is None:
            request.chooser = None
            return
        if request.chosen.shape[1] != chooser.keep.shape[1] or bool((request.chosen < 0).any()):
            request.chooser = request.splicer = None  # fewer or more than K: spliced as the reference path does
            return
        chooser.keep[: request.rows].copy_(request.chosen)
        chooser.kept[: request.rows].copy_(take(tokens.x, request.chosen) if request.merged is None else request.merged)

    @torch.inference_mode()
    def splice(self, request: Request) -> None:
        """Kept tokens through the projector and between the words, into the bucket's buffers."""
        if request.splicer is not None:
            request.splicer.splice()
            return
        vlm = self.vlm
        if request.tokens is None:
            lm = vlm.lm_inputs(request.batch, None)
        else:
            assert request.chosen is not None
            x = take_tokens(request.tokens.x, request.chosen) if request.merged is None else request.merged
            visual = self.backbone.project(x)
            lm = self.backbone.splice(request.batch, request.tokens, visual, request.chosen, positions=vlm.positions)
        self._fill(request, lm)

    def _fill(self, request: Request, lm: LMInputs) -> None:
        """Inputs of the reference path, padded on the right instead of the left, into the smallest bucket."""
        if self.backbone.layer_additions(lm):
            raise NotCompiled(f"{self.backbone.family} adds features between decoder layers")
        order, valid = real_first(lm.attention_mask.bool())
        rows, width = order.shape
        bucket = self._find_bucket(self._rows_for(rows), width)
        bucket.fill(lm, order, valid.sum(-1) - 1)
        request.found, request.spliced = bucket, lm
        request.num_kept = tuple(lm.visual.sum(-1).tolist())

    @torch.inference_mode()
    def prefill(self, request: Request) -> None:
        """The language model over the prompt, and the first token."""
        request.bucket.prefill()
        request.steps = 1

    @torch.inference_mode()
    def decode(self, request: Request) -> None:
        """One more token."""
        if request.steps >= self.max_new_tokens:
            raise ValueError(f"the cache was made for max_new_tokens={self.max_new_tokens}; compile with more")
        request.bucket.decode()
        request.steps += 1

    def captured(self, request: Request) -> dict[str, bool]:
        """Which stages of this request are one CUDA graph."""
        prune = None if request.chooser is None else request.chooser.prune
        stages = {
            "encode": None if request.picture is None else request.picture.encode,
            "prune": prune,
            "splice": None if request.splicer is None else request.splicer.splice,
            "prefill": None if request.found is None else request.found.prefill,
            "decode": None if request.found is None else request.found.decode,
        }
        return {name: stage is not None and stage.graph is not None for name, stage in stages.items()}

    def kv_bytes(self, batch: int, length: int) -> int:
        """Bytes of the static cache of the bucket of that size, room for `max_new_tokens` included."""
        columns = next((b.columns for b in self.buckets if (b.batch, b.length) == (batch, length)), None)
        if columns is None:
            known = ", ".join(f"{b.batch} x {b.length}" for b in self.buckets)
            raise ValueError(f"there is no bucket of {batch} x {length}; there are {known}")
        return self.store.num_bytes(batch, columns)


def compile_vlm(vlm: Any, **options: Any) -> FastPath:
    """The fast path of a `PrunedVLM`, put into `vlm.fast`."""
    if vlm.fast is not None:
        raise ValueError("this model is compiled already; set vlm.fast = None first to compile for other sizes")
    try:
        vlm.fast = FastPath(vlm, **options)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if vlm.fast is None:  # out of the handler, whose error holds what was built so far
        gc.collect()
        with suppress(RuntimeError):  # where the device refuses even that, there is still the sentence
            torch.cuda.empty_cache()
        raise ValueError(
            "the GPU has no room for the fast path; give fewer or smaller batch_sizes and text_buckets, or fuse=False "
            "(generate() works as before)"
        )
    return vlm.fast
