"""Building a fast path: weights, buckets, and for every picture shape the encoder, the choice and the splice."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from PIL import Image

from diffprune.backbones.base import Backbone
from diffprune.backbones.prompts import Batch
from diffprune.fast import verify
from diffprune.fast.buckets import Bucket, CacheStore, num_columns
from diffprune.fast.cuts import Cuts, count_before_layers, cuts_of
from diffprune.fast.decoder import Decoder, Unsupported, in_eight_bits, read_decoder
from diffprune.fast.graphs import Compiler, frozen_heap, is_out_of_memory, on_device
from diffprune.fast.newlines import NewlineSplicer
from diffprune.fast.options import CompileOptions, CompileReport
from diffprune.fast.pictures import Chooser, Picture, Splicer, repeat_batch
from diffprune.fast.precision import why_not_eight_bits
from diffprune.fast.static_choice import static_choice
from diffprune.fast.towers import BlockParts, Tower, tower_class
from diffprune.fast.vision import Blocks, FastScorer
from diffprune.nn.scorer import Scorer


class Builder:
    """The parts of one `FastPath`; `build` makes them and reports on it."""

    def __init__(self, vlm: Any, options: CompileOptions) -> None:
        if options.share is not None and options.share.vlm.base is not vlm.base:
            raise ValueError("share is the fast path of another base model; share among methods around one model")
        if options.share is not None and (changed := options.share.seal.base.changed()):
            raise ValueError(f"share cannot be used: {changed} after it was compiled; compile() its model again first")
        self.vlm, self.options = vlm, options
        self.backbone: Backbone = vlm.backbone
        self.batch_sizes, self.text_buckets = sorted(set(options.batch_sizes)), sorted(set(options.text_buckets))
        keep = vlm.budget.keep if options.keep is None else options.keep
        self.keeps = [vlm.budget_of(value) for value in ([keep] if isinstance(keep, int | float) else keep)]
        self.device, self.dtype = vlm.base.get_input_embeddings().weight.device, vlm.base.dtype
        self.capture = self.device.type == "cuda"
        compiles = self.capture and options.compile_layers
        self.compiler = Compiler(compiles)
        self.vision_compiler = Compiler(compiles, autotune=options.autotune)
        self.precision, self.logit_error = options.precision, None
        if self.precision == "fp8" and (reason := why_not_eight_bits(self.device)):
            vlm._say_once(f"precision='fp8' is left out, and the model's own is used: {reason}")
            self.precision = "model"
        share = options.share
        self.is_shared = share is not None and share.precision == self.precision  # decoder and all
        self.seconds: dict[str, float] = {}
        self.pictures: dict[tuple[int, ...], Picture] = {}
        self.choosers: dict[tuple[int, ...], Chooser] = {}
        self.splicers: dict[tuple[int, ...], Splicer | NewlineSplicer] = {}
        self.miscompiled: set[tuple[int, ...]] = set()  # picture shapes that were reported when they were compiled

    def build(self) -> CompileReport:
        """Make every part; a `ValueError` says what the fast path cannot run."""
        if self.capture:
            torch.cuda.empty_cache()
        before = self.allocated()
        with self.making():
            self.read_weights()
            samples = self.samples()
            shapes = self.bucket_shapes(sorted({self.num_visual(sample) for sample in samples}))
            self.axes = tuple(self.backbone.positions(samples[0]).shape[:-2])
            self.store.reserve(
                max(
                    self.store.numel(batch, num_columns(length, self.options.max_new_tokens))
                    for batch, length, _ in shapes
                )
            )
            with self.timed("verify"):
                if not self.is_shared or self.precision == "model":
                    verify.check_language_model(self.backbone, self.decoder, self.store)
            if self.precision == "fp8":
                self.use_eight_bits()
            self.buckets = self.make_buckets_that_agree(shapes)
            if self.tower is not None and self.vlm.budget_rule == "global":
                for sample in samples:
                    for batch in self.batch_sizes:
                        self.fix_picture(self.tower, sample, batch)
            if self.capture:
                torch.cuda.empty_cache()  # what only the comparisons took
        shared = () if self.is_shared else (self.decoder.weights, None if self.options.share else self.tower)
        extra = {
            "weights": sum(part.own_bytes for part in (*shared, self.scorer) if part is not None),
            "cache": sum(keys.nbytes + values.nbytes for keys, values in self.store.flat),
        }
        if self.capture:
            extra["allocator"] = self.allocated() - before
        return CompileReport(
            seconds=self.seconds,
            extra_bytes=extra,
            buckets=tuple((bucket.batch, bucket.length) for bucket in self.buckets),
            captured=self.capture,
            precision="fp8" if self.precision == "fp8" else str(self.dtype).removeprefix("torch."),
            logit_error=self.logit_error,
        )

    def use_eight_bits(self) -> None:
        """The decoder's maps in 8 bits, after it was compared as it is, and how far its logits are off then."""
        if self.is_shared:
            self.logit_error = self.options.share.report.logit_error
            return
        with self.timed("weights"):
            before, self.decoder = self.decoder, Decoder(in_eight_bits(self.decoder.weights), self.compiler)
            self.logit_error = verify.logit_error(self.backbone, self.decoder, before, self.store)
        if not self.logit_error <= (most := self.options.max_logit_error):  # NaN too
            reason = f"logits are off by {self.logit_error:.2g}, more than max_logit_error={most:g}"
            self.vlm._say_once(f"precision='fp8' is left out, and the model's own is used: {reason}")
            self.decoder, self.precision, self.logit_error = before, "model", None

    @contextmanager
    def making(self) -> Iterator[None]:
        """Where parts are made: their tensors serve requests of any mode, and every shape may be compiled."""
        heap = frozen_heap() if self.capture else nullcontext()
        own_precision = torch.autocast(self.device.type, enabled=False)
        compiles = self.compiler.unlimited_recompiles()
        with torch.inference_mode(False), torch.no_grad(), on_device(self.device), own_precision, compiles, heap:
            yield

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of what is inside to those of the part."""
        start = time.perf_counter()
        yield
        if self.capture:
            torch.cuda.synchronize(self.device)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def allocated(self) -> int:
        """Bytes that the allocator holds on a GPU."""
        return torch.cuda.memory_reserved(self.device) if self.capture else 0

    # ------------------------------------------------------------------------------------- weights

    def read_weights(self) -> None:
        """Decoder, tower and scorer as functions over their weights, and the cache without its memory."""
        fuse, share = self.options.fuse, self.options.share
        with self.timed("weights"):
            if not self.is_shared:
                try:
                    weights = read_decoder(self.vlm.base, self.backbone.language_model, fuse=fuse)
                except (Unsupported, AttributeError) as error:
                    raise ValueError(
                        f"the fast path does not know the language model of {self.backbone.family} ({error}); "
                        "generate() works without it"
                    ) from error
                self.decoder = Decoder(weights, self.compiler)
                self.tower = self.read_tower() if share is None else share.tower
            else:
                self.decoder, self.tower = share.decoder, share.tower
            self.store = CacheStore(self.decoder, self.device, self.dtype)
            self.scorer = self.read_scorer()

    def read_tower(self) -> Tower | None:
        """The tower as functions; None where the family names none, or has parts that are not known."""
        make = tower_class(self.backbone)
        try:
            return None if make is None else make(self.backbone, self.make_blocks)
        except Unsupported as error:
            self.vlm._say_once(
                f"the fast path does not know the vision tower of {self.backbone.family} ({error}); pictures are "
                "encoded by the reference code"
            )
            return None

    def read_scorer(self) -> FastScorer | None:
        """The method's scorer as functions; None where it has none, or another than towers are made like."""
        scorer = getattr(self.vlm.method, "scorer", None)
        if not isinstance(scorer, Scorer) or scorer.spec.qk_norm or self.tower is None:
            return None
        return FastScorer(scorer, self.make_blocks, self.dtype, self.vision_compiler)

    def make_blocks(self, parts: Sequence[BlockParts], heads: int) -> Blocks:
        """A stack of vision blocks in the base model's precision."""
        return Blocks(parts, heads, self.dtype, self.vision_compiler, fuse=self.options.fuse)

    # ------------------------------------------------------------------------------------- sizes

    def samples(self) -> list[Batch]:
        """One prompt with one grey picture of each size."""
        if self.options.image_sizes is not None:
            return [self.sample(size) for size in self.options.image_sizes]
        first, second = (self.sample(size) for size in ((336, 336), (672, 448)))
        if self.num_visual(first) != self.num_visual(second):
            raise ValueError(
                f"{self.backbone.family} makes more tokens of a larger picture; name the sizes to compile for: "
                "compile(image_sizes=[(width, height), ...])"
            )
        return [first]

    def sample(self, size: tuple[int, int]) -> Batch:
        return self.vlm.prepare([[Image.new("RGB", (size[0], size[1]), (128, 128, 128))]], [verify.PROBE])

    def num_visual(self, batch: Batch) -> tuple[int, int]:
        """Visual tokens of a sample's picture, and the newlines that may stay beside those that are kept."""
        placeholders = int((batch.features["input_ids"] == self.backbone.image_token_id).sum())
        if self.backbone.newline is None:
            return placeholders, 0
        visual = int(self.backbone.encode(batch).mask.sum())
        return visual, self.most_newlines(placeholders, visual)

    def most_newlines(self, placeholders: int, visual: int) -> int:
        """Newlines of a picture that may stay, of its placeholders those that carry no content."""
        is_pruned = self.vlm.method.name != "full"
        return 0 if is_pruned and self.backbone.keeps_newlines == "none" else placeholders - visual

    def bucket_shapes(self, pictures: Sequence[tuple[int, int]]) -> list[tuple[int, int, Cuts | None]]:
        """Rows, columns and cuts of every bucket, the smallest first, for pictures of so many tokens and newlines."""
        method = self.vlm.method
        shapes: dict[tuple[Any, ...], tuple[int, int, Cuts | None]] = {}
        for count, newlines in pictures:
            for budget in self.keeps:
                cuts = cuts_of(method, self.backbone, count, budget.count(count))
                plan = () if cuts is None else tuple(sorted(cuts.left.items()))
                for batch in self.batch_sizes:
                    for text in self.text_buckets:
                        length = count_before_layers(method, budget, count) + newlines + text
                        shapes[(batch, length, plan)] = (batch, length, cuts)
        return [shapes[key] for key in sorted(shapes)]

    # ------------------------------------------------------------------------------------- buckets

    def make_buckets_that_agree(self, shapes: Sequence[tuple[int, int, Cuts | None]]) -> list[Bucket]:
        """Buckets of compiled layers, or of plain ones where a compiled bucket gives other logits."""
        try:
            return self.make_buckets(shapes)
        except verify.Miscompiled as error:
            mistake, can_compile = f"{error}, so they are captured as they are", True
        except Exception as error:  # of the compiler, the C compiler it calls, or a folder that it cannot write to
            if is_out_of_memory(error) or not self.decoder.compiled:
                raise
            reason = str(error).partition("\n")[0]
            mistake, can_compile = (
                f"torch.compile cannot be used here ({reason}); layers are captured as they are",
                False,
            )
        # Out of the handler, whose error holds the graphs made so far.
        self.vlm._say_once(mistake)
        gc.collect()
        self.decoder = verify.plain_decoder(self.decoder)
        if not can_compile:
            self.compiler.enabled = self.vision_compiler.enabled = False
            self.tower = self.read_tower()
            self.scorer = self.read_scorer()
        return self.make_buckets(shapes)

    def make_buckets(self, shapes: Sequence[tuple[int, int, Cuts | None]]) -> list[Bucket]:
        """Every bucket warmed up, captured and compared; `Miscompiled` where one gives other logits.

        The memory pool of the graphs is made here: when all graphs of a pool are gone, nothing can be captured into it.
        """
        self.pool = torch.cuda.graph_pool_handle() if self.capture else None
        return [self.make_bucket(*shape, self.store) for shape in shapes]

    def make_bucket(self, batch: int, length: int, cuts: Cuts | None, store: CacheStore) -> Bucket:
        """One bucket over that memory, warmed up, captured and compared."""
        max_new_tokens = self.options.max_new_tokens
        bucket = Bucket.build(
            self.decoder,
            store,
            batch=batch,
            length=length,
            max_new_tokens=max_new_tokens,
            axes=self.axes,
            capture=self.capture,
            cuts=cuts,
        )
        with self.timed("prefill"):
            bucket.prefill.warm_up(self.pool)
        decodes = max_new_tokens > 1  # the first token is prefill's
        if decodes:
            with self.timed("decode"):
                bucket.decode.warm_up(self.pool)
        if self.decoder.compiled:
            with self.timed("verify"):
                try:
                    scale = self.vlm.base.get_input_embeddings().weight.std()
                    verify.check_bucket(bucket, self.decoder, scale=scale, decodes=decodes)
                except RuntimeError as error:  # plain layers take more room than compiled ones
                    if not is_out_of_memory(error):
                        raise
                    self.vlm._say_once(f"no room to compare {batch} x {length} compiled columns with plain layers")
        return bucket

    def add_bucket(self, batch: int, length: int, cuts: Cuts | None) -> None:
        """One more bucket, with a cache of its own where that of the others is too small."""
        store, most = self.store, self.store.numel(batch, num_columns(length, self.options.max_new_tokens))
        if most > len(store.flat[0][0]):
            store = CacheStore(self.decoder, self.device, self.dtype)
            store.reserve(most)
        self.buckets.append(self.make_bucket(batch, length, cuts, store))
        self.buckets.sort(key=lambda bucket: bucket.key)

    # ------------------------------------------------------------------------------------- pictures

    def fix_picture(self, tower: Tower, sample: Batch, size: int) -> None:
        """Encoder, choice and splice for `size` pictures of the sample's shape."""
        key = (size, *tower.key(sample, sample.features))
        if key in self.pictures:
            return
        self.add_picture(tower, sample, key)
        if key in self.miscompiled:
            return
        tokens = self.pictures[key].num_tokens
        for k in sorted({count_before_layers(self.vlm.method, each, tokens) for each in self.keeps}):
            self.add_chooser(key, k)
            for bucket in self.buckets:
                fits = bucket.length - k - self.newlines_of(key) in self.text_buckets
                if bucket.batch == size and fits and bucket.takes(k):
                    self.add_splicer(key, k, bucket)

    def add_picture(self, tower: Tower, sample: Batch, key: tuple[int, ...]) -> None:
        """The encoder of `key[0]` pictures like the sample's; noted as miscompiled where it gives other features."""
        several = repeat_batch(sample, key[0])
        with self.timed("encode"):
            picture = Picture.build(
                tower.fix(sample, self.vlm.method.needs),
                several.features["pixel_values"],
                key[0],
                tower.describe(several),
                capture=self.capture,
            )
            picture.encode.warm_up(self.pool)
        with self.timed("verify"):
            if not self.encodes_as_the_reference(picture, several):
                self.miscompiled.add(key)
                return
        self.pictures[key] = picture

    def add_chooser(self, key: tuple[int, ...], k: int) -> None:
        """The choice of k tokens of each of those pictures."""
        picture = self.pictures[key]
        with self.timed("prune"):
            choose = static_choice(self.vlm, picture.tokens, k, scorer=self.scorer, compiler=self.vision_compiler)
            chooser = Chooser.build(picture, k, choose, capture=self.capture)
            if chooser.prune is not None:
                chooser.prune.warm_up(self.pool)
        self.choosers[(*key, k)] = chooser

    def newlines_of(self, key: tuple[int, ...]) -> int:
        """Newlines of one of those pictures that may stay."""
        return self.most_newlines(self.pictures[key].num_placeholders, self.pictures[key].num_tokens)

    def add_splicer(self, key: tuple[int, ...], k: int, bucket: Bucket) -> None:
        """The splice of k tokens of each of those pictures into the bucket."""
        with self.timed("splice"):
            splicer = self.make_splicer(self.pictures[key], self.choosers[(*key, k)], bucket, self.newlines_of(key))
            splicer.splice.warm_up(self.pool)
        self.splicers[(*key, k, *bucket.key)] = splicer

    def make_splicer(
        self, picture: Picture, chooser: Chooser, bucket: Bucket, newlines: int
    ) -> Splicer | NewlineSplicer:
        """What puts chosen tokens, and up to so many newlines, into the bucket."""
        embed, packed = self.decoder.weights.embed, self.vlm.positions == "packed"
        common: dict[str, Any] = {"embed": embed, "packed": packed, "capture": self.capture}
        if picture.tokens.slots is None:
            return Splicer.build(picture, chooser, bucket, project=self.backbone.project, **common)
        return NewlineSplicer.build(picture, chooser, bucket, backbone=self.backbone, num_newlines=newlines, **common)

    def encodes_as_the_reference(self, picture: Picture, batch: Batch) -> bool:
        """Whether the tower as functions gives the stock tower's features; reported once where it does not."""
        # Of a grey picture all patches and tiles are alike, and no mistake would show.
        noisy = verify.noisy_pixels(batch)
        picture.pixels.copy_(noisy.features["pixel_values"])
        picture.encode()
        if verify.close(picture.encoded.x, self.vlm.encode(noisy).x, limit=verify.MISTAKE):
            return True
        maker = "torch.compile" if self.vision_compiler.enabled else "the fast path"
        self.vlm._say_once(
            f"{maker} gives other features for {picture.batch} x {picture.num_tokens} visual tokens than the "
            "encoder without it; such pictures are encoded by the reference code"
        )
        return False
