"""Random requests against the untouched model with the dropped tokens masked; the compiled path against the other."""

import random
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from diffprune.backbones.prompts import Batch
from diffprune.inside.state import Cut
from diffprune.methods.base import LayerPruner
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.registry import BACKBONES, METHODS
from diffprune.types import LMInputs
from tests import tiny
from tests.backbones.test_windows import sliding
from tests.contracts.test_backbones import IN_LLM, stock_greedy
from tests.contracts.vlm import splice_all, stays, stock_inputs
from tests.fast.compiled import SIZES, answer, compiled, reference

FAMILIES = [name for name in BACKBONES.names() if not name.startswith("deit")]
BEFORE = [name for name in METHODS.names() if not issubclass(METHODS.get(name), LayerPruner)]
INSIDE = ("hidden_norm", "fastv", "dart", "pyramiddrop", "dynamic_llava", "atp_llava")  # those that only drop
WORDS = ("what", "is", "the", "small", "red", "thing", "there,", "and", "where", "does", "it", "stand?", "look")
NEAR = 2e-4  # of the largest logit


def size(rng: random.Random) -> tuple[int, int]:
    """Of a picture: mostly ordinary, often too narrow for a row or column of tokens."""
    if rng.random() < 0.4:
        thin, long = rng.randint(1, 9), rng.randint(20, 400)
        return (thin, long) if rng.random() < 0.5 else (long, thin)
    return rng.randint(14, 170), rng.randint(14, 170)


def question(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))


def keep(rng: random.Random) -> int | float:
    return rng.choice([1, 2, rng.randint(3, 40), round(rng.uniform(0.02, 1.0), 3), 1.0])


def prompts(rng: random.Random, most: int = 3) -> tuple[list[Any], list[str]]:
    """One to three prompts, each with a picture or two; some with none."""
    images, texts = [], []
    for _ in range(rng.randint(1, most)):
        number = rng.choice([0, 1, 1, 1, 2])
        images.append([tiny.picture(rng.randrange(1 << 30), size(rng)) for _ in range(number)] or None)
        texts.append(question(rng))
    if all(row is None for row in images):
        images[0] = [tiny.picture(rng.randrange(1 << 30), size(rng))]
    return images, texts


def around(rng: random.Random, model: Any, processor: Any, name: str, **options: Any) -> PrunedVLM:
    """A method with random weights around a model, by random rules."""
    vlm = PrunedVLM(
        model,
        processor,
        method="full",
        newline=rng.choice(["rows", "rows", "all", "none"]),
        budget=rng.choice(["global", "global", "per_tile"]),
    )
    torch.manual_seed(rng.randrange(1 << 30))
    method = build_method(name, block=vlm.backbone.block, language=vlm.backbone.language, **options)
    for parameter in method.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return vlm.with_method(method.eval(), keep=1.0 if name == "full" else keep(rng))


def compare(found: Tensor, wanted: Tensor, what: str) -> None:
    scale = max(1.0, float(wanted.abs().max()))
    difference = float((found - wanted).abs().max())
    assert difference < NEAR * scale, f"{what}: logits are off by {difference:.3g} of {scale:.3g}"


def check_against_masked(rng: random.Random, vlm: PrunedVLM, images: list[Any], texts: list[str]) -> None:
    """Prefill and greedy tokens of dropping are those of masking; rows one by one answer as together."""
    batch = vlm.prepare(images, texts)
    logits, lm = vlm.logits(batch)
    if not vlm.method.is_merging:
        kept = stays(batch, lm)
        stock = stock_greedy(vlm, batch, kept.long(), steps=3)
        for row in range(len(texts)):
            real = lm.attention_mask[row].bool()
            compare(logits[row][real], stock["prefill"][row][kept[row]], f"row {row}")
        settings = {} if rng.random() < 0.7 else {"cache_implementation": "static"}
        ids = vlm.generate(images, texts, max_new_tokens=3, do_sample=False, return_ids=True, **settings)
        check_tokens(ids, stock["ids"], stock["steps"])
    if len(texts) > 1:
        row = rng.randrange(len(texts))
        alone, single = vlm.logits(vlm.prepare(images[row : row + 1], texts[row : row + 1]))
        real = lm.attention_mask[row].bool()
        compare(logits[row][real], alone[0][single.attention_mask[0].bool()], f"row {row} by itself")


