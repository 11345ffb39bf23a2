"""FastPath: what `vlm.compile()` builds. Composition over the stock modules; the model stays as it is."""

import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from types import NoneType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from diffprune.backbones.base import Backbone, Batch, with_needs
from diffprune.fast.buckets import (
    Bucket,
    CacheStore,
    Choose,
    Chooser,
    Cuts,
    Picture,
    Splicer,
    choose_by_score,
    num_columns,
)
from diffprune.fast.decoder import Decoder, Unsupported, read_decoder
from diffprune.fast.graphs import Compiler, Stage, capturing, is_out_of_memory, settled_heap, waits_for_device
from diffprune.fast.vision import FastScorer, make_tower, take
from diffprune.inside.state import LayerState
from diffprune.inside.stream import real_first
from diffprune.methods.base import LayerPruner, MergingPruner, Pruner, ScoringPruner
from diffprune.methods.fastv import FastV
from diffprune.methods.pyramiddrop import PyramidDrop
from diffprune.nn.scorer import Scorer
from diffprune.ops import take_tokens
from diffprune.types import Budget, LMInputs, VisualTokens

ON_HOST = ("input_ids", "attention_mask", "image_grid_thw", "image_sizes")  # what a prompt is laid out from
PROBE = "What does the sign say?"


# Compiled against plain: convolutions in float32 may run in TF32, so less than in `rounding` is asked; what a compiler
# gets wrong is off by whole deviations.
MISTAKE = 5e-2


class Miscompiled(RuntimeError):
    """Compiled layers that give other values than the functions they were made of."""


