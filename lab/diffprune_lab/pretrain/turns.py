"""Many questions about one picture in one sequence: [<s> USER: | visual tokens | turn 1 | turn 2 | ...].

The picture is encoded and read once, and every turn (question and answer) sees it and itself alone, at the positions
that it has in a prompt of its own: `shared_prefix_states` gives token for token what the stock model gives for each
turn by itself. Eight turns then cost little more than one.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import LlamaModel, PreTrainedTokenizerFast, Qwen2_5_VLTextModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer

from diffprune.ops import rotate
from diffprune_lab.scenes.reference import PIECES

IGNORE = -100  # cross-entropy's mark for "no target here"
BEFORE_PICTURE = "USER: "


class Turn(NamedTuple):
    """One question with its answer, and the kind of question it is."""

    kind: str
    question: str
    answer: str


class PackedTurns(NamedTuple):
    """The turns of B pictures, M at most for each, one after the other in T slots.

    Attributes:
        ids: Token ids; a turn is `\\nquestion ASSISTANT: answer</s>`.
        lengths: Tokens of each turn, 0 where there is none.
        answers: How many of them, at the turn's end, are the answer and `</s>`.
        kinds: Kind of each turn as an index into what `pack_turns` was given, -1 where there is no turn.
    """

    ids: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B M"]
    answers: Int[np.ndarray, "B M"]
    kinds: Int[np.ndarray, "B M"]


class TurnLayout(NamedTuple):
    """What follows from the lengths of the turns for each of the T slots.

    Attributes:
        turn: Which turn a token is of; padding is a turn of its own.
        offset: Place in its turn.
        target: The next token where that is part of an answer, else IGNORE.
        weight: Weight of the target in the loss: an answer of n tokens weighs sqrt(n) in all, so that a caption counts
            for more than a word, but not by its full length.
    """

    turn: Int[Tensor, "B T"]
    offset: Int[Tensor, "B T"]
    target: Int[Tensor, "B T"]
    weight: Float[Tensor, "B T"]


class PieceEncoder:
    """Token ids of a text without special tokens, as the tokenizer gives them, from a table of its pieces.

    Texts of the scenes are made of a few hundred pieces, so looking them up is several times faster than the tokenizer,
    and making text is what keeps the data workers busy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._pieces = re.compile(PIECES)
        self._table: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces.findall(text):
            known = self._table.get(piece)
            if known is None:
                known = self._table[piece] = self._tokenizer.encode(piece, add_special_tokens=False)
            ids += known
        return ids


def pack_turns(
    pictures: Sequence[Sequence[Turn]],
    encode: PieceEncoder,
    kinds: Sequence[str],
    *,
    tokens: int,
    end: int,
    most: int = 16,
) -> PackedTurns:
    """The turns of each picture in `tokens` slots; a turn that no longer fits is dropped.

    Args:
        pictures: The turns of each picture.
        encode: Text to token ids.
        kinds: All kinds of turn.
        tokens: Slots for each picture; unused ones hold `end`.
        end: The id of `</s>`.
        most: Most turns of a picture.
    """
    number_of = {kind: number for number, kind in enumerate(kinds)}
    packed = PackedTurns(
        ids=np.full((len(pictures), tokens), end, np.int64),
        lengths=np.zeros((len(pictures), most), np.int64),
        answers=np.zeros((len(pictures), most), np.int64),
        kinds=np.full((len(pictures), most), -1, np.int64),
    )
    for row, turns in enumerate(pictures):
        ids: list[int] = []
        taken: list[tuple[int, int, int]] = []
        for turn in turns:
            question = encode(f"\n{turn.question} ASSISTANT:")
            answer = [*encode(f" {turn.answer}"), end]
            length = len(question) + len(answer)
            if len(ids) + length <= tokens and len(taken) < most:
                ids += question + answer
                taken.append((length, len(answer), number_of[turn.kind]))
        packed.ids[row, : len(ids)] = ids
        if taken:
            table = np.array(taken)
            for array, column in zip(packed[1:], table.T, strict=True):
                array[row, : len(table)] = column
    return packed


def turn_layout(ids: Int[Tensor, "B T"], lengths: Int[Tensor, "B M"], answers: Int[Tensor, "B M"]) -> TurnLayout:
    """Turns, offsets, targets and weights of the slots of packed turns."""
    most = lengths.shape[1]
    slots = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1).contiguous()
    ends = lengths.cumsum(1)
    turn = torch.searchsorted(ends, slots, right=True)  # `most` for padding
    own = turn.clamp(max=most - 1)
    length, answer = lengths.gather(1, own), answers.gather(1, own)
    offset = slots - (ends.gather(1, own) - length)
    predicts = (turn < most) & (offset >= length - answer - 1) & (offset < length - 1)
    target = torch.where(predicts, ids.roll(-1, dims=1), IGNORE)
    weight = torch.where(predicts, answer.clamp(min=1).float().rsqrt(), 0.0)
    return TurnLayout(turn, offset, target, weight)


