"""What pictures, and tiles of pictures, have of a loss as what prompts have of it."""

import torch

from diffprune.backbones.prompts import Batch
from diffprune.tiles import mean_by_image


def test_a_prompt_has_the_mean_of_its_pictures_and_one_without_has_nothing() -> None:
    values = torch.tensor([1.0, 3.0, 5.0])
    batch = Batch(features={"input_ids": torch.zeros(3, 1, dtype=torch.long)}, row_of_image=(0, 0, 2))
    assert batch.sum_by_prompt(values).tolist() == [4.0, 0.0, 5.0]
    assert batch.mean_by_prompt(values).tolist() == [2.0, 0.0, 5.0]
    one_each = Batch(features=batch.features, row_of_image=(0, 1, 2))
    assert one_each.mean_by_prompt(values) is values
    none = Batch(features=batch.features)
    assert none.sum_by_prompt(torch.zeros(0)).tolist() == [0.0, 0.0, 0.0]


def test_a_picture_has_the_mean_of_its_tiles() -> None:
    image = torch.tensor([0, 0, 1])
    assert mean_by_image(torch.tensor([1.0, 3.0, 5.0]), image, 3).tolist() == [2.0, 5.0, 0.0]
