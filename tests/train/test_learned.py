"""Every method that learns, on a tiny LLaVA: its loss falls, it alone changes, and what is saved answers the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diffprune.methods.base import TrainableLayerPruner
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS
from tests import tiny

# Those that have weights of their own to learn.
LEARNED = [name for name in METHODS.names() if METHODS.get(name).trained and not METHODS.get(name).deploys]
INSIDE = [name for name in LEARNED if issubclass(METHODS.get(name), TrainableLayerPruner)]
# What they are tried with on three layers; the data here tells no boxes, and no weight rises meanwhile.
OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic_llava": {"layer": 1},
    "glimpse_prune": {"supervision": "answer"},
    "visionselector": {"weight_end": 0.1},
    "oc_vtp": {"decoder_depth": 1},
}
RATES = {"p_mod": 0.03, "atp_llava": 0.03}
QUESTIONS, ANSWERS = ["what is it?", "and the small one, there?"], ["a red star", "left"]


def pictures() -> list[Any]:
    return [tiny.picture(1, (40, 30)), tiny.picture(2, (30, 40))]


def learner(name: str, **options: Any) -> PrunedVLM:
    torch.manual_seed(0)
    vlm = PrunedVLM(*tiny.build("llava"), method=name, keep=4, **OPTIONS.get(name, {}), **options)
    vlm.method.start_training()
    return vlm


def noise() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in (3, 4)]


@pytest.mark.parametrize("name", LEARNED)
def test_a_few_steps_lower_the_loss_and_change_the_method_alone(name: str, tmp_path: Path) -> None:
    vlm = learner(name)
    batch = vlm.prepare(pictures(), QUESTIONS, ANSWERS)
    tokens = vlm.encode(batch)
    before = {key: value.clone() for key, value in vlm.base.state_dict().items()}
    optimizer = torch.optim.AdamW(vlm.method.parameters(), lr=RATES.get(name, 3e-3))
    losses = []
    for _ in range(8):
        loss = vlm.loss(batch, tokens=tokens, tau=1.0, generator=noise())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-4:]) < losses[0] - 1e-3
    assert all(parameter.grad is None for parameter in vlm.base.parameters())
    assert all(torch.equal(value, before[key]) for key, value in vlm.base.state_dict().items())

    vlm.method.eval()
    vlm.save_pretrained(tmp_path, base_id="tiny")
    again = PrunedVLM.from_pretrained(tmp_path, base=vlm.base, processor=vlm.processor)
    assert not any("throttle_decoder" in key for key in again.method.state_dict())
    with torch.no_grad():
        assert torch.equal(*(one.loss(batch, tokens=tokens, hard=True) for one in (vlm, again)))
    answers = [one.generate(pictures(), QUESTIONS, max_new_tokens=3, return_ids=True) for one in (vlm, again)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", [*LEARNED, "dynamicvit[token_weight=0.5]", "gumbel_ste[choice=token]"])
@pytest.mark.parametrize("keep", [(4, 7), (4, 16)], ids=str)
def test_the_loss_of_a_batch_is_the_sum_of_its_parts(name: str, keep: tuple[int, int]) -> None:
    """Beside a picture that keeps all of its 16 tokens too."""
    vlm = learner(name)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.2)

    def loss(part: slice) -> torch.Tensor:
        batch = vlm.prepare(pictures()[part], QUESTIONS[part], ANSWERS[part])
        return vlm.loss(batch, keep=torch.tensor(keep[part]), generator=noise()[part], num_targets=9, num_prompts=2)

    torch.testing.assert_close(loss(slice(0, 2)), loss(slice(0, 1)) + loss(slice(1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dynamicvit", "dynamicvit[token_weight=0.5]"])
def test_the_unpruned_model_keeps_the_tokens_that_are_taken_out(name: str) -> None:
    """What a step is held to is the same whether hidden tokens are there or removed."""
    vlm = learner(name)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.2)
    batch = vlm.prepare(pictures(), QUESTIONS, ANSWERS)
    keep = torch.tensor([4, 16])  # nothing is taken out of the second
    left, right = (vlm.loss(batch, keep=keep, generator=noise(), remove_below=threshold) for threshold in (0.0, 1e-3))
    alone = learner(f"{name[:-1]};answer_weight=0.0]" if "[" in name else f"{name}[answer_weight=0.0;token_weight=0.0]")
    torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-5)
    alone.method.load_state_dict(vlm.method.state_dict())
    assert left > alone.loss(batch, keep=keep, generator=noise()) + 1e-4


@pytest.mark.parametrize("name", [*LEARNED, "gumbel_ste[choice=token]"])
def test_prompts_of_any_number_of_pictures_weigh_alike(name: str) -> None:
    vlm = learner(name)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.2)
    asked = [[tiny.picture(1), tiny.picture(2), tiny.picture(3)], [tiny.picture(4)], []]
    questions, answers = [*QUESTIONS, "and here?"], [*ANSWERS, "nothing"]

    def loss(part: slice, pictures: slice) -> torch.Tensor:
        batch = vlm.prepare(asked[part], questions[part], answers[part])
        own = [torch.Generator().manual_seed(seed) for seed in range(4)]
        drawn = own[part] if name in INSIDE else own[pictures]
        return vlm.loss(batch, keep=5, generator=drawn or None, num_targets=9, num_prompts=3)

    apart = loss(slice(0, 1), slice(0, 3)) + loss(slice(1, 2), slice(3, 4))
    if name == "oc_vtp":  # answers, and with them a prompt of text alone, have no part in it
        together = loss(slice(0, 2), slice(0, 4))
    else:
        together, apart = loss(slice(0, 3), slice(0, 4)), apart + loss(slice(2, 3), slice(4, 4))
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*(name for name in LEARNED if name not in INSIDE), "gumbel_ste[choice=token]"])
def test_pictures_of_any_number_of_tiles_weigh_alike(name: str) -> None:
    """Where each tile has its share of the budget; each picture may have a temperature of its own."""
    torch.manual_seed(0)
    vlm = PrunedVLM(*tiny.build("llava_next"), method=name, keep=20, budget="per_tile", **OPTIONS.get(name, {}))
    vlm.method.start_training()
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.2)
    asked = [tiny.picture(1, (40, 30)), tiny.picture(2, (60, 60))]
    tau = torch.tensor([0.7, 1.4], dtype=torch.float64)

    def loss(part: slice) -> torch.Tensor:
        batch = vlm.prepare(asked[part], QUESTIONS[part], ANSWERS[part])
        return vlm.loss(batch, tau=tau[part], generator=noise()[part], num_targets=9, num_prompts=2)

    torch.testing.assert_close(loss(slice(0, 2)), loss(slice(0, 1)) + loss(slice(1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", INSIDE)
def test_a_prompt_is_decided_the_same_in_any_batch(name: str) -> None:
    vlm = learner(name)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    keep, decided = torch.tensor([4, 7]), []
    for part in (slice(0, 2), slice(0, 1), slice(1, 2)):
        batch = vlm.prepare(pictures()[part], QUESTIONS[part], ANSWERS[part])
        tokens = vlm.encode(batch)
        assert tokens is not None
        decided.append(vlm.loss(batch, tokens=tokens, keep=keep[part], generator=noise()[part], return_alpha=True)[1])
    together, *alone = decided
    for row, own in enumerate(alone):
        torch.testing.assert_close(together[row, : own.shape[1]], own[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LEARNED)
def test_every_picture_may_have_a_temperature_of_its_own(name: str) -> None:
    vlm = learner(name)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    batch = vlm.prepare(pictures(), QUESTIONS, ANSWERS)
    learned = [parameter for parameter in vlm.method.parameters() if parameter.requires_grad]

    def gradients(tau: Any) -> torch.Tensor:
        vlm.zero_grad()
        vlm.method.eval()  # no pass of a training
        vlm.loss(batch, tau=tau, generator=noise()).backward()
        return torch.cat([one.grad.flatten() for one in learned if one.grad is not None])

    one = gradients(0.7)
    torch.testing.assert_close(gradients(torch.tensor([0.7, 0.7], dtype=torch.float64)), one)
    if name == "dynamic_llava":
        assert not torch.allclose(gradients(torch.tensor([0.7, 2.0], dtype=torch.float64)), one)


@pytest.mark.parametrize("name", [*INSIDE, "oc_vtp"])
def test_removal_is_not_for_what_is_chosen_inside_the_language_model_or_learned_without_it(name: str) -> None:
    vlm = learner(name)
    batch = vlm.prepare(pictures(), QUESTIONS, ANSWERS)
    with pytest.raises(ValueError, match=r"remove_below=0\.001 is for choices before the language model"):
        vlm.loss(batch, remove_below=1e-3)
