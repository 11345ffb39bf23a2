"""What was compiled against what it was made of, and whether a choice of tokens can be compiled at all."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.backbones.base import Backbone
from diffprune.backbones.prompts import Batch
from diffprune.fast.buckets import Bucket, CacheStore
from diffprune.fast.choice import Choose
from diffprune.fast.decoder import Decoder
from diffprune.fast.graphs import Stage, capturing, is_out_of_memory, waits_for_device
from diffprune.methods.base import Pruner
from diffprune.types import LMInputs, VisualTokens

PROBE = "What does the sign say?"

# Compiled against plain: convolutions in float32 may run in TF32, so less than in `rounding` is asked; what a compiler
# gets wrong is off by whole deviations.
MISTAKE = 5e-2


class Miscompiled(RuntimeError):
    """Compiled layers that give other values than the functions they were made of."""


def plain_decoder(decoder: Decoder) -> Decoder:
    """The decoder's functions over its weights, not compiled."""
    return Decoder(decoder.weights, lambda function: function)


def rounding(dtype: torch.dtype) -> float:
    """How far the same sums in another order may be apart in that precision, relative to their deviation."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def close(found: Tensor, wanted: Tensor, *, limit: float) -> bool:
    """Whether the root mean square of the difference is at most that share of what is wanted's deviation."""
    difference = (found.float() - wanted.float()).square().mean().sqrt()
    return bool(difference <= limit * wanted.float().std().clamp_min(1e-6))


# The language model --------------------------------------------------------------------------------------------------


def check_language_model(backbone: Backbone, decoder: Decoder, store: CacheStore) -> None:
    """Refuse a language model whose own forward gives other logits: what its parts do not show shows here."""
    lm, found = probe_logits(backbone, decoder, store)
    wanted = backbone.logits(lm)[:, -1]
    if backbone.two_way(lm) is not None or not close(found, wanted, limit=rounding(store.dtype)):
        raise ValueError(
            f"the fast path gives other logits than the language model of {backbone.family}; "
            "generate() works without it"
        )


def probe_logits(backbone: Backbone, decoder: Decoder, store: CacheStore) -> tuple[LMInputs, Float[Tensor, "1 V"]]:
    """A short prompt of text alone, and the logits after it."""
    batch = first_columns(backbone.prepare(None, [PROBE], chat=False), store.num_columns())
    lm = backbone.splice(batch, None, None, None)
    length = lm.input_ids.shape[1]
    cache = store.view(1, [length] * store.num_layers)
    last = torch.tensor([length - 1], device=store.device)
    return lm, plain_decoder(decoder).prefill(lm.inputs_embeds, lm.position_ids, last, cache)


def logit_error(backbone: Backbone, decoder: Decoder, exact: Decoder, store: CacheStore) -> float:
    """How far a decoder's logits after a short prompt are from another's, relative to these."""
    found, wanted = (probe_logits(backbone, each, store)[1].float() for each in (decoder, exact))
    return float((found - wanted).norm() / wanted.norm())


def first_columns(batch: Batch, count: int) -> Batch:
    """The beginning of each prompt; nothing else of the batch is cut."""
    shape = batch.features["input_ids"].shape
    features = {key: value[:, :count] if value.shape == shape else value for key, value in batch.features.items()}
    return replace(batch, features=features)


def check_bucket(bucket: Bucket, decoder: Decoder, *, scale: Tensor, decodes: bool) -> None:
    """Refuse compiled layers that give other values than the functions they were made of.

    Args:
        scale: Deviation of the model's embeddings.
        decodes: The bucket has decode steps.
    """
    device = bucket.embeds.device
    generator = torch.Generator(device).manual_seed(0)
    try:  # random embeddings fill the bucket to its last column
        bucket.embeds.normal_(generator=generator).mul_(scale)
        bucket.positions.copy_(torch.arange(bucket.length, device=device).expand_as(bucket.positions))
        bucket.last.fill_(bucket.length - 1)
        agree = same_values(bucket, decoder, decodes=decodes)
    finally:
        for tensor in (bucket.embeds, bucket.positions, bucket.last):
            tensor.zero_()
    if not agree:
        raise Miscompiled(
            f"torch.compile gives other logits for {bucket.batch} x {bucket.length} columns in "
            f"{str(bucket.embeds.dtype).removeprefix('torch.')} than the same layers without it"
        )