def check_tokens(found: Tensor, wanted: Tensor, steps: Tensor) -> None:
    """Tokens must be the same up to the first that turns on a rounding."""
    for row in range(len(wanted)):
        for step in range(wanted.shape[1]):
            best = steps[row, step].topk(2).values
            if float(best[0] - best[1]) < 1e-3:
                break
            assert int(found[row, step]) == int(wanted[row, step]), f"row {row} says another token at step {step}"


def before(rng: random.Random) -> None:
    """A method before the language model, any family."""
    family = rng.choice(FAMILIES)
    vlm = around(rng, *tiny.build(family), rng.choice(BEFORE))
    check_against_masked(rng, vlm, *prompts(rng))


def windows(rng: random.Random) -> None:
    """The same around language models with a sliding window: refused, or the same."""
    model, processor = sliding(rng.choice(["mistral", "qwen2"]), rng.choice([8, 24, 40, 48, 60, 80, 200]))
    images, texts = prompts(rng, most=1)
    if rng.random() < 0.7:
        check_against_masked(
            rng, around(rng, model, processor, rng.choice(["full", "feature_norm", "random"])), images, texts
        )
        return
    check_inside(around(rng, model, processor, "fastv", layer=1), images, texts)


def inside(rng: random.Random) -> None:
    """A method inside the language model, any family."""
    name, family = rng.choice(INSIDE), rng.choice(FAMILIES)
    check_inside(around(rng, *tiny.build(family), name, **IN_LLM[name]), *prompts(rng))


def check_inside(vlm: PrunedVLM, images: list[Any], texts: list[str]) -> None:
    """Dropping between layers against all layers over all tokens, dropped ones masked from their cut on."""
    ids, cuts, lm = watched(vlm, images, texts)
    drops = torch.zeros(len(vlm.backbone.language_model.layers), *lm.attention_mask.shape, dtype=torch.bool)
    for layer, columns in cuts:
        rows = torch.arange(len(columns))[:, None].expand_as(columns)
        real = columns >= 0
        drops[layer:, rows[real], columns[real]] = True
    steps = []
    for number in range(ids.shape[1]):
        steps.append(masked_layers(vlm, lm, drops, ids[:, :number]))
    logits = torch.stack(steps, 1)
    check_tokens(ids, logits.argmax(-1), logits)


def watched(vlm: PrunedVLM, images: list[Any], texts: list[str]) -> tuple[Tensor, list[tuple[int, Tensor]], LMInputs]:
    """Greedy tokens, for each cut its layer and the prompt columns it dropped (-1: none), and the whole prompt."""
    cuts: list[tuple[int, Tensor]] = []
    method: Any = vlm.method
    choose = method.select_at

    def spy(state: Any, k: Tensor) -> Any:
        answered = choose(state, k)
        kept = answered.keep if isinstance(answered, Cut) else answered
        assert not isinstance(answered, Cut) or answered.hidden is None
        stays_at = torch.zeros(state.visual.shape[0], state.visual.shape[1] + 1, dtype=torch.bool)
        stays_at = stays_at.scatter(1, torch.where(kept < 0, state.visual.shape[1], kept), True)[:, :-1]
        columns = state.source.gather(1, state.visual.clamp_min(0))
        cuts.append((state.layer, columns.masked_fill(stays_at | (state.visual < 0), -1)))
        return answered

    method.select_at = spy
    try:
        ids = vlm.generate(images, texts, max_new_tokens=3, do_sample=False, return_ids=True)
    finally:
        del method.select_at
    batch = vlm.prepare(images, texts)
    tokens = vlm.encode(batch)
    assert tokens is not None
    return ids, cuts, splice_all(vlm, batch, tokens)


