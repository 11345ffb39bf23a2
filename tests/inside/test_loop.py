"""The loop over decoder layers: what methods read there is what the layers compute, and a cut moves what it says."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from diffprune.inside import loop
from diffprune.inside.state import Cut, LayerState
from diffprune.inside.stream import Stream, drop
from diffprune.methods.base import Card, LayerPruner
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.types import LMInputs
from tests import tiny
from tests.contracts.vlm import pruned, splice_all

FAMILIES = ["llava", "llava_next", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "paligemma", "internvl"]
QUESTIONS = ["what is it?", "where is the small red thing, please?"]


def two_pictures() -> list[Any]:
    return [tiny.picture(1, (100, 70)), tiny.picture(2, (64, 120))]


class Spy(LayerPruner):
    """Drops the last visual token of each prompt before one layer and remembers the state it saw."""

    name = "spy"
    card = Card(idea="for tests")

    def __init__(self, layer: int, *, renumber: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.renumber = renumber
        self.states: list[LayerState] = []

    @property
    def positions(self) -> str:
        return "packed" if self.renumber else "original"

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        return {self.layer: max(0, num_visual - 1)}

    def select_at(self, state: LayerState, k: Tensor) -> Tensor:
        self.states.append(state)
        places = torch.arange(int(k.max()))
        return torch.where(places < k[:, None], places, -1)


def spied(vlm: PrunedVLM, spy: Spy, texts: list[str], images: list[Any]) -> tuple[LayerState, LMInputs, Any]:
    batch = vlm.prepare(images, texts)
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm = splice_all(vlm, batch, tokens)
    with torch.no_grad():
        _, cache = loop.prefill(vlm.backbone, lm, spy, vlm.prompt_counts(batch, vlm.counts(tokens)))
    return spy.states[0], lm, cache


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_rows_are_those_of_the_layer_s_own_map(family: str) -> None:
    model, processor = tiny.build(family)
    vlm = PrunedVLM(model, processor, keep=1.0)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    spy = Spy(layer=2)
    state, _, _ = spied(vlm, spy, QUESTIONS, two_pictures())
    batch = vlm.prepare(two_pictures(), QUESTIONS)
    with torch.no_grad():
        maps = eager(**batch.features, output_attentions=True).attentions
        assert state.source is not None
        real = state.attention_mask
        rows = torch.stack([state.last, state.last - 2, torch.tensor([5, -1])], dim=1)  # [B, 3]
        for layer in (1, 2):
            ours = state.attention(rows, layer)
            assert ours.dtype == torch.float32 and ours.shape[1:] == (maps[layer].shape[1], 3, real.shape[1])
            for row, columns in enumerate(state.source):
                wanted = maps[layer][row][:, columns[rows[row].clamp_min(0)]][:, :, columns]  # [H, R, T]
                wanted = wanted * (rows[row] >= 0)[None, :, None]
                torch.testing.assert_close(ours[row][..., real[row]], wanted[..., real[row]], rtol=1e-4, atol=1e-5)
                assert (ours[row][..., ~real[row]] == 0).all()


def test_keys_are_read_from_the_cache_or_made_as_the_layer_makes_them() -> None:
    spy = Spy(layer=2)
    state, _, cache = spied(pruned("qwen3_vl"), spy, QUESTIONS, two_pictures())
    stored = cache.keys_values.layers
    torch.testing.assert_close(state.keys(), stored[1].keys, rtol=0, atol=0)
    made = state.keys(2)  # before the cut: the cache of layer 2 holds them without the one that was dropped
    for row, length in enumerate(state.attention_mask.sum(-1).tolist()):
        dropped = int(state.visual[row].max())
        columns = [column for column in range(length) if column != dropped]
        torch.testing.assert_close(stored[2].keys[row][:, : length - 1], made[row][:, columns], rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="not beside the cut"):
        state.attention(state.last[:, None], layer=0)


def test_the_bias_of_distance_is_what_queries_and_keys_of_ones_score() -> None:
    state, lm, _ = spied(pruned("llava"), Spy(layer=2), QUESTIONS[:1], two_pictures()[:1])
    bias = state.rope_bias(torch.tensor([[4, 9]]))[0]  # [2, T]
    head = 16
    angles = 10000.0 ** (-torch.arange(0, head, 2) / head)
    for row, position in enumerate((4, 9)):
        distance = position - lm.position_ids[0]
        torch.testing.assert_close(
            bias[row], 2 * (distance[:, None] * angles).cos().sum(-1) / head**0.5, rtol=1e-4, atol=1e-4
        )


def test_the_instruction_is_the_text_behind_the_last_picture_and_no_answer() -> None:
    vlm = pruned("llava_next")
    image = vlm.backbone.image_token
    text = f"{image}first{image}which one?"
    spy = Spy(layer=1)
    batch = vlm.prepare([two_pictures()], [text], answers=["the left"], chat=False)
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm = splice_all(vlm, batch, tokens)
    with torch.no_grad():
        loop.prefill(vlm.backbone, lm, spy, vlm.prompt_counts(batch, vlm.counts(tokens)))
    (state,) = spy.states
    words = lm.input_ids.gather(1, state.source)[state.instruction]  # type: ignore[arg-type]
    assert vlm.backbone.tokenizer.decode(words) == "which one?"
    assert int(lm.input_ids[0, state.source[0, state.last[0]]]) == words[-1]  # type: ignore[index]


def test_a_picture_at_the_end_of_the_prompt_is_asked_by_its_last_column() -> None:
    vlm = pruned("llava", "fastv", layer=1, keep=3)
    prompt = f"look: {vlm.backbone.image_token}"
    spy = Spy(layer=1)
    batch = vlm.prepare(two_pictures()[:1], [prompt], chat=False)
    tokens = vlm.encode(batch)
    assert tokens is not None
    with torch.no_grad():
        loop.prefill(vlm.backbone, splice_all(vlm, batch, tokens), spy, tokens.counts)
    assert spy.states[0].instruction.nonzero().tolist() == [[0, int(spy.states[0].last[0])]]
    assert vlm.generate(two_pictures()[:1], prompt, chat=False, max_new_tokens=2, return_ids=True).shape == (1, 2)


# --- a cut ------------------------------------------------------------------------------------------------------------


def stream() -> Stream:
    """Two prompts: text, three or two visual tokens, text; the second is one shorter."""
    hidden = torch.arange(12.0).reshape(2, 6, 1)
    valid = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()
    columns = torch.arange(6).expand(2, 6)
    return Stream(
        hidden=hidden,
        positions=columns + 10,
        valid=valid,
        visual=torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]]).bool(),
        source=columns,
        additions=(hidden + 100,),
        two_way=None,
    )


VISUAL = torch.tensor([[1, 2, 3], [1, 2, -1]])


def test_a_cut_takes_everything_that_belongs_to_a_token_with_it() -> None:
    short = drop(stream(), VISUAL, Cut(torch.tensor([[0, 2], [1, -1]])))
    assert short.source.tolist() == [[0, 1, 3, 4, 5], [0, 2, 3, 4, 1]] and not short.valid[1, 4]
    real = short.valid
    assert (short.positions - 10)[real].tolist() == short.source[real].tolist()
    assert (short.hidden[..., 0] - torch.tensor([[0], [6]]))[real].tolist() == short.source[real].tolist()
    assert torch.equal(short.additions[0], short.hidden + 100)
    assert short.visual.tolist() == [[False, True, True, False, False], [False, True, False, False, False]]


def test_a_cut_may_change_order_and_content_of_what_stays() -> None:
    new = torch.tensor([[[50.0], [60.0]], [[70.0], [0.0]]])
    short = drop(stream(), VISUAL, Cut(torch.tensor([[2, 0], [0, -1]]), new))
    assert short.hidden[0, :, 0].tolist() == [0, 50, 60, 4, 5]
    assert short.source[0].tolist() == [0, 3, 1, 4, 5]
    assert short.hidden[1, :4, 0].tolist() == [6, 70, 9, 10]


def test_packed_positions_count_on_from_the_first() -> None:
    short = drop(stream(), VISUAL, Cut(torch.tensor([[2], [0]]))).packed()
    assert short.positions[0].tolist() == [10, 11, 12, 13]
    assert short.segment(range(3)).next_position.tolist() == [[14], [14]]
    assert drop(stream(), VISUAL, Cut(torch.tensor([[2], [0]]))).segment(range(3)).next_position.tolist() == [
        [16],
        [15],
    ]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_layers_number_the_token_to_come_by_their_own_rule(family: str) -> None:
    vlm = pruned(family)
    for renumber in (False, True):
        _, lm, cache = spied(vlm, Spy(layer=2, renumber=renumber), QUESTIONS, two_pictures())
        first, second = (segment.next_position for segment in cache.segments)
        last = torch.where(lm.attention_mask.bool(), lm.position_ids, 0).amax(-1, keepdim=True)
        assert torch.equal(first, last + 1)
        if renumber:
            lengths = lm.attention_mask.sum(-1, keepdim=True) - 1
            assert torch.equal(second, lengths.expand_as(second))
        else:
            assert torch.equal(second, first)


@pytest.mark.parametrize(
    ("name", "options"),
    [("pyramiddrop", {}), ("sparsevlm", {}), ("sparsevlm-plus", {}), ("dart", {"visual_pivots": 2, "text_pivots": 1})],
)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_what_a_release_does_decodes_as_it_recomputes(
    family: str, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffprune.methods.sparsevlm.LISTS", {"1.5": {5: (7, 5, 3)}, "plus": {5: (7, 5, 3)}})
    method = build_method(name, native=True, **options)
    vlm = pruned(family, method, keep=5)
    batch = vlm.prepare(two_pictures()[:1], QUESTIONS[:1])
    whole = vlm.prepare(two_pictures()[:1], QUESTIONS[:1], answers=["red"])
    tokens = vlm.encode(batch)
    assert tokens is not None and isinstance(method, LayerPruner)
    k = vlm.prompt_counts(batch, vlm.counts(tokens))
    with torch.no_grad():
        state, cache = loop.prefill(vlm.backbone, splice_all(vlm, batch, tokens), method, k)
        lengths = cache.lengths()
        assert lengths[0] > lengths[-1]
        for token in vlm.backbone._answer_ids("red"):
            state = loop.step(vlm.backbone, vlm.base.get_input_embeddings()(torch.tensor([[token]])), cache)
        full, _ = loop.prefill(vlm.backbone, splice_all(vlm, whole, tokens), method, k)
    assert (state - full).abs().max() < 1e-4


def test_eager_attention_answers_as_sdpa_does() -> None:
    model, processor = tiny.build("llava")
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    answers = [
        PrunedVLM(one, processor, method="fastv", keep=4).generate(
            two_pictures(), QUESTIONS, max_new_tokens=4, return_ids=True
        )
        for one in (model, eager)
    ]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["fastv", "dart", "pyramiddrop", "sparsevlm", "sparsevlm-plus"])
def test_half_precision_answers_a_batch_of_pictures_and_plain_text(name: str) -> None:
    model, processor = tiny.build("qwen2_5_vl")
    vlm = PrunedVLM(copy.deepcopy(model).to(torch.bfloat16), processor, method=name, keep=4)
    ids = vlm.generate([two_pictures()[0], None], QUESTIONS, max_new_tokens=3, return_ids=True)
    assert ids.shape == (2, 3)


def test_what_this_loop_cannot_decode_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_beams cannot be given to 'fastv'"):
        pruned("llava", "fastv", keep=4).generate(two_pictures()[:1], "what?", num_beams=2)


def test_what_it_cannot_do_is_refused_and_what_changes_nothing_is_taken() -> None:
    vlm = pruned("llava", "hidden_norm", keep=5, layer=1)
    picture = [tiny.picture(1)]
    plain = vlm.generate(picture, "what?", max_new_tokens=3, return_ids=True)
    same = vlm.generate(picture, "what?", max_new_tokens=3, return_ids=True, num_beams=1, use_cache=True)
    assert torch.equal(plain, same)
    with pytest.raises(ValueError, match="num_beams"):
        vlm.generate(picture, "what?", max_new_tokens=3, num_beams=2)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        vlm.generate(picture, "what?", max_new_tokens=0)
    vlm.base.generation_config.repetition_penalty = 1.5
    try:
        with pytest.raises(ValueError, match=r"repetition_penalty=1\.5"):
            vlm.generate(picture, "what?", max_new_tokens=3)
    finally:
        vlm.base.generation_config.repetition_penalty = None


def test_words_taken_at_once_are_counted_one_by_one() -> None:
    vlm = pruned("llava", "hidden_norm", keep=5, layer=1)
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm, counts = splice_all(vlm, batch, tokens), vlm.prompt_counts(batch, vlm.counts(tokens))
    words = vlm.base.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    with torch.no_grad():
        _, cache = loop.prefill(vlm.backbone, lm, vlm.method, counts)
        whole = loop.extend(vlm.backbone, words, cache)
        _, cache = loop.prefill(vlm.backbone, lm, vlm.method, counts)
        loop.extend(vlm.backbone, words[:, :2], cache)
        last = loop.step(vlm.backbone, words[:, 2:], cache)
    torch.testing.assert_close(last, whole[:, -1])