class Unfit(ValueError):
    """A request outside what was compiled; the reference path answers it."""


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What `compile()` did.

    Args:
        seconds: Of each part.
        extra_bytes: Memory it holds beyond the model: private copies of weights, the static cache, and on a GPU what
            the allocator holds more than before (graphs and buffers included).
        buckets: (batch, length) of every prefill.
        captured: CUDA graphs were made.
    """

    seconds: dict[str, float]
    extra_bytes: dict[str, int]
    buckets: tuple[tuple[int, int], ...]
    captured: bool


@dataclass(kw_only=True)
class Run:
    """One request on its way through the stages."""

    batch: Batch
    keep: int | float
    rows: int
    host: dict[str, Tensor]  # the prompt, on the host
    picture: Picture | None = None
    chooser: Chooser | None = None
    splicer: Splicer | None = None
    tokens: VisualTokens | None = None
    chosen: Tensor | None = None
    merged: Tensor | None = None  # features of the chosen tokens, where they are not simply taken
    found: Bucket | None = None
    steps: int = 0
    num_kept: tuple[int, ...] = field(default=())

    @property
    def ids(self) -> Int[Tensor, "B T"]:
        return self.host["input_ids"]

    @property
    def mask(self) -> Bool[Tensor, "B T"]:
        return self.host["attention_mask"].bool()

    @property
    def bucket(self) -> Bucket:
        if self.found is None:
            raise Unfit("the bucket of this request is known after splice; call the stages in order")
        return self.found

    @property
    def token(self) -> Int[Tensor, " B"]:
        """The newest token of each row, on the device."""
        return self.bucket.token[: self.rows]

    @property
    def logits(self) -> Float[Tensor, "B V"]:
        """What the newest token was chosen from."""
        return self.bucket.logits[: self.rows]

    @property
    def kept(self) -> Int[Tensor, "B K"] | None:
        """Raster indices of the kept tokens."""
        return self.chosen if self.chooser is None else self.chooser.keep[: self.rows]


class FastPath:
    """Static shapes and CUDA graphs for one `PrunedVLM`; see `diffprune.fast` for how the stages are called."""

    def __init__(
        self,
        vlm: Any,
        *,
        keep: int | float | Sequence[int | float] | None = None,
        batch_sizes: Sequence[int] = (1,),
        text_buckets: Sequence[int] = (64, 128),
        image_sizes: Sequence[tuple[int, int]] | None = None,
        max_new_tokens: int = 64,
        fuse: bool = True,
        compile_layers: bool = True,
        autotune: bool = False,
        share: "FastPath | None" = None,
    ) -> None:
        if share is not None and share.vlm.base is not vlm.base:
            raise ValueError("share is the fast path of another base model; share among methods around one model")
        self.vlm = vlm
        self.backbone: Backbone = vlm.backbone
        self.max_new_tokens = positive("max_new_tokens", max_new_tokens)
        self.batch_sizes, self.text_buckets = sorted(set(batch_sizes)), sorted(set(text_buckets))
        keeps = [vlm.budget.keep] if keep is None else [keep] if isinstance(keep, int | float) else list(keep)
        self.keeps = [vlm.budget_of(value) for value in keeps]
        weight = vlm.base.get_input_embeddings().weight
        self.device, self.dtype = weight.device, vlm.base.dtype
        self.capture = self.device.type == "cuda"
        self.compiler = Compiler(self.capture and compile_layers)
        self.vision_compiler = Compiler(self.capture and compile_layers, autotune=autotune)
        self.seconds: dict[str, float] = {}
        if self.capture:
            torch.cuda.empty_cache()
        before = self._allocated()
        with torch.inference_mode(False), torch.no_grad(), self.compiler.patient(), settled_heap():
            self._build(image_sizes, fuse, share)
        shared = () if share is not None else (self.decoder.weights, self.tower)
        own = (*shared, self.scorer)
        extra = {
            "weights": sum(part.own_bytes for part in own if part is not None),
            "cache": sum(keys.nbytes + values.nbytes for keys, values in self.store.flat),
        }
        if self.capture:
            extra["allocator"] = self._allocated() - before
        self.report = CompileReport(
            seconds=self.seconds,
            extra_bytes=extra,
            buckets=tuple((bucket.batch, bucket.length) for bucket in self.buckets),
            captured=self.capture,
        )

    # ------------------------------------------------------------------------------------- build

    def _build(self, image_sizes: Sequence[tuple[int, int]] | None, fuse: bool, share: "FastPath | None") -> None:
        vlm, backbone = self.vlm, self.backbone
        with self._timed("weights"):
            if share is None:
                try:
                    weights = read_decoder(vlm.base, backbone.language_model, fuse=fuse)
                except (Unsupported, AttributeError) as error:
                    raise ValueError(
                        f"the fast path does not know the language model of {backbone.family} ({error}); "
                        "generate() works without it"
                    ) from error
                self.decoder = Decoder(weights, self.compiler)
                self.tower = make_tower(backbone, self.vision_compiler, fuse=fuse)
            else:
                self.decoder, self.tower = share.decoder, share.tower
            self.store = CacheStore(self.decoder, self.device, self.dtype)
            scorer = getattr(vlm.method, "scorer", None)
            self.scorer = None
            if isinstance(scorer, Scorer) and not scorer.spec.qk_norm and self.tower is not None:
                self.scorer = FastScorer(scorer, self.dtype, self.vision_compiler, fuse=fuse)
        samples = self._samples(image_sizes)
        shapes = self._bucket_shapes(sorted({self._num_placeholders(sample) for sample in samples}))
        self.axes = tuple(backbone.positions(samples[0]).shape[:-2])
        self.store.reserve(
            max(self.store.numel(batch, num_columns(length, self.max_new_tokens)) for batch, length, _ in shapes)
        )
        self._verify()
        mistake = ""
        try:
            self.buckets = self._make_buckets(shapes)
        except Miscompiled as error:
            mistake = str(error)
        if mistake:  # out of the handler, whose error holds the graphs made so far
            vlm._say_once(f"{mistake}, so they are captured as they are")
            gc.collect()
            self.decoder = plain_decoder(self.decoder)
            self.buckets = self._make_buckets(shapes)
        self.pictures: dict[tuple[int, ...], Picture] = {}
        self.choosers: dict[tuple[int, ...], Chooser] = {}
        self.splicers: dict[tuple[int, ...], Splicer] = {}
        self.miscompiled: set[tuple[int, ...]] = set()  # picture shapes that were said when they were compiled
        self.told: set[str] = set()  # stages of which it was said that a shape is outside what was compiled
        if self.tower is not None and vlm.budget_rule == "global":
            for sample in samples:
                for batch in self.batch_sizes:
                    self._fix_picture(sample, batch)
        if self.capture:
            torch.cuda.empty_cache()  # what only the comparisons took

    def _make_buckets(self, shapes: Sequence[tuple[int, int, Cuts | None]]) -> list[Bucket]:
        """Every bucket warmed up, captured and compared; `Miscompiled` where one gives other logits.

        The memory pool of the graphs is made here: when all graphs of a pool are gone, nothing can be captured into it.
        """
        self.pool = torch.cuda.graph_pool_handle() if self.capture else None
        buckets = []
        for batch, length, cuts in shapes:
            bucket = Bucket.build(
                self.decoder,
                self.store,
                batch=batch,
                length=length,
                max_new_tokens=self.max_new_tokens,
                axes=self.axes,
                capture=self.capture,
                cuts=cuts,
            )
            with self._timed("prefill"):
                bucket.prefill.warm_up(self.pool)
            if self.max_new_tokens > 1:  # the first token is prefill's
                with self._timed("decode"):
                    bucket.decode.warm_up(self.pool)
            if self.decoder.compiled:
                with self._timed("verify"):
                    try:
                        self._verify_bucket(bucket)
                    except RuntimeError as error:  # plain layers take more room than compiled ones
                        if not is_out_of_memory(error):
                            raise
                        self.vlm._say_once(f"no room to compare {batch} x {length} compiled columns with plain layers")
            buckets.append(bucket)
        return buckets

    def _bucket_shapes(self, pictures: Sequence[tuple[int, int]]) -> list[tuple[int, int, Cuts | None]]:
        """Rows, columns and cuts of every bucket, the smallest first, for pictures of so many tokens and newlines."""
        method = self.vlm.method
        shapes: dict[tuple[Any, ...], tuple[int, int, Cuts | None]] = {}
        for count, newlines in pictures:
            for budget in self.keeps:
                cuts = cuts_of(method, self.backbone, count, budget.count(count))
                plan = () if cuts is None else tuple(sorted(cuts.left.items()))
                for batch in self.batch_sizes:
                    for text in self.text_buckets:
                        length = self._kept(budget, count) + newlines + text
                        shapes[(batch, length, plan)] = (batch, length, cuts)
        return [shapes[key] for key in sorted(shapes)]

    def _fix_picture(self, sample: Batch, size: int) -> None:
        """Encoder, choice and splice for `size` pictures of the sample's shape."""
        assert self.tower is not None
        several = repeat_batch(sample, size)
        key = (size, *self.tower.key(sample, sample.features))
        if key in self.pictures:
            return
        with self._timed("encode"):
            picture = Picture.build(
                self.tower.fix(sample, self.vlm.method.needs),
                several.features["pixel_values"],
                size,
                self.tower.describe(several),
                capture=self.capture,
            )
            picture.encode.warm_up(self.pool)
        with self._timed("verify"):
            if self.vision_compiler.enabled and not self._encodes_as_the_reference(picture, several):
                self.miscompiled.add(key)
                return
        self.pictures[key] = picture
        for k in sorted({self._kept(budget, picture.num_tokens) for budget in self.keeps}):
            with self._timed("prune"):
                chooser = Chooser.build(picture, k, self._choose(picture, k), capture=self.capture)
                if chooser.prune is not None:
                    chooser.prune.warm_up(self.pool)
            self.choosers[(*key, k)] = chooser
            if picture.tokens.slots is not None:
                continue  # how many newlines stay depends on the choice, so the reference code splices
            with self._timed("splice"):
                for bucket in self.buckets:
                    if bucket.batch == size and bucket.length - k in self.text_buckets and bucket.takes(k):
                        splicer = Splicer.build(
                            picture,
                            chooser,
                            bucket,
                            embed=self.decoder.weights.embed,
                            project=self.backbone.project,
                            packed=self.vlm.positions == "packed",
                            capture=self.capture,
                        )
                        splicer.splice.warm_up(self.pool)
                        self.splicers[(*key, k, *bucket.key)] = splicer

    def _encodes_as_the_reference(self, picture: Picture, batch: Batch) -> bool:
        """Whether the compiled tower gives the stock tower's features; said once where it does not."""
        picture.encode()
        if close(picture.encoded.x, self.vlm.encode(batch).x, limit=MISTAKE):
            return True
        self.vlm._say_once(
            f"torch.compile gives other features for {picture.batch} x {picture.num_tokens} visual tokens than the "
            "encoder without it; such pictures are encoded by the reference code"
        )
        return False

    def _choose(self, picture: Picture, k: int) -> Choose | None:
        """The method's choice as a function of static tensors; None where it needs more, or reads values back."""
        method, tokens = self.vlm.method, picture.tokens
        if k == picture.num_tokens or isinstance(method, LayerPruner):
            return None
        if self.scorer is not None and isinstance(method, ScoringPruner):
            score = self.scorer.fix(tokens)
            if close(score(tokens.x), method.score(tokens), limit=rounding(self.dtype)):
                return choose_by_score(score, k, self.vision_compiler)
        if "text" in method.needs or not method.is_exact:
            return None

        def current() -> VisualTokens:
            return with_needs(self.backbone, Batch(features={}), tokens, method.needs & {"projected"})

        def own_choice(x: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> None:
            if isinstance(method, MergingPruner):
                kept, keep = method.reduce(current(), k).in_raster_order()
            else:
                keep = method.choose(current(), k).keep
                kept = take(x, keep)
            into[0].copy_(keep)
            into[1].copy_(kept)

        choose: Choose = own_choice
        if isinstance(method, ScoringPruner):
            choose = choose_by_score(lambda x: method.score(current()), k, self.vision_compiler)
        alone = depends_on_features_alone(method, current(), k)
        if not alone or (self.capture and not capturable(choose, picture, k, say=self.vlm._say_once)):
            return None
        return choose

    def _samples(self, image_sizes: Sequence[tuple[int, int]] | None) -> list[Batch]:
        """One prompt with one grey picture of each size."""
        if image_sizes is None:
            first, second = (self._sample(size) for size in ((336, 336), (672, 448)))
            if self._num_placeholders(first) != self._num_placeholders(second):
                raise ValueError(
                    f"{self.backbone.family} makes more tokens of a larger picture; name the sizes to compile for: "
                    "compile(image_sizes=[(width, height), ...])"
                )
            return [first]
        return [self._sample(size) for size in image_sizes]

    def _sample(self, size: tuple[int, int]) -> Batch:
        return self.vlm.prepare([[Image.new("RGB", (size[0], size[1]), (128, 128, 128))]], [PROBE])

    def _num_placeholders(self, batch: Batch) -> tuple[int, int]:
        """Visual tokens of a sample's picture, and the newlines that may stay beside those that are kept."""
        placeholders = int((batch.features["input_ids"] == self.backbone.image_token_id).sum())
        if self.backbone.newline is None:
            return placeholders, 0
        visual = int(self.backbone.encode(batch).mask.sum())
        is_pruned = self.vlm.method.name != "full"
        return visual, 0 if is_pruned and self.backbone.keeps_newlines == "none" else placeholders - visual

    def _kept(self, budget: Budget, num_visual: int) -> int:
        """Visual tokens a prompt has left before its first layer."""
        if self.vlm.method.name == "full" or isinstance(self.vlm.method, LayerPruner):
            return num_visual
        return budget.count(num_visual)

    def _verify(self) -> None:
        """Refuse a language model whose own forward gives other logits: what its parts do not show shows here."""
        with self._timed("verify"):
            batch = first_columns(self.backbone.prepare(None, [PROBE], chat=False), self.store.num_columns())
            lm = self.backbone.splice(batch, None, None, None)
            wanted = self.backbone.logits(lm)[:, -1]
            plain = plain_decoder(self.decoder)
            length = lm.input_ids.shape[1]
            cache = self.store.view(1, [length] * self.store.num_layers)
            last = torch.tensor([length - 1], device=self.device)
            found = plain.prefill(lm.inputs_embeds, lm.position_ids, last, cache)
            if self.backbone.two_way(lm) is not None or not close(found, wanted, limit=rounding(self.dtype)):
                raise ValueError(
                    f"the fast path gives other logits than the language model of {self.backbone.family}; "
                    "generate() works without it"
                )

    def _verify_bucket(self, bucket: Bucket) -> None:
        """Refuse compiled layers that give other values than the same functions as they are."""
        generator = torch.Generator(self.device).manual_seed(0)
        scale = self.vlm.base.get_input_embeddings().weight.std()
        try:  # random embeddings fill the bucket to its last column
            bucket.embeds.normal_(generator=generator).mul_(scale)
            bucket.positions.copy_(torch.arange(bucket.length, device=self.device).expand_as(bucket.positions))
            bucket.last.fill_(bucket.length - 1)
            agree = self._same_values(bucket)
        finally:
            for tensor in (bucket.embeds, bucket.positions, bucket.last):
                tensor.zero_()
        if not agree:
            raise Miscompiled(
                f"torch.compile gives other logits for {bucket.batch} x {bucket.length} columns in "
                f"{str(self.dtype).removeprefix('torch.')} than the same layers without it"
            )

    def _same_values(self, bucket: Bucket) -> bool:
        """Whether compiled and plain layers agree on what lies in the bucket.

        Where a method drops tokens between layers, each run of layers is compared by itself: a choice between random
        tokens may turn on a rounding.
        """
        plain = plain_decoder(self.decoder)
        agree = True
        if bucket.cuts is None:
            agree = self._same_logits(bucket, bucket.prefill, bucket.make_prefill(plain))
        else:
            widths = bucket.cuts.widths(bucket.length, len(bucket.cache))
            for layers in bucket.segments():
                entering = bucket.embeds[:, : widths[layers[0]]].contiguous()
                positions = bucket.positions[..., : widths[layers[0]]]
                found, wanted = (
                    torch.add(
                        *decoder.run_layers(entering, torch.zeros_like(entering), positions, bucket.cache, layers)
                    )
                    for decoder in (self.decoder, plain)
                )
                agree = agree and close(found, wanted, limit=MISTAKE)
            bucket.prefill()
        if self.max_new_tokens > 1:
            agree = agree and self._same_logits(bucket, bucket.decode, bucket.make_decode(plain))
        return agree

    def _same_logits(self, bucket: Bucket, compiled: Stage, plain: Callable[[], None]) -> bool:
        """Whether a stage and the plain function give the same logits from the same state."""
        state = (bucket.token, bucket.column, bucket.position)
        before = [tensor.clone() for tensor in state]
        compiled()
        found = bucket.logits.clone()
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)
        plain()
        return close(found, bucket.logits, limit=MISTAKE)

    def _allocated(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.capture else 0

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.capture:
            torch.cuda.synchronize(self.device)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    # ------------------------------------------------------------------------------------- stages

    @torch.inference_mode()
    def prepare(self, batch: Batch, *, keep: int | float | None = None) -> Run:
        """A request with its prompt laid out in the static buffers; `Unfit` where nothing compiled holds it."""
        run = self._begin(batch, keep)
        self._lay_out(run)
        return run

    def _begin(self, batch: Batch, keep: int | float | None) -> Run:
        """What can be decided from the prompt alone: its ids are read back once, before any kernel is waited for."""
        host = {key: batch.features[key].cpu() for key in ON_HOST if key in batch.features}
        ids, mask = host["input_ids"], host["attention_mask"].bool()
        rows = len(ids)
        size = next((size for size in self.batch_sizes if size >= rows), None)
        if size is None:
            raise Unfit(f"the batch is larger than the {self.batch_sizes[-1]} rows compiled for")
        budget = self.vlm.budget_of(keep)
        run = Run(batch=batch, keep=budget.keep, rows=rows, host=host)
        if self.tower is None or batch.row_of_image != tuple(range(rows)):
            return self._plain(run)
        key = (size, *self.tower.key(batch, host))
        picture = self.pictures.get(key)
        visual = (ids == self.backbone.image_token_id) & mask
        if picture is None and self.pictures and key not in self.miscompiled:
            self._tell_size(batch.sizes[0], is_mixed=len(key) == 1)
        if picture is None or not bool((visual.sum(-1) == picture.num_placeholders).all()):
            return self._plain(run)
        run.picture = picture
        k = self._kept(budget, picture.num_tokens)
        run.chooser = self.choosers.get((*key, k))
        text = int((mask & ~visual).sum(-1).max())
        fitting = [
            bucket
            for bucket in self.buckets
            if bucket.batch == size and (*key, k, *bucket.key) in self.splicers and bucket.length >= k + text
        ]
        if isinstance(self.vlm.method, LayerPruner):
            cuts = cuts_of(self.vlm.method, self.backbone, picture.num_tokens, budget.count(picture.num_tokens))
            fitting = [
                bucket for bucket in fitting if bucket.cuts is not None and cuts and bucket.cuts.left == cuts.left
            ]
        if fitting:
            run.found = fitting[0]
            run.splicer = self.splicers[(*key, k, *fitting[0].key)]
            run.num_kept = (k,) * rows
        elif isinstance(self.vlm.method, LayerPruner):
            raise Unfit("the method drops inside the language model, and nothing was compiled for this length and keep")
        elif run.chooser is None:
            self._tell("choice", f"keep={budget.keep}", f"compile(keep=({self.keeps[0].keep}, {budget.keep}))")
        elif picture.tokens.slots is None and any(
            bucket.batch == size and bucket.length >= k + text for bucket in self.buckets
        ):
            self._tell("splice", f"{text} text tokens beside {k} visual ones", f"compile(text_buckets=({text},))")
        return run

    def _tell_size(self, size: tuple[int, int], *, is_mixed: bool) -> None:
        """Say that the reference code encodes pictures like this one."""
        if is_mixed:
            self._tell("encoder", "pictures of several sizes at once", "a batch of one size")
        else:
            self._tell("encoder", f"a picture of {size[0]} x {size[1]}", f"compile(image_sizes=[{size}])")

    def _tell(self, stage: str, shape: str, way_out: str) -> None:
        """Say once for each stage that a shape is outside what was compiled: sizes may be as many as pictures."""
        if stage not in self.told and not isinstance(self.vlm.method, LayerPruner):  # whose whole request is told
            self.told.add(stage)
            self.vlm._say_once(
                f"the fast path has no {stage} for {shape}, so it runs there as without compile(); {way_out} has one"
            )

    def _plain(self, run: Run) -> Run:
        """A request whose stages before the prefill are the reference path's."""
        if isinstance(self.vlm.method, LayerPruner):
            raise Unfit("the method drops inside the language model, and pictures of this kind were not compiled for")
        return run

    def _lay_out(self, run: Run) -> None:
        """The prompt as the splicer takes it, in one copy to the device."""
        if run.splicer is None:
            return
        assert run.picture is not None and run.chooser is not None
        bucket, staging = run.bucket, run.splicer.staging
        tokens, k, length = run.picture.num_tokens, run.chooser.keep.shape[1], bucket.length
        positions = self.backbone.positions(replace(run.batch, features=run.host))
        positions = positions if positions.ndim == 3 else positions[None]  # [R, B, T]
        axes = len(positions)
        staging.zero_()
        if bucket.cuts is not None:
            staging[run.rows :, -1] = bucket.cuts.num_visual  # unused rows drop visual tokens before their last too
        staging[:, :length] = self.backbone.pad_id
        for row in range(run.rows):
            real = run.ids[row][run.mask[row]]
            where = positions[:, row, run.mask[row]]  # [R, T]
            visual = (real == self.backbone.image_token_id).nonzero()[:, 0]
            first = int(visual[0])
            if int(visual[-1]) - first + 1 != tokens:
                raise Unfit("the placeholders of a picture do not stand side by side")
            stays = torch.ones(len(real), dtype=torch.bool)
            stays[first + k : first + tokens] = False
            width = int(stays.sum())
            places = staging[row, length : length + axes * length].view(axes, length)
            staging[row, :width] = real[stays]
            if self.vlm.positions == "packed":
                places[:, :width] = torch.arange(width)
            else:
                places[:, :width] = where[:, stays]
            staging[row, length * (axes + 1) : -2] = where[:, first : first + tokens].flatten()
            staging[row, -2], staging[row, -1] = first, width - 1
        run.splicer.layout.copy_(staging, non_blocking=True)

    @torch.inference_mode()
    def encode(self, run: Run) -> None:
        """The vision tower."""
        run.steps = 0
        if run.picture is None:
            run.tokens = self.vlm.encode(run.batch)
            return
        pixels = run.batch.features["pixel_values"]
        run.picture.pixels[: len(pixels)].copy_(pixels, non_blocking=True)
        run.picture.encode()
        run.tokens = run.picture.tokens

    @torch.inference_mode()
    def prune(self, run: Run) -> None:
        """The method's choice."""
        if run.tokens is None:
            return
        method, chooser, tokens = self.vlm.method, run.chooser, run.tokens
        if chooser is not None and run.splicer is not None:
            assert run.picture is not None
            if chooser.keep.shape[1] == run.picture.num_tokens:
                chooser.kept.copy_(run.picture.encoded.x)
                return
            if chooser.prune is not None:
                chooser.prune()
                return
        if run.picture is not None:
            rows = tokens if run.rows == len(tokens) else tokens.take(range(run.rows))
            if chooser is not None and chooser.prune is not None and tokens.slots is not None:
                chooser.prune()
                run.tokens, run.chosen, run.merged = rows, chooser.keep[: run.rows], chooser.kept[: run.rows]
                return
            tokens = with_needs(self.backbone, run.batch, replace(rows, seeds=run.batch.seeds), method.needs)
            run.tokens = tokens
        budget = self.vlm.budget_of(run.keep)
        counts = budget.counts(tokens.mask) if run.picture is None else budget.count(run.picture.num_tokens)
        if isinstance(method, MergingPruner):
            run.merged, run.chosen = self.vlm.rule.deploy(tokens, counts)
        else:
            run.chosen = self.vlm.rule.choose(tokens, counts).keep
        assert run.chosen is not None
        if chooser is None or run.splicer is None:
            run.chooser = None
            return
        if run.chosen.shape[1] != chooser.keep.shape[1] or bool((run.chosen < 0).any()):
            run.chooser = run.splicer = None  # fewer or more than K: spliced as the reference path does
            return
        chooser.keep[: run.rows].copy_(run.chosen)
        chooser.kept[: run.rows].copy_(take(tokens.x, run.chosen) if run.merged is None else run.merged)

    @torch.inference_mode()
    def splice(self, run: Run) -> None:
        """Kept tokens through the projector and between the words, into the bucket's buffers."""
        if run.splicer is not None:
            run.splicer.splice()
            return
        vlm = self.vlm
        if run.tokens is None:
            lm = vlm.lm_inputs(run.batch, None)
        else:
            assert run.chosen is not None
            x = take_tokens(run.tokens.x, run.chosen) if run.merged is None else run.merged
            visual = self.backbone.project(x)
            lm = self.backbone.splice(run.batch, run.tokens, visual, run.chosen, positions=vlm.positions)
        self._fill(run, lm)

    def _fill(self, run: Run, lm: LMInputs) -> None:
        """Inputs of the reference path, padded on the right instead of the left, into the smallest bucket."""
        if self.backbone.layer_additions(lm):
            raise Unfit(f"{self.backbone.family} adds features between decoder layers")
        order, valid = real_first(lm.attention_mask.bool())
        rows, width = order.shape
        size = next(size for size in self.batch_sizes if size >= rows)
        fitting = [bucket for bucket in self.buckets if bucket.batch == size and bucket.length >= width]
        if not fitting:
            longest = max(bucket.length for bucket in self.buckets if bucket.batch == size)
            raise Unfit(f"the prompt is longer than the {longest} columns compiled for")
        bucket = min(fitting, key=lambda bucket: bucket.length)
        bucket.embeds[:rows, :width].copy_(
            lm.inputs_embeds.gather(1, order[..., None].expand(-1, -1, lm.inputs_embeds.shape[-1]))
        )
        bucket.positions[..., :rows, :width].copy_(
            lm.position_ids.gather(-1, order.expand(*lm.position_ids.shape[:-2], *order.shape))
        )
        bucket.last[:rows].copy_(valid.sum(-1) - 1)
        run.found = bucket
        run.num_kept = tuple(lm.visual.sum(-1).tolist())

    @torch.inference_mode()
    def prefill(self, run: Run) -> None:
        """The language model over the prompt, and the first token."""
        run.bucket.prefill()
        run.steps = 1

    @torch.inference_mode()
    def decode(self, run: Run) -> None:
        """One more token."""
        if run.steps >= self.max_new_tokens:
            raise ValueError(f"the cache was made for max_new_tokens={self.max_new_tokens}; compile with more")
        run.bucket.decode()
        run.steps += 1

    # ------------------------------------------------------------------------------------- whole requests

    @torch.inference_mode()
    def start(self, batch: Batch, *, keep: int | float | None = None) -> Run:
        """Everything up to the first token; the prompt is laid out while the encoder runs."""
        run = self._begin(batch, keep)
        self.encode(run)
        self._lay_out(run)
        self.prune(run)
        self.splice(run)
        self.prefill(run)
        return run

    @torch.inference_mode()
    def ttft(self, batch: Batch, *, keep: int | float | None = None) -> Int[Tensor, " B"]:
        """The first token of each prompt, on the host."""
        return self.start(batch, keep=keep).token.cpu()

    @torch.inference_mode()
    def generate(
        self,
        batch: Batch,
        *,
        max_new_tokens: int,
        keep: int | float | None = None,
        ends: Sequence[int] = (),
        pad_id: int | None = None,
    ) -> Int[Tensor, "B T"]:
        """New tokens by greedy decoding, on the model's device.

        The next step is launched before the last token is looked at, so the device never waits for the host; a step
        past the end is thrown away.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} leaves nothing to say; give 1 or more")
        if max_new_tokens > self.max_new_tokens:
            raise Unfit(f"the answer may be longer than the {self.max_new_tokens} tokens compiled for")
        run = self.start(batch, keep=keep)
        host = torch.zeros(max_new_tokens, run.rows, dtype=torch.int64, pin_memory=self.capture)
        events = [torch.cuda.Event() for _ in range(max_new_tokens)] if self.capture else []
        done = torch.zeros(run.rows, dtype=torch.bool)
        end_ids = torch.tensor(list(ends), dtype=torch.int64)
        pad = self.backbone.pad_id if pad_id is None else pad_id
        new: list[Tensor] = []

        def fetch(step: int) -> None:
            host[step].copy_(run.token, non_blocking=True)
            if events:
                events[step].record()

        fetch(0)
        for step in range(max_new_tokens):
            ahead = step + 1 < max_new_tokens
            if self.capture and ahead:
                self.decode(run)
                fetch(step + 1)
            if events:
                events[step].synchronize()
            token = torch.where(done, pad, host[step])
            new.append(token)
            done = done | torch.isin(token, end_ids)
            if bool(done.all()):
                break
            if not self.capture and ahead:
                self.decode(run)
                fetch(step + 1)
        return torch.stack(new, dim=1).to(self.device)

    def answer(self, batch: Batch, *, keep: int | float | None = None, **kwargs: Any) -> Int[Tensor, "B T"] | None:
        """New tokens as `PrunedVLM.generate` wants them; None, said once, where the reference path must answer."""
        try:
            settings = greedy_settings(self.vlm.base.generation_config, kwargs)
            return self.generate(batch, keep=keep, **settings)
        except Unfit as reason:
            self.vlm._say_once(f"the fast path cannot answer here: {reason}; such requests run as without compile()")
            return None

    def captured(self, run: Run) -> dict[str, bool]:
        """Which stages of this request are one CUDA graph."""
        prune = None if run.chooser is None else run.chooser.prune
        stages = {
            "encode": None if run.picture is None else run.picture.encode,
            "prune": prune,
            "splice": None if run.splicer is None else run.splicer.splice,
            "prefill": None if run.found is None else run.found.prefill,
            "decode": None if run.found is None else run.found.decode,
        }
        return {name: stage is not None and stage.graph is not None for name, stage in stages.items()}

    def kv_bytes(self, batch: int, length: int) -> int:
        """Bytes of the static cache of the bucket of that size, room for `max_new_tokens` included."""
        columns = next((b.columns for b in self.buckets if (b.batch, b.length) == (batch, length)), None)
        if columns is None:
            known = ", ".join(f"{b.batch} x {b.length}" for b in self.buckets)
            raise ValueError(f"there is no bucket of {batch} x {length}; there are {known}")
        return self.store.num_bytes(batch, columns)


# What in a generation config leaves greedy decoding as it is; None everywhere means not set.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "stop_strings": (),
    "max_time": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "prompt_lookup_num_tokens": (),
    "constraints": (),
    "force_words_ids": (),
}
WITHOUT_EFFECT = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "use_cache"})  # on a greedy choice
TAKEN = frozenset({"max_new_tokens", "eos_token_id", "pad_token_id"})


def greedy_settings(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `FastPath.generate` for those of the model's own; `Unfit` where it is more than greedy."""
    for name in sorted(kwargs.keys() - NEUTRAL.keys() - WITHOUT_EFFECT - TAKEN):
        raise Unfit(f"{name} is not for it")
    for name, neutral in NEUTRAL.items():
        value = kwargs.get(name, getattr(config, name, None))
        if value is not None and value not in neutral:
            raise Unfit(f"{name}={value} asks for more than the likeliest next token")
    if kwargs.get("max_new_tokens") is None:
        raise Unfit("max_new_tokens is not given")
    ends = kwargs.get("eos_token_id", config.eos_token_id)
    return {
        "max_new_tokens": kwargs["max_new_tokens"],
        "ends": [] if ends is None else [ends] if isinstance(ends, int) else list(ends),
        "pad_id": kwargs.get("pad_token_id"),
    }


def compile_vlm(vlm: Any, **options: Any) -> FastPath:
    """The fast path of a `PrunedVLM`, put into `vlm.fast`."""
    if vlm.fast is not None:
        raise ValueError("this model is compiled already; set vlm.fast = None first to compile for other sizes")
    known = [name for name in inspect.signature(FastPath).parameters if name != "vlm"]
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"compile() has no option {name!r}; it takes {', '.join(known)}")
        if name in LISTS and not isinstance(value, ALONE.get(name, ())):
            check_list(name, value)
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


