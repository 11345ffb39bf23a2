"""CDPruner: relevance, the conditional kernel, and what it says where there is no common space."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel

from diffprune.methods.cdpruner import CDPruner
from diffprune.methods.options import build_method
from diffprune.types import VisualTokens
from tests.methods.clip import joint_already
from tests.methods.examples import kept


def cdpruner(**options: object) -> CDPruner:
    method = build_method("cdpruner", **options)
    assert isinstance(method, CDPruner)
    return method


def plane(*degrees: float) -> Tensor:
    angle = torch.tensor(degrees).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None]


def choose(tokens: VisualTokens, k: int, **options: object) -> list[int]:
    return kept(cdpruner(**options).select(tokens, torch.tensor([k])))[0]


def choose_by_clip(tokens: VisualTokens, k: int, **options: object) -> list[int]:
    """What CDPruner keeps with a CLIP in whose joint space the features are."""
    method = cdpruner(**options)
    method.attach_clip(joint_already(tokens.x.shape[-1]))
    return kept(method.select(tokens, torch.tensor([k])))[0]


def test_relevance_and_diversity_weigh_against_each_other() -> None:
    projected = plane(0, 5, 60, 90)
    tokens = VisualTokens(x=projected, projected=projected, text=plane(0))
    relevance = cdpruner().relevance(tokens)[0]
    wanted = (plane(0, 5, 60, 90)[0, :, 0] + 1e-6) / 1.0
    torch.testing.assert_close(relevance, wanted)
    assert choose(tokens, 1) == [0]
    # Left outside token 0: 0 of token 1, r sin = 0.5 * 0.87 of token 2, next to nothing of token 3 (irrelevant).
    assert choose(tokens, 2) == [0, 2]
    assert choose(tokens, 2, relevance="none") == [0, 3]


def test_without_relevance_rounding_does_not_choose_the_first_token() -> None:
    """All stand equal then, so the first of them goes first, in a batch as alone; in float32 a token's cosine with
    itself is often a little off 1."""
    projected = torch.randn(40, 12, 20, generator=torch.Generator().manual_seed(0))
    off = functional.normalize(projected, dim=-1)
    assert ((off @ off.mT).diagonal(dim1=1, dim2=2).argmax(-1) > 0).any()
    tokens = VisualTokens(x=projected, projected=projected)
    chosen = cdpruner(relevance="none").select(tokens, 1)
    assert chosen.eq(0).all()
    padded = torch.cat([projected, torch.full_like(projected, 1e3)], dim=1)
    mask = torch.arange(24).expand(40, -1) < 12
    in_batch = cdpruner(relevance="none").select(VisualTokens(x=padded, mask=mask, projected=padded), 4)
    assert in_batch.equal(cdpruner(relevance="none").select(tokens, 4))
    nothing = VisualTokens(x=torch.zeros(1, 3, 20), projected=torch.zeros(1, 3, 20))
    assert choose(nothing, 2, relevance="none") == [0, 1]


def test_the_release_calls_the_least_similar_patch_the_most_relevant() -> None:
    embeddings = plane(0, 30, 80)
    tokens = VisualTokens(x=embeddings, projected=torch.eye(3)[None], text=plane(0))
    assert choose_by_clip(tokens, 1, native=True) == [2]
    assert choose_by_clip(tokens, 1, relevance="clip") == [2]
    assert choose(VisualTokens(x=embeddings, projected=embeddings, text=plane(0)), 1) == [0]  # ours: the most similar


def test_segments_of_a_question_are_averaged_and_padded_text_has_no_part() -> None:
    projected = plane(0, 45, 90)
    two = torch.cat([plane(0), plane(90)], dim=1)
    both = VisualTokens(x=projected, projected=projected, text=two)
    torch.testing.assert_close(cdpruner().relevance(both), torch.tensor([[1e-6, 1.0, 1e-6]]), atol=1e-4, rtol=0)
    first = VisualTokens(x=projected, projected=projected, text=two, text_mask=torch.tensor([[True, False]]))
    alone = VisualTokens(x=projected, projected=projected, text=plane(0))
    torch.testing.assert_close(cdpruner().relevance(first), cdpruner().relevance(alone))


def test_equal_relevance_is_relevance_one() -> None:
    projected = plane(10, 10, 10)
    tokens = VisualTokens(x=projected, projected=projected, text=plane(0))
    assert cdpruner().relevance(tokens).tolist() == [[1.0, 1.0, 1.0]]


def reference(embeddings: Tensor, projected: Tensor, text: Tensor, k: int) -> list[int]:
    """The formulas word by word."""
    visual, words = (value / value.norm(dim=-1, keepdim=True) for value in (embeddings, text))
    relevance = -(visual @ words.T).mean(-1)
    relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    unit = projected / projected.norm(dim=-1, keepdim=True)
    kernel = relevance[:, None] * (unit @ unit.T) * relevance
    residual, factors, taken = kernel.diagonal().clone(), [], []
    for _ in range(k):
        pick = int(residual.argmax())
        factor = (kernel[pick] - sum(c[pick] * c for c in factors)) / residual[pick].sqrt()
        factors.append(factor)
        residual = residual - factor.square()
        taken.append(pick)
        residual[taken] = -torch.inf
    return sorted(taken)


@pytest.mark.parametrize("k", [128, 64, 32])
def test_576_tokens_give_the_release_s_choice(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    embeddings, projected, text = (
        torch.randn(1, *shape, generator=generator) for shape in ((576, 48), (576, 160), (2, 48))
    )
    tokens = VisualTokens(x=embeddings, projected=projected, text=text)
    assert choose_by_clip(tokens, k, native=True) == reference(embeddings[0], projected[0], text[0], k)


def test_a_clip_model_takes_the_patches_into_the_joint_space() -> None:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    clip = CLIPModel(
        CLIPConfig(
            text_config={**tower, "vocab_size": 20},
            vision_config={**tower, "image_size": 8, "patch_size": 4},
            projection_dim=6,
        )
    )
    nn.init.normal_(clip.vision_model.post_layernorm.weight)
    generator = torch.Generator().manual_seed(1)
    x, projected = (torch.randn(1, *shape, generator=generator) for shape in ((9, 16), (9, 24)))
    with torch.no_grad():
        text = clip.get_text_features(input_ids=torch.tensor([[1, 5, 3], [1, 2, 3]])).pooler_output[None]
    tokens = VisualTokens(x=x, projected=projected, text=text)
    method = cdpruner(native=True)
    method.attach_clip(clip)
    with torch.no_grad():
        embeddings = clip.visual_projection(clip.vision_model.post_layernorm(x))
    assert kept(method.select(tokens, torch.tensor([3])))[0] == reference(embeddings[0], projected[0], text[0], 3)
    assert method.state_dict() == {}  # CLIP is never saved with the pruner
    with pytest.raises(ValueError, match="width 6 with text of width 5: not one space"):
        method.select(VisualTokens(x=x, projected=projected, text=torch.randn(1, 3, 5)), torch.tensor([3]))


@pytest.mark.parametrize("options", [{"native": True}, {"relevance": "clip"}], ids=str)
def test_without_a_clip_model_nothing_is_compared_even_where_widths_agree(options: dict[str, object]) -> None:
    x = torch.randn(1, 9, 6, generator=torch.Generator().manual_seed(0))
    tokens, k = VisualTokens(x=x, projected=x, text=x[:, :2]), torch.tensor([3])
    method = cdpruner(**options)
    with pytest.raises(ValueError, match=r"no CLIP model is attached; call method\.attach_clip\(CLIPModel"):
        method.select(tokens, k)
    method.attach_clip(joint_already(6))
    assert method.select(tokens, k).shape == (1, 3)
    assert method.needs == {"projected"}  # the text a backbone gives is not CLIP's
    with pytest.raises(ValueError, match=r"VisualTokens\.text, which is None; .*text tower"):
        method.select(VisualTokens(x=x, projected=x), k)
    assert cdpruner().needs == {"projected", "text"} and cdpruner(relevance="none").needs == {"projected"}


def test_what_is_missing_is_named_with_the_way_out() -> None:
    x, projected = torch.zeros(1, 4, 2), torch.randn(1, 4, 6)
    with pytest.raises(ValueError, match=r"VisualTokens\.projected"):
        choose(VisualTokens(x=x), 2)
    with pytest.raises(ValueError, match=r"VisualTokens\.text, which is None.*relevance='none'"):
        choose(VisualTokens(x=x, projected=projected), 2)
    assert len(choose(VisualTokens(x=x, projected=projected), 2, relevance="none")) == 2
    with pytest.raises(ValueError, match=r"width 6 with text of width 5.*relevance='none'"):
        choose(VisualTokens(x=x, projected=projected, text=torch.randn(1, 3, 5)), 2)
    with pytest.raises(ValueError, match="relevance='siglip'"):
        build_method("cdpruner", relevance="siglip")
