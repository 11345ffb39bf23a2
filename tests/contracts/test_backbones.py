"""Contracts every backbone keeps, proved against the untouched model: the stock forward is the reference throughout."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffprune.inside import loop
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.registry import BACKBONES
from tests import tiny
from tests.contracts.vlm import EveryOther, Moved, pruned, splice_all, stays, stock_inputs

CLASSIFIERS = {"deit"}
FAMILIES = [name for name in BACKBONES.names() if name not in CLASSIFIERS]
PAPER_FAMILIES = ("llava", "llava_next", "qwen2_5_vl")
# Methods inside the language model with the options they are tried with on three layers.
IN_LLM: dict[str, dict[str, object]] = {
    "hidden_norm": {"layer": 1},
    "fastv": {"layer": 1},
    "dart": {"layer": 1},
    "pyramiddrop": {},
    "sparsevlm": {},
    "sparsevlm-plus": {"heads": 2},
    "dynamic_llava": {"layer": 1},
    "atp_llava": {},
    "p_mod": {},
    "glimpse_prune": {},
}
INSIDE_PAPER = [(family, name) for family in PAPER_FAMILIES for name in IN_LLM]
INSIDE = INSIDE_PAPER + [(family, "hidden_norm") for family in FAMILIES if family not in PAPER_FAMILIES]
QUESTIONS = ["what is it?", "where is the small red thing, please?"]


def two_pictures() -> list[Image.Image]:
    return [tiny.picture(1, (100, 70)), tiny.picture(2, (64, 120))]


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_is_the_untouched_model(family: str) -> None:
    vlm = pruned(family)
    batch = vlm.prepare(two_pictures(), QUESTIONS)
    with torch.no_grad():
        stock = vlm.base(**batch.features).logits
        stock_ids = vlm.base.generate(**batch.features, max_new_tokens=6, do_sample=False)[
            :, batch.features["input_ids"].shape[1] :
        ]
    logits, lm = vlm.logits(batch)
    real = batch.features["attention_mask"].bool()
    assert torch.equal(lm.attention_mask.bool(), real)
    assert (logits - stock)[real].abs().max() < 1e-6 * max(1.0, float(stock[real].abs().max()))
    assert torch.equal(
        vlm.generate(two_pictures(), QUESTIONS, return_ids=True, max_new_tokens=6, do_sample=False), stock_ids
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_equals_masking_in_prefill_and_in_cached_decoding(family: str) -> None:
    vlm = pruned(family, EveryOther(), keep=5)
    batch = vlm.prepare(two_pictures(), QUESTIONS)
    logits, lm = vlm.logits(batch)
    keep = stays(batch, lm)
    assert keep.sum() < batch.features["attention_mask"].sum(), "nothing was dropped"
    forced = stock_greedy(vlm, batch, keep.long(), steps=9)
    stock = forced["prefill"]
    for row in range(len(keep)):
        difference = stock[row][keep[row]] - logits[row][lm.attention_mask[row].bool()]
        assert difference.abs().max() < 1e-4
    ours = vlm.generate(
        two_pictures(), QUESTIONS, return_ids=True, max_new_tokens=9, do_sample=False, output_logits=True
    )
    assert torch.equal(ours, forced["ids"])
    steps = decode_logits(vlm, lm, forced["ids"])
    assert (steps - forced["steps"]).abs().max() < 1e-4

    packed = pruned(family, EveryOther(), keep=5, positions="packed").logits(batch)[0]
    assert (packed[:, -1] - stock[:, -1]).abs().max() > 1e-2, "the control with packed positions must differ"


@torch.no_grad()
def stock_greedy(vlm: PrunedVLM, batch, mask: Tensor, steps: int) -> dict[str, Tensor]:
    """The untouched model, tokens masked: prefill logits, greedy ids and the logits behind each of them."""
    positions = vlm.backbone.positions(batch)
    out = vlm.base(**stock_inputs(vlm, batch, mask), use_cache=True)
    cache, last, ids, logits = out.past_key_values, positions[..., -1:], [], []
    step = out.logits[:, -1]
    for _ in range(steps):
        logits.append(step)
        ids.append(step.argmax(-1))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        last = last + 1
        step = vlm.base(
            input_ids=ids[-1][:, None], attention_mask=mask, position_ids=last, past_key_values=cache, use_cache=True
        ).logits[:, -1]
    return {"prefill": out.logits, "ids": torch.stack(ids, 1), "steps": torch.stack(logits, 1)}


@torch.no_grad()
def decode_logits(vlm: PrunedVLM, lm, ids: Tensor) -> Tensor:
    """Logits behind each forced id with our inputs and a cache."""
    out = vlm.backbone.run_generate(
        lm, max_new_tokens=ids.shape[1], do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return torch.stack(out.logits, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_answers_as_its_rows_do_one_by_one(family: str) -> None:
    vlm = pruned(family, EveryOther(), keep=0.4)
    texts = ["what is it?", "hello there", "compare the two, please", "and this one?", "tell me all about it now"]
    images = [
        tiny.picture(1, (100, 70)),
        None,
        [tiny.picture(2, (64, 120)), tiny.picture(3, (90, 90))],
        tiny.picture(4, (150, 60)),
        tiny.picture(5, (56, 56)),
    ]
    together = vlm.generate(images, texts, return_ids=True, max_new_tokens=6, do_sample=False)
    for row, (image, text) in enumerate(zip(images, texts, strict=True)):
        alone = vlm.generate([image], [text], return_ids=True, max_new_tokens=6, do_sample=False)
        assert torch.equal(together[row], alone[0]), f"row {row} answers otherwise in a batch"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", [(0.15, 0.2), (0.55, 0.4), (0.85, 0.8)])
def test_one_bright_patch_is_kept_and_its_box_covers_it(family: str, place: tuple[float, float]) -> None:
    width, height = 112, 112
    black = Image.new("RGB", (width, height))
    vlm = pruned(family)
    reference = vlm.encode(vlm.prepare([black], [""]))
    assert reference is not None
    x, y = int(place[0] * width), int(place[1] * height)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[y - 3 : y + 3, x - 3 : x + 3] = 255
    selection = pruned(family, Moved(reference.x), keep=1).select([Image.fromarray(pixels)])
    (index,) = selection[0].keep.tolist()
    x0, y0, x1, y1 = selection[0].boxes[index].tolist()
    assert x0 - 3 <= x <= x1 + 3 and y0 - 3 <= y <= y1 + 3, (
        f"token {index} looks at {x0, y0, x1, y1}, the patch is at {x, y}"
    )


@pytest.mark.parametrize(("family", "name"), INSIDE)
def test_dropping_inside_the_language_model_decodes_as_it_recomputes(family: str, name: str) -> None:
    vlm = pruned(family, name, keep=5, **IN_LLM[name])
    answers = ["red", "to the left"]
    with torch.no_grad():
        for row in range(2):
            picture, question = two_pictures()[row : row + 1], QUESTIONS[row : row + 1]
            state, cache = prefilled(vlm, vlm.prepare(picture, question))
            lengths = cache.lengths()
            cut_everywhere = getattr(vlm.method, "prunes_earlier", False)
            assert cut_everywhere or lengths[0] > lengths[2], "the layers after the cut hold fewer tokens"
            for token in vlm.backbone._answer_ids(answers[row]):
                embeds = vlm.base.get_input_embeddings()(torch.tensor([[token]]))
                state = loop.step(vlm.backbone, embeds, cache)
            # The answer stands behind the prompt and has no say in what is kept, so the same tokens stay.
            answered = vlm.prepare(picture, question, answers=answers[row : row + 1])
            if not cut_everywhere:  # else the answer would see in the layers before the cut what their caches lost
                whole, _ = prefilled(vlm, answered)
                assert (state - whole).abs().max() < 1e-4
            # Before its last token the states are those of the words taken at once.
            tokens = vlm.encode(answered)
            assert tokens is not None
            counts = vlm.prompt_counts(answered, vlm.counts(tokens))
            lm = splice_all(vlm, answered, tokens)
            at_once, words, *_ = loop.dropped_states(vlm.backbone, lm, vlm.method, counts)
            assert words[0].tolist() == vlm.backbone._answer_ids(answers[row])
            first, cache = prefilled(vlm, vlm.prepare(picture, question))
            assert (at_once[:, 0] - first).abs().max() < 1e-4
            embeds = vlm.base.get_input_embeddings()(words[:, :1])
            assert (at_once[:, 1] - loop.step(vlm.backbone, embeds, cache)).abs().max() < 1e-4
    assert vlm.generate(two_pictures(), QUESTIONS, max_new_tokens=4, return_ids=True).shape == (2, 4)


def prefilled(vlm: PrunedVLM, batch):
    """Last hidden state and caches of a prompt whose tokens are dropped inside the language model."""
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm = splice_all(vlm, batch, tokens)
    return loop.prefill(vlm.backbone, lm, vlm.method, vlm.prompt_counts(batch, vlm.counts(tokens)))


@pytest.mark.parametrize(("family", "name"), INSIDE)
def test_dropping_nothing_inside_the_language_model_is_the_untouched_model(family: str, name: str) -> None:
    vlm = pruned(family, name, keep=1.0, **IN_LLM[name])
    batch = vlm.prepare(two_pictures(), QUESTIONS)
    ours = vlm.generate(two_pictures(), QUESTIONS, max_new_tokens=5, return_ids=True)
    with torch.no_grad():
        stock = vlm.base.generate(**batch.features, max_new_tokens=5, do_sample=False)
    assert torch.equal(ours, stock[:, batch.features["input_ids"].shape[1] :])


@pytest.mark.parametrize(("family", "name"), INSIDE)
def test_dropping_inside_the_language_model_answers_a_batch_as_its_rows_one_by_one(family: str, name: str) -> None:
    vlm = pruned(family, name, keep=0.4, **IN_LLM[name])
    texts = ["what is it?", "hello there", "compare the two, please, and say which is larger"]
    images = [tiny.picture(1, (100, 70)), None, [tiny.picture(2, (64, 120)), tiny.picture(3, (90, 90))]]
    together = vlm.generate(images, texts, return_ids=True, max_new_tokens=4)
    for row, (image, text) in enumerate(zip(images, texts, strict=True)):
        alone = vlm.generate([image], [text], return_ids=True, max_new_tokens=4)
        assert torch.equal(together[row], alone[0]), f"row {row} answers otherwise in a batch"


class WideTensors(TorchDispatchMode):
    """Records every operation that makes a tensor with two axes of `width` or more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.found: dict[str, tuple[int, ...]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor) and sum(size >= self.width for size in value.shape) >= 2:
                self.found[str(func)] = tuple(value.shape)
        return out