# Methods inside the language model whose ranking is one attention row: what they rank by.
RANKED_INSIDE: dict[type, Callable[[LayerState], Tensor]] = {
    FastV: lambda state: state.last_attention(),
    PyramidDrop: lambda state: state.last_attention(state.layer),
}


def cuts_of(method: Any, backbone: Backbone, num_visual: int, keep: int) -> Cuts | None:
    """Where the method drops tokens of a prompt with so many; None for a method before the language model."""
    if not isinstance(method, LayerPruner):
        return None
    score = RANKED_INSIDE.get(type(method))
    if score is None or method.positions != "original":
        known = ", ".join(kind.__name__ for kind in RANKED_INSIDE)
        raise ValueError(
            f"the fast path cannot run {method.name!r} as it is set: of the methods inside the language model it knows "
            f"{known} with original positions; generate() works without it"
        )
    if backbone.newline is not None:
        raise ValueError(
            f"the fast path cannot run {method.name!r} on {backbone.family}, whose visual tokens have newlines between "
            "them; generate() works without it"
        )
    left = method.stages(len(backbone.language_model.layers), num_visual, keep)
    return Cuts(num_visual=num_visual, left=left, score=score, language_model=backbone.language_model)


# Options of compile() that are lists, and how each is written.
LISTS = {
    "keep": "keep=64 or keep=(64, 128)",
    "batch_sizes": "batch_sizes=(1, 8)",
    "text_buckets": "text_buckets=(64, 128)",
    "image_sizes": "image_sizes=[(336, 336)], each (width, height)",
}
ALONE: dict[str, tuple[type, ...]] = {"keep": (NoneType, Real), "image_sizes": (NoneType,)}  # what need be no list


