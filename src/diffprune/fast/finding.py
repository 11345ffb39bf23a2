"""Which static parts a request runs in; what was not compiled for is made on first use, up to a limit."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffprune.backbones.prompts import Batch
from diffprune.fast.buckets import Bucket
from diffprune.fast.build import Builder
from diffprune.fast.cuts import Cuts, count_before_layers, cuts_of
from diffprune.fast.graphs import is_out_of_memory
from diffprune.fast.options import NotCompiled
from diffprune.fast.request import Request, one_budget
from diffprune.methods.base import ScoringPruner
from diffprune.types import Budget, Keep

logger = logging.getLogger("diffprune")

ON_HOST = ("input_ids", "attention_mask", "image_grid_thw", "image_sizes")  # what a prompt is laid out from
STEP = 64  # columns by which a bucket that is made on first use is longer than needed, at most


def ranks_and_cuts(method: Any) -> bool:
    """Whether the method keeps the largest scores and nothing else, so that one ranking serves every budget."""
    return isinstance(method, ScoringPruner) and type(method).choose is ScoringPruner.choose


class Growth:
    """Shapes made on first use: how many more may be, and which of them could not.

    Args:
        parts: What makes them.
        limit: Encoders, choices and buckets that may be made; nothing is ever thrown out for another.
    """

    def __init__(self, parts: Builder, limit: int) -> None:
        self.parts, self.left, self.limit = parts, limit, limit
        self.refused: set[tuple[Any, ...]] = set()
        self.odd: set[tuple[int, ...]] = set()  # pixels that the processor would not make of a picture of that size

    def make(self, key: tuple[Any, ...], build: Callable[[], None], *, counts: bool = True) -> bool:
        """Whether the part was made; where it could not, one sentence says why, once.

        Args:
            counts: Among those of which there may be so many; as many again may fail.
        """
        if (counts and self.left < 1) or len(self.refused) >= self.limit or key in self.refused:
            return False
        start, problem = time.perf_counter(), ""
        try:
            with self.parts.making():
                build()
        except RuntimeError as error:
            no_room = is_out_of_memory(error)
            problem = "there is no room on the device" if no_room else str(error).partition("\n")[0]
        if problem:  # out of the handler, whose error holds what was built so far
            self.refused.add(key)
            gc.collect()
            if self.parts.capture:
                torch.cuda.empty_cache()
            self.parts.vlm._say_once(f"a new shape cannot be compiled and runs as without compile(): {problem}")
            return False
        self.left -= counts
        logger.info("compiled for %s in %.1f s; %d more may be", key, time.perf_counter() - start, self.left)
        return True


class Finding:
    """The part of `FastPath` that finds what a request runs in, or has it made."""

    def _begin(self, batch: Batch, keep: Keep | None) -> Request:
        """What can be decided from the prompt alone: its ids are read back once, before any kernel is waited for."""
        fast: Any = self
        fast.seal.check_rules()
        if torch.is_autocast_enabled(fast.device.type):
            raise NotCompiled("torch.autocast is on, and what is compiled computes in the model's own precision")
        host = {key: batch.features[key].cpu() for key in ON_HOST if key in batch.features}
        rows = len(host["input_ids"])
        size = self._rows_for(rows)
        keep = one_budget(fast.vlm, keep, batch.num_images)
        request = Request(batch=batch, keep=keep, rows=rows, host=host)
        is_plain = batch.row_of_image == tuple(range(rows))  # one picture in each prompt
        key = self._find_picture(request, size if is_plain else self._rows_for(batch.num_images, strict=False))
        if (
            request.picture is not None
            and not isinstance(keep, Sequence)
            and (is_plain or not fast.vlm.method.is_inside)
        ):
            self._find_choice(request, key, fast.vlm.budget_of(keep), splices=is_plain)
        elif request.picture is not None and ranks_and_cuts(fast.vlm.method):
            same = (chooser for own, chooser in fast.choosers.items() if own[:-1] == key)
            request.ranking = next((chooser for chooser in same if chooser.prune is not None), None)
        elif fast.vlm.method.is_inside:
            raise NotCompiled(
                "the method drops inside the language model, and pictures of this kind were not compiled for"
            )
        return request

    def _grow(self, key: tuple[Any, ...], build: Callable[[], None], *, counts: bool = True) -> bool:
        """Whether a part that is missing was made."""
        growth: Growth | None = getattr(self, "growth", None)
        return growth is not None and growth.make(key, build, counts=counts)

    def _can_grow(self) -> bool:
        growth: Growth | None = getattr(self, "growth", None)
        return growth is not None and growth.left > 0

    def _rows_for(self, count: int, *, strict: bool = True) -> int:
        """Rows that so many prompts or pictures run in: the next larger number compiled for, or a power of two."""
        fast: Any = self
        sizes = sorted({*fast.batch_sizes, *(bucket.batch for bucket in fast.buckets)})
        found = next((size for size in sizes if size >= count), None)
        if found is not None:
            return found
        if strict and not self._can_grow():
            raise NotCompiled(f"the batch is larger than the {sizes[-1]} rows compiled for")
        return 1 << (count - 1).bit_length() if count else sizes[0]

    def _find_picture(self, request: Request, size: int) -> tuple[int, ...]:
        """The key of the request's pictures; where there is an encoder for them, it is noted in the request."""
        fast: Any = self
        batch, tower = request.batch, fast.tower
        if tower is None or not batch.num_images or not fast.pictures:
            return ()
        if any(fast.backbone.picture_mode(batch, image) for image in range(batch.num_images)):
            return ()
        key = (size, *tower.key(batch, request.host))
        if key not in fast.pictures and key not in fast.miscompiled:
            if len(key) == 1:
                self._report("encoder", "pictures of several sizes at once", "a batch of one size")
            elif not self._make_picture(key, batch) and batch.row_of_image == tuple(range(request.rows)):
                way_out = f"compile(image_sizes=[{batch.sizes[0]}])" if batch.sizes else "compile(image_sizes=[...])"
                size_of = " x ".join(map(str, batch.sizes[0])) if batch.sizes else "another size"
                self._report("encoder", f"a picture of {size_of}", way_out)
        picture = fast.pictures.get(key)
        held = torch.bincount(torch.tensor(batch.row_of_image), minlength=request.rows)  # pictures of each prompt
        visual = ((request.ids == fast.backbone.image_token_id) & request.mask).sum(-1)
        if picture is not None and bool((visual == held * picture.num_placeholders).all()):
            request.picture = picture
        return key

    def _make_picture(self, key: tuple[int, ...], batch: Batch) -> bool:
        """Whether an encoder of such pictures could be made."""
        fast: Any = self
        if not batch.sizes or not self._can_grow() or key in fast.growth.odd:
            return False
        parts = fast.growth.parts
        sample = parts.sample(batch.sizes[0])
        if (key[0], *fast.tower.key(sample, sample.features)) != key:
            fast.growth.odd.add(key)
            return False
        return self._grow(("picture", *key), lambda: parts.add_picture(fast.tower, sample, key))

    def _find_choice(self, request: Request, key: tuple[int, ...], budget: Budget, *, splices: bool) -> None:
        """Note the choice, bucket and splice of the request's pictures, or report what is missing.

        Args:
            splices: Every prompt holds one picture, which is what splices are compiled for.
        """
        fast: Any = self
        method, picture = fast.vlm.method, request.picture
        assert picture is not None
        k = count_before_layers(method, budget, picture.num_tokens)
        chosen = (*key, k)
        if chosen not in fast.choosers:
            self._grow(("choice", *chosen), lambda: fast.growth.parts.add_chooser(key, k))
        request.chooser = fast.choosers.get(chosen)
        if not splices:
            return
        cuts = cuts_of(method, fast.backbone, picture.num_tokens, budget.count(picture.num_tokens))
        if cuts is not None and any(
            ids[mask][-1] == fast.backbone.image_token_id for ids, mask in zip(request.ids, request.mask, strict=True)
        ):  # whose last token may be dropped: another one asks then, and the answer goes on from another position
            raise NotCompiled("the method drops inside the language model, and a prompt ends with its picture")
        text = int((request.mask & (request.ids != fast.backbone.image_token_id)).sum(-1).max())
        bucket = self._bucket_with_splice(key, k, text, cuts)
        if bucket is not None:
            request.found, request.splicer = bucket, fast.splicers[(*chosen, *bucket.key)]
            request.num_kept = (k,) * request.rows
        elif cuts is not None:
            raise NotCompiled(
                "the method drops inside the language model, and nothing was compiled for this length and keep"
            )
        elif request.chooser is None:
            self._report("choice", f"keep={budget.keep}", f"compile(keep=({fast.keeps[0].keep}, {budget.keep}))")
        elif any(each.batch == key[0] and each.length >= k + text for each in fast.buckets):
            self._report("splice", f"{text} text tokens beside {k} visual ones", f"compile(text_buckets=({text},))")

    def _bucket_with_splice(self, key: tuple[int, ...], k: int, text: int, cuts: Cuts | None) -> Bucket | None:
        """The shortest bucket into which k tokens of those pictures can be spliced beside that text."""
        fast: Any = self

        def fits(bucket: Bucket) -> bool:
            own = None if bucket.cuts is None else bucket.cuts.left
            return bucket.batch == key[0] and bucket.takes(k) and own == (None if cuts is None else cuts.left)

        same = [bucket for bucket in fast.buckets if fits(bucket)]
        for bucket in same:
            splicer = fast.splicers.get((*key, k, *bucket.key))
            if splicer is not None and splicer.num_text >= text:
                return bucket
        if (*key, k) not in fast.choosers or not self._can_grow():
            return None
        parts = fast.growth.parts
        needed = k + parts.newlines_of(key) + text
        near = [bucket for bucket in same if needed <= bucket.length <= needed + STEP]
        if not near:
            length = k + parts.newlines_of(key) + self._room_for(text)
            if not self._grow(("bucket", key[0], length), lambda: parts.add_bucket(key[0], length, cuts)):
                return None
            near = [bucket for bucket in fast.buckets if fits(bucket) and bucket.length == length]
        made = self._grow(("splice", *key, k, *near[0].key), lambda: parts.add_splicer(key, k, near[0]), counts=False)
        return near[0] if made else None

    def _room_for(self, text: int) -> int:
        """Columns for that text: the next larger number named to `compile`, or a multiple of `STEP`."""
        fast: Any = self
        named = [size for size in fast.text_buckets if size >= text]
        return min(named, default=-(-text // STEP) * STEP)

    def _find_bucket(self, size: int, width: int) -> Bucket:
        """The shortest bucket of so many rows for a prompt of that width, whatever it is made of."""
        fast: Any = self
        same = [bucket for bucket in fast.buckets if bucket.batch == size]
        fitting = [bucket for bucket in same if bucket.length >= width]
        if not fitting:
            length = -(-width // STEP) * STEP
            if not self._grow(("bucket", size, length), lambda: fast.growth.parts.add_bucket(size, length, None)):
                if not same:
                    most = max(bucket.batch for bucket in fast.buckets)
                    raise NotCompiled(f"the batch is larger than the {most} rows compiled for")
                longest = max(bucket.length for bucket in same)
                raise NotCompiled(f"the prompt is longer than the {longest} columns compiled for")
            fitting = [bucket for bucket in fast.buckets if (bucket.batch, bucket.length) == (size, length)]
        return min(fitting, key=lambda bucket: bucket.length)

    def _report(self, stage: str, shape: str, way_out: str) -> None:
        """Say once for each stage that a shape is outside what was compiled: sizes may be as many as pictures."""
        fast: Any = self
        if stage not in fast.reported and not fast.vlm.method.is_inside:  # whose request is refused
            fast.reported.add(stage)
            fast.vlm._say_once(
                f"the fast path has no {stage} for {shape}, so it runs there as without compile(); {way_out} has one"
            )
