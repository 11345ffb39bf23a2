"""MMTok: what is covered, what a pick gains, and the release's choice on 576 tokens."""

import pytest
import torch
from torch import Tensor

from diffprune.methods.mmtok import MMTok
from diffprune.methods.options import build_method
from diffprune.types import VisualTokens
from tests.methods.examples import kept, make_tokens


def mmtok(**options: object) -> MMTok:
    method = build_method("mmtok", **options)
    assert isinstance(method, MMTok)
    return method


def test_the_first_pick_covers_the_words_and_the_next_covers_the_picture() -> None:
    projected = torch.eye(4)[None]
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0]]])  # three alike, one alone
    tokens = VisualTokens(x=x, projected=projected, text=projected[:, 1:2])  # one word, which is token 1's
    assert kept(mmtok().select(tokens, torch.tensor([1])))[0] == [1]
    # The word is covered and tokens 0 and 2 are much like token 1, so what is left to gain is the lone token.
    assert kept(mmtok().select(tokens, torch.tensor([2])))[0] == [1, 3]


def test_a_token_s_gain_is_what_its_column_sums_to() -> None:
    tokens = make_tokens((4,))
    coverage = mmtok(visual_weight=0.5).coverage(tokens)[0]  # 5 words, 4 tokens
    assert coverage.shape == (9, 4)
    torch.testing.assert_close(coverage[:5].sum(), torch.tensor(1.0))
    torch.testing.assert_close(coverage[5:].sum(), torch.tensor(0.5))
    assert kept(mmtok().select(tokens, torch.tensor([1])))[0] == [int(coverage.sum(0).argmax())]


def test_padding_is_neither_covered_nor_covers() -> None:
    tokens = make_tokens((6, 4))
    assert tokens.text_mask is not None
    tokens.text_mask[1, 3:] = False
    coverage = mmtok().coverage(tokens)[1]
    assert (coverage[:, 4:] == 0).all() and (coverage[3:5] == 0).all() and (coverage[5 + 4 :] == 0).all()
    torch.testing.assert_close(coverage[:3].sum(-1), torch.full((3,), 1 / 3))


def test_a_prompt_without_words_leaves_the_picture_to_cover() -> None:
    tokens = make_tokens((6,))
    silent = VisualTokens(
        x=tokens.x, projected=tokens.projected, text=tokens.text, text_mask=torch.zeros(1, 5, dtype=torch.bool)
    )
    shares = torch.nn.functional.cosine_similarity(tokens.x[:, :, None], tokens.x[:, None], dim=-1).div(0.2).softmax(-1)
    assert kept(mmtok().select(silent, torch.tensor([1])))[0] == [int(shares[0].sum(0).argmax())]


def reference(x: Tensor, projected: Tensor, text: Tensor, k: int) -> list[int]:
    """The formulas word by word."""
    x, projected, text = (value / value.norm(dim=-1, keepdim=True) for value in (x, projected, text))
    words = (text @ projected.T / 0.02).softmax(-1) / len(text)
    coverage = torch.cat([words, 0.5 * (x @ x.T / 0.2).softmax(-1) / len(x)])
    covered, taken = torch.zeros(len(coverage)), []
    for _ in range(k):
        gain = (coverage - covered[:, None]).clamp(min=0).sum(0)
        gain[taken] = -1.0
        taken.append(int(gain.argmax()))
        covered = covered.maximum(coverage[:, taken[-1]])
    return sorted(taken)


@pytest.mark.parametrize("k", [128, 64, 32])
@pytest.mark.parametrize("native", [False, True])
def test_576_tokens_give_the_formula_s_choice(k: int, native: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    x, projected, text = (torch.randn(1, *shape, generator=generator) for shape in ((576, 64), (576, 96), (7, 96)))
    keep = mmtok(native=native).select(VisualTokens(x=x, projected=projected, text=text), torch.tensor([k]))
    assert kept(keep)[0] == reference(x[0], projected[0], text[0], k)


def test_native_takes_lengths_in_the_tokens_own_type() -> None:
    tokens = make_tokens((12,))
    assert tokens.projected is not None and tokens.text is not None
    half = VisualTokens(x=tokens.x.half(), projected=tokens.projected.half(), text=tokens.text.half())
    ours, native = mmtok().coverage(half), mmtok(native=True).coverage(half)
    assert ours.dtype == native.dtype == torch.float32
    assert not torch.equal(ours, native)
    torch.testing.assert_close(ours, native, rtol=0.1, atol=1e-3)


def test_what_is_missing_is_named() -> None:
    x, projected = torch.zeros(1, 4, 2), torch.randn(1, 4, 6)
    k = torch.tensor([2])
    with pytest.raises(ValueError, match=r"VisualTokens\.projected"):
        mmtok().select(VisualTokens(x=x), k)
    with pytest.raises(ValueError, match=r"VisualTokens\.text"):
        mmtok().select(VisualTokens(x=x, projected=projected), k)
    with pytest.raises(ValueError, match="width 6 and text has 5"):
        mmtok().select(VisualTokens(x=x, projected=projected, text=torch.randn(1, 3, 5)), k)


@pytest.mark.parametrize("option, value", [("tau_text", 0.0), ("tau_visual", -1.0), ("visual_weight", -0.5)])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        build_method("mmtok", **{option: value})