def check_list(name: str, value: object) -> None:
    """A sentence about an option's value that is no list, an empty one, or holds what is no size."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name}={value!r} is no list; write it as {LISTS[name]}")
    if not value:
        raise ValueError(f"{name}={value!r} names nothing; give at least one, as in {LISTS[name]}")
    for item in value:
        if name in ("batch_sizes", "text_buckets"):
            positive(name, item)
        is_pair = isinstance(item, Sequence) and len(item) == 2 and all(isinstance(side, int) for side in item)
        if name == "image_sizes" and not (is_pair and min(item) > 0):
            raise ValueError(f"{name}={value!r} holds {item!r}, which is no size; write it as {LISTS[name]}")


def positive(name: str, value: object) -> int:
    """The value, or a sentence about it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} holds {value!r}; give whole numbers of at least 1")
    return value


def plain_decoder(decoder: Decoder) -> Decoder:
    """The same functions over the same weights, as they are."""
    return Decoder(decoder.weights, lambda function: function)


def rounding(dtype: torch.dtype) -> float:
    """How far the same sums in another order may be apart in that precision, relative to their deviation."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def close(found: Tensor, wanted: Tensor, *, limit: float) -> bool:
    """Whether the root mean square of the difference is at most that share of what is wanted's deviation."""
    difference = (found.float() - wanted.float()).square().mean().sqrt()
    return bool(difference <= limit * wanted.float().std().clamp_min(1e-6))