@pytest.mark.parametrize(("family", "name"), INSIDE_PAPER)
def test_no_map_of_all_tokens_against_all_is_ever_made(family: str, name: str) -> None:
    vlm = pruned(family, name, keep=5, **IN_LLM[name])
    assert vlm.backbone.language_model.config._attn_implementation == "sdpa"
    batch = vlm.prepare(two_pictures(), ["what is it? " * 20, "and this?"])  # of different length, so padded
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm, counts = splice_all(vlm, batch, tokens), vlm.prompt_counts(batch, vlm.counts(tokens))
    length = lm.inputs_embeds.shape[1]
    assert length > 200 and length > 2 * lm.inputs_embeds.shape[2]
    with torch.no_grad(), WideTensors(length // 2) as watch:
        loop.prefill(vlm.backbone, lm, vlm.method, counts)
    assert watch.found == {}


def test_a_map_of_all_tokens_against_all_would_be_seen() -> None:
    vlm = pruned("llava")
    batch = vlm.prepare(two_pictures(), ["what is it? " * 20, "and this?"])
    with torch.no_grad(), WideTensors(100) as watch:
        vlm.base(**batch.features)  # padding makes the stock forward build a mask of T x T
    assert watch.found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_training_path_reaches_the_scorer_and_nothing_else(family: str) -> None:
    vlm = pruned(family, "diffprune", keep=5)
    before = {key: value.clone() for key, value in vlm.base.state_dict().items()}
    batch = vlm.prepare(two_pictures(), QUESTIONS, answers=["a red star", "left"])
    vlm.loss(batch, tau=1.0, generator=torch.Generator().manual_seed(0)).backward()
    head = [parameter for name, parameter in vlm.method.named_parameters() if "head" in name and parameter.ndim > 1]
    assert head and all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in head)
    assert all(parameter.grad is None for parameter in vlm.base.parameters())
    assert all(torch.equal(value, before[key]) for key, value in vlm.base.state_dict().items())


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, "gumbel_ste-masked") for family in FAMILIES]
    + [(family, name) for family in PAPER_FAMILIES for name in ("dynamicvit", "dynamic_llava", "atp_llava", "p_mod")],
)
def test_training_with_nothing_masked_is_the_untouched_model(family: str, name: str) -> None:
    vlm = pruned(family, name, keep=1.0)
    batch = vlm.prepare(two_pictures(), QUESTIONS, answers=["a red star", "left"])
    whole = pruned(family).loss(batch, hard=True)
    tokens = vlm.encode(batch)
    assert tokens is not None
    if name == "dynamicvit":  # its choice is free whatever K is
        lm = dataclasses.replace(
            splice_all(vlm, batch, tokens), soft_mask=torch.ones(batch.features["input_ids"].shape)
        )
        loss = vlm.decoder.loss(lm, None, None)[0]
    else:
        loss = vlm.loss(batch, tokens=tokens, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_is_masked_for_all_is_as_good_as_dropped(family: str) -> None:
    vlm = pruned(family, EveryOther(), keep=0.5)
    batch = vlm.prepare(two_pictures(), QUESTIONS, answers=["a red star", "left"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    dropped = vlm.loss(batch, tokens=tokens, hard=True)
    lm, keep = splice_all(vlm, batch, tokens), vlm.method.select(tokens, vlm.counts(tokens))
    assert lm.origin is not None
    kept = [row * tokens.x.shape[1] + index for row, own in enumerate(keep.tolist()) for index in own if index >= 0]
    soft_mask = ((lm.origin.index < 0) | torch.isin(lm.origin.index, torch.tensor(kept))).float()
    if vlm.backbone.newline is not None:
        pytest.skip(f"{family} also drops the newlines of rows that are gone")
    if lm.extra:
        pytest.skip(f"{family} hands further features to the decoder")
    torch.testing.assert_close(
        vlm.decoder.loss(dataclasses.replace(lm, soft_mask=soft_mask), None, None)[0], dropped, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_needs_are_given_on_request_and_in_shape(family: str) -> None:
    vlm = pruned(family)
    batch = vlm.prepare(two_pictures(), QUESTIONS)
    for need in sorted(vlm.backbone.provides):
        tokens = vlm.backbone.encode(batch, frozenset({need}))
        value = getattr(tokens, need)
        assert value is not None and value.shape[0] == len(tokens)
        if need != "text":
            assert value.shape[1] == tokens.x.shape[1]
    plain = vlm.backbone.encode(batch)
    assert plain.cls_attention is None and plain.keys is None and plain.projected is None and plain.text is None


def test_every_method_runs_on_llava() -> None:
    from diffprune.registry import METHODS

    for name in METHODS.names():
        backbone = pruned("llava").backbone
        method = build_method(name, block=backbone.block, language=backbone.language)
        answer = pruned("llava", method, keep=4).generate([tiny.picture(1)], "what?", max_new_tokens=2)
        assert isinstance(answer, str)
