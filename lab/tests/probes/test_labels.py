"""Token labels of a classifier in training."""

from dataclasses import replace

import pytest
import torch

from diffprune.ops import take_tokens
from diffprune_lab.deit import DeiT
from diffprune_lab.probes.data import draw_photos, inside_box
from diffprune_lab.probes.deit import train_deit
from diffprune_lab.probes.labels import part_targets, token_targets
from diffprune_lab.probes.settings import SIZES


def targets_of(inside: list[list[float]]) -> torch.Tensor:
    return token_targets(torch.arange(len(inside)), torch.tensor(inside), 3)


def test_patches_name_their_class_inside_the_box_and_background_outside() -> None:
    targets = targets_of([[1.0, 0.0], [0.0, 1.0]])
    assert targets.argmax(-1).tolist() == [[0, 3], [3, 1]]
    torch.testing.assert_close(targets.sum(-1), torch.ones(2, 2))


def test_a_part_answers_for_what_it_shows_of_the_object() -> None:
    nothing, half, much = part_targets(targets_of([[0.0] * 4, [0.5, 0, 0, 0], [1.0] * 4]))
    torch.testing.assert_close(nothing, torch.full((3,), 1 / 3))
    torch.testing.assert_close(half, torch.tensor([1 / 6, 2 / 3, 1 / 6]))  # one whole patch would be enough
    torch.testing.assert_close(much, torch.tensor([0.0, 0.0, 1.0]))


def test_a_part_of_two_objects_answers_for_both() -> None:
    both = token_targets(torch.tensor([0, 1]), torch.tensor([[1.0, 1, 1], [1.0, 1, 1]]), 2)
    mixed = 0.25 * both + 0.75 * both.flip(0)
    torch.testing.assert_close(part_targets(mixed), torch.tensor([[0.25, 0.75], [0.75, 0.25]]))


@pytest.mark.slow
def test_a_classifier_with_token_labels_reads_the_object_and_not_the_meadow() -> None:
    """Although the background's colour says the class as well as the object does."""
    photos = draw_photos(128, seed=0)
    on_object = inside_box(photos.boxes, 32).view(-1, 1, 32, 32)
    meadow = torch.tensor([[200, 40, 40], [40, 200, 40], [40, 40, 200], [180, 180, 40]], dtype=torch.uint8)
    pixels = torch.where(on_object, photos.pixels, meadow[photos.labels][:, :, None, None])
    photos = replace(photos, pixels=pixels)
    inside = inside_box(photos.boxes, 8)
    trained = train_deit(
        "deit-tiny", photos, photos, shape=SIZES["tiny"].shape, epochs=30, batch=32, seconds=None, hide=0.9
    )
    assert trained.training is not None and (trained.training.labels, trained.training.parts) == ("tokens", "near")
    deit = DeiT(trained.model)
    encoded = deit.encode(trained.pixel_values(photos.pixels))
    sure: dict[str, float] = {}
    for part, shown in (("object", inside.float()), ("meadow", (~inside).float())):
        kept = take_tokens(encoded.tokens.x, shown.topk(4, -1).indices)
        answers = deit.logits(encoded.prefix, kept).softmax(-1)
        sure[part] = float(answers.gather(1, photos.labels[:, None]).mean())
    assert sure["meadow"] < sure["object"]