@torch.no_grad()
def masked_layers(vlm: PrunedVLM, lm: LMInputs, drops: Tensor, said: Tensor) -> Tensor:
    """Next-token logits of the decoder's own layers over prompt and answer so far, with a mask for every layer."""
    backbone, decoder = vlm.backbone, vlm.backbone.language_model
    new = said.shape[1]
    hidden = torch.cat([lm.inputs_embeds, vlm.base.get_input_embeddings()(said)], 1)
    real = torch.cat([lm.attention_mask.bool(), torch.ones_like(said, dtype=torch.bool)], 1)
    last = torch.where(lm.attention_mask.bool(), lm.position_ids, 0).amax(-1, keepdim=True)
    last = last.amax(0, keepdim=True).expand_as(last) if last.ndim == 3 else last
    positions = torch.cat([lm.position_ids, last + 1 + torch.arange(new)], -1)
    width = hidden.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    two_way = backbone.two_way(lm)
    if two_way is not None:
        two_way = nn.functional.pad(two_way, (0, new))
        causal = causal | (two_way[:, :, None] & two_way[:, None])
    additions = [nn.functional.pad(addition, (0, 0, 0, new)) for addition in backbone.layer_additions(lm)]
    tables = decoder.rotary_emb(hidden, positions)
    for index, layer in enumerate(decoder.layers):
        gone = nn.functional.pad(drops[index], (0, new))
        allowed = (causal & (real & ~gone)[:, None]) | torch.eye(width, dtype=torch.bool)
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
        out = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions if positions.ndim == 2 else positions[0],
            position_embeddings=tables,
        )
        hidden = out[0] if isinstance(out, tuple) else out
        if index < len(additions):
            hidden = hidden + additions[index]
    return vlm.base.lm_head(decoder.norm(hidden[:, -1]))


@cache
def compiled_once(family: str, method: str) -> PrunedVLM:
    return compiled(family, method)


def fast(rng: random.Random) -> None:
    """The compiled path against the reference path."""
    vlm = compiled_once(
        rng.choice(list(SIZES)), rng.choice(["full", "feature_norm", "diffprune", "random", "visionzip"])
    )
    images, texts = prompts(rng, most=2)
    sizes = SIZES[vlm.backbone.family] or [(100, 70)]
    if rng.random() < 0.6:
        images = [[tiny.picture(rng.randrange(1 << 30), rng.choice(sizes))] for _ in texts]
    budget = {} if rng.random() < 0.6 or vlm.method.name == "full" else {"keep": keep(rng)}
    wanted = reference(vlm, images, texts, **budget)
    batch = vlm.prepare(images, texts)
    steps = stepwise(vlm, batch, wanted, **budget)
    check_tokens(answer(vlm, images, texts, **budget), wanted, steps)


def stepwise(vlm: PrunedVLM, batch: Batch, ids: Tensor, **budget: Any) -> Tensor:
    """The logits behind each of the reference path's tokens."""
    with torch.inference_mode():
        lm = vlm.lm_inputs(batch, vlm.encode(batch), **budget)
        out = vlm.backbone.run_generate(
            lm, max_new_tokens=ids.shape[1], do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    return torch.stack(out.logits, 1)


def stock_full(rng: random.Random) -> None:
    """`full` on any picture is the untouched model's own forward, newlines and all."""
    family = rng.choice(FAMILIES)
    vlm = PrunedVLM(*tiny.build(family), method="full")
    batch = vlm.prepare(*prompts(rng))
    with torch.no_grad():
        stock = vlm.base(**stock_inputs(vlm, batch, batch.features["attention_mask"])).logits
    logits, lm = vlm.logits(batch)
    assert torch.equal(lm.attention_mask, batch.features["attention_mask"]), "something was dropped"
    real = lm.attention_mask.bool()
    compare(logits[real], stock[real], "full")


CAMPAIGNS = {"before": before, "inside": inside, "full": stock_full, "windows": windows, "fast": fast}
