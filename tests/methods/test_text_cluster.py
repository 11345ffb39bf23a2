"""Text-guided clustering: relevance, clusters, and how the budget is shared."""

import pytest
import torch
from torch import Tensor

from diffprune.methods.options import build_method
from diffprune.methods.text_cluster import density_peaks, text_relevance
from diffprune.types import VisualTokens
from tests.methods.examples import kept


def plane(*degrees: float) -> Tensor:
    angle = torch.tensor(degrees).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None]


def choose(projected: Tensor, text: Tensor, k: int, **options: object) -> list[int]:
    tokens = VisualTokens(x=projected, projected=projected, text=text)
    return kept(build_method("text_cluster", **options).select(tokens, torch.tensor([k])))[0]


def test_relevance_is_to_the_nearest_word() -> None:
    projected = plane(0, 45, 90, 180)
    tokens = VisualTokens(x=projected, projected=projected, text=plane(0, 90), text_mask=torch.tensor([[True, True]]))
    torch.testing.assert_close(text_relevance(tokens)[0], torch.tensor([1.0, 0.5**0.5, 1.0, 0.0]))


def test_a_prompt_without_words_finds_all_equally_relevant() -> None:
    projected = plane(0, 45, 90)
    for text, mask in ((plane(0), torch.tensor([[False]])), (plane(0)[:, :0], None)):
        tokens = VisualTokens(x=projected, projected=projected, text=text, text_mask=mask)
        assert text_relevance(tokens).tolist() == [[1.0, 1.0, 1.0]]


def test_two_heaps_are_two_clusters() -> None:
    place = torch.tensor([0.0, 0.1, 0.2, 5.0, 5.1, 5.2])
    distance = (place[:, None] - place).abs()[None]
    cluster = density_peaks(distance, torch.tensor([2]), torch.ones(1, 6, dtype=torch.bool), neighbours=2)[0]
    assert cluster.tolist() == [1, 1, 1, 4, 4, 4]  # each heap's middle is its centre


def test_padding_belongs_to_nothing_that_counts() -> None:
    place = torch.tensor([0.0, 0.1, 0.2, 5.0, 5.1, 5.2])
    distance = (place[:, None] - place).abs()[None]
    mask = torch.tensor([[True, True, True, True, False, False]])
    cluster = density_peaks(distance, torch.tensor([2]), mask, neighbours=2)[0, :4]
    assert cluster.tolist() == density_peaks(
        distance[:, :4, :4], torch.tensor([2]), mask[:, :4], neighbours=2
    )[0].tolist()  # fmt: skip


def test_every_cluster_keeps_one_and_the_relevant_one_keeps_more() -> None:
    relevant, other = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0), (80.0, 82.0, 84.0, 86.0, 88.0, 90.0)
    keep = choose(plane(*relevant, *other), plane(0), 4, tokens_per_cluster=2)
    assert len([token for token in keep if token < 6]) == 3
    assert 0 in keep and 6 in keep  # the most relevant of each


def test_a_cluster_is_never_asked_for_more_than_it_has() -> None:
    keep = choose(plane(0.0, 1.0, 80.0, 82.0, 84.0, 86.0), plane(0), 5, tokens_per_cluster=3)
    assert len(keep) == 5 and {0, 1} <= set(keep)


def test_another_question_is_another_choice() -> None:
    projected = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(0))
    assert choose(projected, projected[:, :1], 6) != choose(projected, projected[:, 1:2], 6)


def test_what_is_missing_is_named() -> None:
    x, projected, k = torch.zeros(1, 4, 2), torch.randn(1, 4, 6), torch.tensor([2])
    method = build_method("text_cluster")
    with pytest.raises(ValueError, match=r"VisualTokens\.projected"):
        method.select(VisualTokens(x=x), k)
    with pytest.raises(ValueError, match=r"VisualTokens\.text"):
        method.select(VisualTokens(x=x, projected=projected), k)
    with pytest.raises(ValueError, match="width 6 and text has 5"):
        method.select(VisualTokens(x=x, projected=projected, text=torch.randn(1, 3, 5)), k)


@pytest.mark.parametrize("option", ["tokens_per_cluster", "neighbours"])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0"):
        build_method("text_cluster", **{option: 0})
