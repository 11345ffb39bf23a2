"""VisionZip: dominant tokens by attention, the rest merged into contextual ones."""

import pytest
import torch

from diffprune.methods.options import build_method
from diffprune.methods.visionzip import VisionZip
from diffprune.types import VisualTokens
from tests.methods.examples import SPEC, kept


def visionzip(**options: object) -> VisionZip:
    method = build_method("visionzip", **options)
    assert isinstance(method, VisionZip)
    return method


def small() -> VisualTokens:
    """7 tokens; 1 and 4 are dominant at k = 4 with two contextual tokens, of the rest 0 and 3 are targets."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.0], [0.2, 1.0], [1.0, 0.3]])
    attention = torch.tensor([0.1, 0.9, 0.2, 0.3, 0.8, 0.0, 0.1])
    x = torch.tensor([[1.0], [10.0], [2.0], [4.0], [20.0], [8.0], [16.0]])
    return VisualTokens(x=x[None], keys=keys[None], cls_attention=attention[None])


def test_a_contextual_token_is_its_target_plus_the_mean_of_its_own() -> None:
    merged = visionzip(contextual=2).reduce(small(), torch.tensor([4]))
    # Rest 0 2 3 5 6, every second: targets 0 and 3. 2 and 6 go to 0, 5 to 3.
    assert merged.index.tolist() == [[0, 1, 3, 4]]
    assert merged.x[0, :, 0].tolist() == [1 + (2 + 16) / 2, 10.0, 4 + 8.0, 20.0]


def test_natively_cls_is_counted_and_contextual_tokens_come_last() -> None:
    merged = visionzip(contextual=2, native=True).reduce(small(), torch.tensor([5]))
    assert merged.index.tolist() == [[1, 4, 0, 3]]
    assert merged.x[0, :, 0].tolist() == [10.0, 20.0, 10.0, 12.0]
    assert merged.in_raster_order().index.tolist() == [[0, 1, 3, 4]]
    assert merged.in_raster_order().x[0, :, 0].tolist() == [10.0, 10.0, 12.0, 20.0]


@pytest.mark.parametrize("k, dominant, contextual", [(128, 107, 20), (64, 53, 10), (32, 26, 5)])
def test_the_native_split_is_the_release_s(k: int, dominant: int, contextual: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x, keys = torch.randn(576, 32, generator=generator), torch.randn(576, 16, generator=generator)
    attention = torch.rand(576, generator=generator)
    tokens = VisualTokens(x=x[None], keys=keys[None], cls_attention=attention[None])
    chosen = sorted(sorted(range(576), key=lambda token: -float(attention[token]))[:dominant])
    rest = [token for token in range(576) if token not in chosen]
    targets = rest[:: len(rest) // contextual][:contextual]
    merged = visionzip(native=True).reduce(tokens, torch.tensor([k]))
    assert kept(merged.index)[0] == chosen + targets
    unit = torch.nn.functional.normalize(keys, dim=-1)
    free = [token for token in rest if token not in targets]
    nearest = (unit[free] @ unit[targets].T).argmax(-1)
    for place, target in enumerate(targets):
        own = [token for token, home in zip(free, nearest.tolist(), strict=True) if home == place]
        torch.testing.assert_close(merged.x[0, dominant + place], x[target] + x[own].mean(0), rtol=1e-4, atol=1e-5)
    ours = visionzip().reduce(tokens, torch.tensor([k]))
    assert len(set(ours.index[0].tolist())) == k and ours.x.shape == (1, k, 32)


def test_keys_are_averaged_over_the_tower_s_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 12, 16, generator=generator)  # two heads of 8
    x, attention = torch.randn(1, 12, 16, generator=generator), torch.rand(1, 12, generator=generator)
    wide = VisualTokens(x=x, keys=keys, cls_attention=attention)
    mean = VisualTokens(x=x, keys=keys.unflatten(-1, (2, 8)).mean(-2), cls_attention=attention)
    k, method = torch.tensor([4]), build_method("visionzip", block=SPEC, contextual=3)
    assert isinstance(method, VisionZip)
    torch.testing.assert_close(method.reduce(wide, k).x, method.reduce(mean, k).x)
    by_heads = visionzip(contextual=3, heads=2).reduce(wide, k)
    torch.testing.assert_close(by_heads.x, method.reduce(wide, k).x)
    assert not torch.allclose(by_heads.x, visionzip(contextual=3, heads=1).reduce(wide, k).x)


def test_keys_of_all_heads_without_their_number_are_refused() -> None:
    x = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0))
    tokens, k = VisualTokens(x=x, keys=x, cls_attention=x[..., 0].abs()), torch.tensor([4])
    with pytest.raises(ValueError, match=r"keys of width 16 it does not know how many; give heads=16"):
        visionzip().reduce(tokens, k)
    with pytest.raises(ValueError, match="heads=3 does not split keys of width 16"):
        visionzip(heads=3).reduce(tokens, k)
    with pytest.raises(ValueError, match="heads=0 is no number of heads"):
        visionzip(heads=0)


def test_a_budget_without_room_for_a_dominant_token_names_the_smallest() -> None:
    with pytest.raises(ValueError, match=r"keep=2 leaves VisionZip no dominant token beside 2 .* keep at least 3"):
        visionzip(contextual=2).reduce(small(), torch.tensor([2]))
    with pytest.raises(ValueError, match=r"and \[CLS\]; keep at least 4"):
        visionzip(contextual=2, native=True).reduce(small(), torch.tensor([3]))
    with pytest.raises(ValueError, match="keep at least 2"):
        visionzip(native=True).reduce(small(), torch.tensor([1]))
    with pytest.raises(ValueError, match="keep at least 6"):
        visionzip(contextual=0.9).reduce(small(), torch.tensor([3]))
    for k in (6, 7):
        assert visionzip(contextual=0.9).reduce(small(), torch.tensor([k])).x.shape[1] == k


def test_without_contextual_tokens_it_is_attention_alone() -> None:
    assert kept(visionzip(contextual=0).select(small(), torch.tensor([3]))) == [[1, 3, 4]]


def test_visionzip_asks_for_the_keys() -> None:
    with pytest.raises(ValueError, match=r"VisualTokens\.keys"):
        visionzip().select(VisualTokens(x=torch.zeros(1, 4, 2), cls_attention=torch.ones(1, 4)), torch.tensor([2]))


@pytest.mark.parametrize("value", [-1, 1.0, True])
def test_a_contextual_part_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"contextual={value}|option 'contextual' of .* not '{value}'"):
        build_method("visionzip", contextual=value)
