"""Training on captions: what is drawn, what learns, and what is refused."""

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens
from diffprune_lab.scenes import Rng, captions, make_scene
from diffprune_lab.scenes.captions import caption_batch, item_regions, train_on_captions
from diffprune_lab.scenes.language import caption
from lab.tests import tiny_scenes
from tests import tiny


def test_a_caption_batch_is_what_prepare_would_give() -> None:
    from diffprune_lab.scenes import pack, render
    from diffprune_lab.scenes.encode import to_images

    vlm = tiny_scenes.pruned("diffprune")
    scenes = [make_scene("train", index) for index in range(3)]
    texts = [caption(scene, Rng(0, index)) for index, scene in enumerate(scenes)]
    batch, tokens = caption_batch(vlm, scenes, texts)
    images = to_images(render(pack(scenes)))
    theirs = vlm.prepare(images, [captions.INSTRUCTION] * 3, texts)
    assert torch.equal(batch.features["input_ids"], theirs.features["input_ids"])
    assert torch.equal(batch.features["attention_mask"], theirs.features["attention_mask"])
    assert batch.labels is not None and theirs.labels is not None and torch.equal(batch.labels, theirs.labels)
    ours = vlm.loss(batch, tokens=tokens, keep=4, hard=True)
    torch.testing.assert_close(ours, vlm.loss(theirs, keep=4, hard=True))


def losses(method: str = "diffprune", *, steps: int = 3, **options: object) -> tuple[list[float], object]:
    tiny_scenes.build()  # once for all tests, so that its own draws come before the seed
    torch.manual_seed(0)
    vlm = tiny_scenes.pruned(method, 8, **options)
    return train_on_captions(vlm, steps=steps, batch_size=2, budgets=(2, 8), lr=1e-3), vlm


def test_a_run_can_be_repeated_and_another_seed_is_another_run() -> None:
    first, _ = losses()
    again, _ = losses()
    assert first == again
    other = train_on_captions(tiny_scenes.pruned("diffprune"), steps=1, batch_size=2, budgets=(2, 8), seed=1)
    assert other[0] != first[0]


@pytest.mark.parametrize("options", [{"method": "diffprune"}, {"method": "gumbel_ste"}, {"noise": "matched"}])
def test_the_scorer_learns_and_the_model_does_not(options: dict[str, str]) -> None:
    model, _ = tiny_scenes.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    values, vlm = losses(**options)
    assert len(values) == 3 and all(map(math.isfinite, values))
    assert vlm.method.scorer.head.weight.abs().sum() > 0  # it starts at zero
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_tokens_of_negligible_weight_may_leave_the_sequence() -> None:
    vlm = tiny_scenes.pruned("diffprune", standardise=False)  # logits as far apart as they are drawn
    torch.manual_seed(0)
    torch.nn.init.normal_(vlm.method.scorer.head.weight, std=30.0)
    lengths: list[int] = []
    first = vlm.backbone.language_model.layers[0]
    hook = first.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    for remove_below in (0.0, 0.01):
        train_on_captions(vlm, steps=1, batch_size=2, budgets=(4, 4), remove_below=remove_below, lr=1e-9)
    hook.remove()
    assert lengths[1] < lengths[0]


def test_matched_noise_is_calibrated_on_training_pictures() -> None:
    _, vlm = losses(noise="matched", steps=1)
    assert (vlm.method.throttle_noise.std > 0).all()


def test_a_time_limit_ends_the_run_in_place_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.05
        return now

    monkeypatch.setattr(time, "perf_counter", clock)
    done_at: list[float] = []
    values = train_on_captions(
        tiny_scenes.pruned("diffprune"),
        steps=10_000,
        batch_size=1,
        budgets=(2, 8),
        seconds=0.5,
        on_step=lambda done, loss: done_at.append(done),
    )
    assert 1 < len(values) <= 10  # the clock is read at least once a step
    assert len(done_at) == len(values) and done_at == sorted(done_at) and done_at[-1] <= 1.0


def test_each_picture_has_a_budget_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    loss = PrunedVLM.loss

    def record(vlm: PrunedVLM, *arguments: Any, keep: Tensor, **options: Any) -> Tensor:
        given.extend(keep.tolist())
        return loss(vlm, *arguments, keep=keep, **options)

    monkeypatch.setattr(PrunedVLM, "loss", record)
    train_on_captions(tiny_scenes.pruned("diffprune"), steps=10, batch_size=4, budgets=(2, 5))
    assert len(given) == 40 and set(given) == {2, 3, 4, 5}


def test_a_method_without_weights_and_an_empty_range_are_refused() -> None:
    with pytest.raises(ValueError, match="'random' has nothing to train"):
        train_on_captions(tiny_scenes.pruned("random"), steps=1, budgets=(2, 8))
    for budgets in ((8, 2), (0, 8)):
        with pytest.raises(ValueError, match="is no range of tokens"):
            train_on_captions(tiny_scenes.pruned("diffprune"), steps=1, budgets=budgets)


def test_regions_are_the_tokens_that_see_an_item() -> None:
    scene = make_scene("train", 0, seed=0)
    side, cell = 12, 16
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    where = torch.stack([columns, rows, columns + 1, rows + 1], dim=-1).flatten(0, 1) * float(cell)
    tokens = VisualTokens(x=torch.zeros(1, side * side, 8), boxes=where[None])
    found = item_regions(tokens, [scene])
    assert found is not None
    for thing in scene.things:
        x0, y0, x1, y1 = thing.box
        assert found[0, (y0 + y1) // 2 // cell * side + (x0 + x1) // 2 // cell]
    assert not found.all()
    assert item_regions(tokens, [tiny.picture(1)]) is None