def depends_on_features_alone(method: Pruner, tokens: VisualTokens, k: int) -> bool:
    """Whether other pixels with the same features would be treated the same; by a random choice they would not."""
    size = len(tokens)
    one, other = (replace(tokens, seeds=tuple(range(start, start + size))) for start in (1, 1 + size))
    first, second = method.select(one, k), method.select(other, k)
    return first.shape == (size, k) and torch.equal(first, second)


def capturable(choose: Choose, picture: Picture, k: int, *, say: Callable[[str], None]) -> bool:
    """Whether the choice can be captured: some methods read values back, which a graph cannot.

    `say` is told why where a choice that waits for nothing cannot be captured either.
    """
    x = picture.encoded.x
    keep = torch.zeros(len(x), k, dtype=torch.int64, device=x.device)
    into = (
        keep,
        torch.empty(len(x), k, x.shape[-1], dtype=x.dtype, device=x.device),
        torch.zeros_like(x[..., 0]).float(),
    )
    choose(x, into)  # compiles, which may wait
    if waits_for_device(lambda: choose(x, into)):
        return False
    try:
        with capturing():
            choose(x, into)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        say(f"the choice of tokens cannot be a CUDA graph and runs as without compile(): {reason}")
        return False
    return True


def first_columns(batch: Batch, count: int) -> Batch:
    """The beginning of each prompt; nothing else of the batch is cut."""
    shape = batch.features["input_ids"].shape
    features = {key: value[:, :count] if value.shape == shape else value for key, value in batch.features.items()}
    return replace(batch, features=features)


def repeat_batch(batch: Batch, times: int) -> Batch:
    """The same prompt and picture several times."""
    features = {
        key: value.repeat(times, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) else value
        for key, value in batch.features.items()
    }
    return Batch(
        features=features,
        row_of_image=tuple(range(times)),
        sizes=batch.sizes * times,
        seeds=batch.seeds * times,
    )