def turn_bias(
    turn: Int[Tensor, "B T"], prefix: int, dtype: torch.dtype, real: Bool[Tensor, "B P"] | None = None
) -> Float[Tensor, "B 1 T S"]:
    """0 where a turn's token sees, else minus infinity: it sees the prefix and what came before it in its own turn.

    Of the prefix it sees what is `real`, or all.
    """
    steps = torch.arange(turn.shape[1], device=turn.device)
    own = (turn[:, :, None] == turn[:, None, :]) & (steps[:, None] >= steps)
    bias = torch.zeros(own.shape, dtype=dtype, device=turn.device).masked_fill_(~own, -torch.inf)
    bias = functional.pad(bias, (prefix, 0))
    if real is not None:
        bias[:, :, :prefix].masked_fill_(~real[:, None], -torch.inf)
    return bias[:, None]


def project_heads(
    layer: LlamaDecoderLayer | Qwen2_5_VLDecoderLayer,
    states: Float[Tensor, "B S L"],
    cos: Float[Tensor, "B S E"],
    sin: Float[Tensor, "B S E"],
) -> tuple[Float[Tensor, "B H S E"], Float[Tensor, "B H S E"], Float[Tensor, "B H S E"]]:
    """(query, key, value) of a stock LLaMA or Qwen layer, all of its heads with keys of their own."""
    attention, normed = layer.self_attn, layer.input_layernorm(states)
    query, key, value = (
        project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return rotate(query, cos, sin).to(value.dtype), rotate(key, cos, sin).to(value.dtype), value


def attend(
    query: Float[Tensor, "B H S E"],
    key: Float[Tensor, "B H S E"],
    value: Float[Tensor, "B H S E"],
    bias: Float[Tensor, "B 1 T S"],
    *,
    turns_only: bool,
) -> Float[Tensor, "B R HE"]:
    """Attention of each token, or of the turns' only: causal within the prefix, by `bias` from the turns."""
    prefix = query.shape[2] - bias.shape[2]
    attended = functional.scaled_dot_product_attention(query[:, :, prefix:], key, value, attn_mask=bias)
    if not turns_only:
        query, key, value = (part[:, :, :prefix] for part in (query, key, value))
        before = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = torch.cat((before, attended), dim=2)
    return attended.transpose(1, 2).flatten(2)


def mix_heads(
    layer: LlamaDecoderLayer | Qwen2_5_VLDecoderLayer, states: Float[Tensor, "B R L"], attended: Float[Tensor, "B R HE"]
) -> Float[Tensor, "B R L"]:
    """The rest of a stock LLaMA or Qwen layer after its attention."""
    states = states + layer.self_attn.o_proj(attended)
    return states + layer.mlp(layer.post_attention_layernorm(states))


class LayerParts(NamedTuple):
    """The two parts of a layer around its attention, as they are or compiled.

    Attention itself stays out of it: compiled for every prefix length at once it is not reliable.
    """

    project: Callable[..., tuple[Tensor, Tensor, Tensor]] = project_heads
    mix: Callable[..., Tensor] = mix_heads


PLAIN = LayerParts()


def shared_prefix_states(
    language: LlamaModel | Qwen2_5_VLTextModel,
    prefix: Float[Tensor, "B P L"],
    prefix_positions: Int[Tensor, "*R B P"],
    turns: Float[Tensor, "B T L"],
    turn_positions: Int[Tensor, "*R B T"],
    turn: Int[Tensor, "B T"],
    *,
    real: Bool[Tensor, "B P"] | None = None,
    parts: LayerParts = PLAIN,
) -> Float[Tensor, "B T L"]:
    """The last hidden states of the turns' tokens, after the final norm.

    Args:
        language: The stock decoder.
        prefix: Embeddings of what all turns see.
        prefix_positions: Their positions; gaps are where tokens were dropped. Qwen's decoder takes three for each.
        turns: Embeddings of the turns' tokens.
        turn_positions: Their positions: every turn starts just behind the whole, unpruned prefix.
        turn: Which turn a token is of.
        real: False at padding, which stands at the end of a prefix that is shorter than others.
        parts: The parts of a layer, as they are or compiled.
    """
    states = torch.cat((prefix, turns), dim=1)
    positions = torch.cat((prefix_positions, turn_positions), dim=-1)
    # Angles grow with the position, so float32 whatever the states are; the first argument lends its type only.
    cos, sin = language.rotary_emb(states.new_empty(0, dtype=torch.float32), positions)
    bias = None
    for layer in language.layers:
        query, key, value = parts.project(layer, states, cos, sin)
        if bias is None:
            bias = turn_bias(turn, prefix.shape[1], value.dtype, real)
        last = layer is language.layers[-1]  # nobody reads the prefix behind the last attention
        attended = attend(query, key, value, bias, turns_only=last)
        if last:
            states = states[:, prefix.shape[1] :].contiguous()
        states = parts.mix(layer, states, attended)
    return language.norm(states)
