"""Channel statistics: real tokens only, any number of batches, and no use before they are there."""

import pytest
import torch

from diffprune.nn import FeatureStatistics


def test_batches_add_up_and_padding_does_not_count() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 10, 6) * torch.arange(1, 7) + 100
    mask = torch.rand(4, 10) < 0.7
    padded = torch.where(mask[..., None], x, float("nan"))
    statistics = FeatureStatistics(6)
    statistics.calibrate([(padded[:1], mask[:1]), (padded[1:], mask[1:])])
    mean, std = statistics(6)
    torch.testing.assert_close(mean, x[mask].mean(0))
    torch.testing.assert_close(std, x[mask].double().std(0, correction=0).float())


def test_patches_of_a_token_share_their_channels() -> None:
    x = torch.randn(2, 5, 12)
    mask = torch.ones(2, 5, dtype=torch.bool)
    statistics = FeatureStatistics(4)
    statistics.calibrate([(x, mask)])
    mean, std = statistics(12)
    torch.testing.assert_close(mean, x.view(-1, 4).mean(0).repeat(3))
    assert torch.equal(std[:4], std[4:8]) and std.shape == (12,)


def test_an_empty_calibration_and_none_at_all_are_refused() -> None:
    statistics = FeatureStatistics(4)
    with pytest.raises(ValueError, match="no visual token"):
        statistics.calibrate([(torch.randn(1, 3, 4), torch.zeros(1, 3, dtype=torch.bool))])
    with pytest.raises(ValueError, match="not calibrated"):
        statistics(4)