def same_values(bucket: Bucket, decoder: Decoder, *, decodes: bool) -> bool:
    """Whether compiled and plain layers agree on what lies in the bucket.

    Where a method drops tokens between layers, each run of layers is compared by itself: a choice between random
    tokens may turn on a rounding. In 8 bits so does every number, and after many layers nothing would be alike; so the
    first layer of each run is compared, whose compiled code is that of all others.
    """
    plain, eight_bits = plain_decoder(decoder), decoder.weights.in_eight_bits
    agree = True
    if bucket.cuts is None and not eight_bits:
        agree = same_logits(bucket, bucket.prefill, bucket.make_prefill(plain))
    else:
        count = len(bucket.cache)
        widths = [bucket.length] * count if bucket.cuts is None else bucket.cuts.widths(bucket.length, count)
        for layers in bucket.segments():
            entering = bucket.embeds[:, : widths[layers[0]]].contiguous()
            positions = bucket.positions[..., : widths[layers[0]]]
            some = layers[:1] if eight_bits else layers
            found, wanted = (
                torch.add(*each.run_layers(entering, torch.zeros_like(entering), positions, bucket.cache, some))
                for each in (decoder, plain)
            )
            agree = agree and close(found, wanted, limit=MISTAKE)
        if eight_bits:
            leaving = bucket.embeds[:, : widths[-1]].contiguous()
            last = torch.full_like(bucket.last, widths[-1] - 1)
            found, wanted = (each.logits_at(leaving, torch.zeros_like(leaving), last) for each in (decoder, plain))
            agree = agree and close(found, wanted, limit=MISTAKE)
        bucket.prefill()
    if decodes and eight_bits:
        agree = agree and same_steps(bucket, decoder, plain)
    elif decodes:
        agree = agree and same_logits(bucket, bucket.decode, bucket.make_decode(plain))
    return agree


def same_steps(bucket: Bucket, compiled: Decoder, plain: Decoder) -> bool:
    """Whether the first layer of each run gives the same for one more token, and the head after it."""
    segments = [(layers[:1], column) for layers, column in zip(bucket.segments(), bucket.column, strict=True)]
    entering = compiled.weights.embed(bucket.token[:, None])
    agree = True
    for segment in segments:
        found, wanted = (
            each.logits_at(
                *each.step_layers(entering, torch.zeros_like(entering), bucket.position, [segment], bucket.cache),
                torch.zeros_like(bucket.token),
            )
            for each in (compiled, plain)
        )
        agree = agree and close(found, wanted, limit=MISTAKE)
    return agree


def same_logits(bucket: Bucket, compiled: Stage, plain: Callable[[], None]) -> bool:
    """Whether a stage and the plain function give the same logits from the same state."""
    state = (bucket.token, bucket.column, bucket.position)
    before = [tensor.clone() for tensor in state]
    compiled()
    found = bucket.logits.clone()
    for tensor, saved in zip(state, before, strict=True):
        tensor.copy_(saved)
    plain()
    return close(found, bucket.logits, limit=MISTAKE)


# The choice of tokens ------------------------------------------------------------------------------------------------


def noisy_pixels(batch: Batch) -> Batch:
    """The batch with noise for pictures, so that no two patches, windows or tiles are alike."""
    pixels = batch.features["pixel_values"]
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0)).to(pixels)
    return replace(batch, features={**batch.features, "pixel_values": noise})


def varied(tokens: VisualTokens) -> VisualTokens:
    """Tokens with noise added: those of a grey picture may be all alike, and so would be any two rankings of them."""
    drawn = torch.randn(tokens.x.shape, generator=torch.Generator().manual_seed(0)).to(tokens.x)
    return replace(tokens, x=tokens.x + drawn * tokens.x.std())


def depends_on_features_alone(method: Pruner, tokens: VisualTokens, k: int) -> bool:
    """Whether other pixels with the same features would be treated the same; by a random choice they would not."""
    size = len(tokens)
    one, other = (replace(tokens, seeds=tuple(range(start, start + size))) for start in (1, 1 + size))
    first, second = method.select(one, k), method.select(other, k)
    return first.shape == (size, k) and torch.equal(first, second)


def capturable(choose: Choose, x: Float[Tensor, "B N D"], k: int, *, warn: Callable[[str], None]) -> bool:
    """Whether the choice can be captured: some methods read values back, which a graph cannot.

    `warn` gets the reason where a choice that waits for nothing cannot be captured either.
    """
    into = (
        torch.zeros(len(x), k, dtype=torch.int64, device=x.device),
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
        warn(f"the choice of tokens cannot be a CUDA graph and runs as without compile(): {reason}")
        return False
    return True
