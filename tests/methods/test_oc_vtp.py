"""OC-VTP: slots, what they keep, and training by reconstruction."""

import dataclasses
import itertools
import math

import pytest
import torch

from diffprune.methods.oc_vtp import OCVTP, ReconstructionDecoder, area_weights, position_codes, slot_noise
from diffprune.methods.options import build_method
from diffprune.saving import exported_state
from diffprune.schedules import learning_rate_scale
from diffprune.types import VisualTokens
from tests.methods.examples import SPEC, kept, make_method, make_tokens


def oc_vtp(*, weights: int = 0, **options: object) -> OCVTP:
    torch.manual_seed(weights)
    method = build_method("oc_vtp", block=SPEC, **options)
    assert isinstance(method, OCVTP)
    return method


def pictures(num_images: int, *, seed: int) -> VisualTokens:
    """Two things side by side in either order, three tokens each, that know where they are as an encoder's do."""
    generator = torch.Generator().manual_seed(seed)
    things = torch.randn(2, 16, generator=torch.Generator().manual_seed(99)) * 2
    order = torch.stack([torch.randperm(2, generator=generator) for _ in range(num_images)])
    x = things[order.repeat_interleave(3, dim=1)] + position_codes(6, 16, torch.device("cpu"))
    return VisualTokens(x=x + 0.1 * torch.randn(x.shape, generator=generator))


def reconstruction_losses(method: OCVTP, batches: list[VisualTokens], steps: int, *, seed: int = 42) -> list[float]:
    """The loss of every step with two slots, by AdamW, as a run takes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method.start_training()
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step, tokens in enumerate(itertools.islice(itertools.cycle(batches), steps)):
        scale = learning_rate_scale(step, total_steps=steps, warmup_steps=math.ceil(4 / 30 * steps))
        optimizer.param_groups[0]["lr"] = 1e-2 * scale
        loss = method.own_loss(tokens, torch.full((len(tokens),), 2), generator=generator).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(method.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_learns_to_rebuild_pictures_from_their_slots() -> None:
    batches = [pictures(8, seed=seed) for seed in (0, 1)]
    losses = reconstruction_losses(oc_vtp(decoder_depth=1), batches, 120)
    x = torch.cat([tokens.x for tokens in batches])
    best_without_looking = (x - x.mean(0)).square().mean().item()
    assert losses[0] > best_without_looking > 1.4 * sum(losses[-10:]) / 10


def test_the_loss_is_repeated_by_its_generator_and_leaves_torch_s_own_numbers_alone() -> None:
    runs = []
    for seed in (0, 0, 1):
        method = oc_vtp(decoder_depth=1)
        state = torch.random.get_rng_state()
        runs.append(reconstruction_losses(method, [pictures(2, seed=0)], 3, seed=seed))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert runs[0] == runs[1] != runs[2]


def test_a_picture_s_loss_is_its_own_in_any_batch() -> None:
    method, tokens, budget = oc_vtp(decoder_depth=1), make_tokens(), torch.tensor([5, 3, 2])
    method.start_training()

    def loss(rows: list[int]) -> torch.Tensor:
        drawn = [torch.Generator().manual_seed(row) for row in rows]
        return method.own_loss(tokens.take(rows), budget[rows], generator=drawn)

    torch.testing.assert_close(loss([0, 1, 2]), torch.cat([loss([row]) for row in range(3)]))


def test_the_gradient_reaches_every_weight_of_the_slots() -> None:
    method, tokens = oc_vtp(), make_tokens(filler=float("nan"))
    decoder = ReconstructionDecoder(16, method.slots.width, depth=1)
    generator = torch.Generator().manual_seed(0)
    method.reconstruction_loss(tokens, decoder, torch.tensor([4, 3, 2]), generator).sum().backward()
    unreached = [
        name
        for name, weight in method.named_parameters()
        if weight.grad is None or not weight.grad.isfinite().all() or weight.grad.abs().max() == 0
    ]
    assert unreached == []


def test_a_token_is_rebuilt_from_the_slots_and_what_stands_before_it_alone() -> None:
    torch.manual_seed(0)
    decoder = ReconstructionDecoder(16, 8, depth=2).eval()
    x, slots = torch.randn(1, 5, 16), torch.randn(1, 3, 8)
    order, is_slot = torch.tensor([[3, 0, 4, 1, 2]]), torch.ones(1, 3, dtype=torch.bool)
    changed = x.clone()
    changed[0, 4] += 1.0  # third in the order
    before, after = decoder(x, order, slots, is_slot), decoder(changed, order, slots, is_slot)
    moved = (before - after).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [False, True, True, False, False]


def test_tokens_of_small_slots_weigh_more_and_none_more_than_ten() -> None:
    attention = torch.zeros(1, 2, 10)
    attention[0, 0, :9], attention[0, 1, 9] = 1.0, 1.0
    weights = area_weights(attention, torch.tensor([2]), torch.ones(1, 10, dtype=torch.bool))[0]
    small, large = 0.1**-0.5, 0.9**-0.5
    mean = (small + large) / 2
    torch.testing.assert_close(weights, torch.tensor([large / mean] * 9 + [small / mean]))
    many = torch.zeros(1, 200, 400)
    many[0, :199, :], many[0, 199, 0] = 1 / 199, 1e-9
    assert area_weights(many, torch.tensor([200]), torch.ones(1, 400, dtype=torch.bool)).max() <= 10.0


def test_each_slot_s_first_token_stays() -> None:
    method, tokens = make_method("oc_vtp"), make_tokens()
    assert isinstance(method, OCVTP)
    k = torch.tensor([4, 3, 2])
    noise = slot_noise(4, method.slots.width, 42).expand(3, -1, -1)
    x = tokens.x.where(tokens.mask[..., None], 0.0)
    with torch.no_grad():
        _, attention = method.slots(x, noise, k, tokens.mask)
    torch.testing.assert_close(attention.sum(1), tokens.mask.float())
    for row, chosen in enumerate(kept(method.select(tokens, k))):
        assert set(attention[row, : k[row], tokens.mask[row]].argmax(-1).tolist()) <= set(chosen)


def test_places_the_slots_leave_go_to_the_tokens_with_most_attention_natively() -> None:
    torch.manual_seed(0)
    method = make_method("oc_vtp", native=True)
    for weight in method.parameters():
        torch.nn.init.zeros_(weight)  # every slot is the same, so all agree on token 0
    tokens = VisualTokens(x=torch.randn(1, 6, 16), cls_attention=torch.tensor([[0.0, 0.1, 0.3, 0.05, 0.25, 0.3]]))
    assert method.needs == {"cls_attention"}
    assert kept(method.select(tokens, torch.tensor([4])))[0] == [0, 2, 5]  # [CLS] is the release's fourth
    with pytest.raises(ValueError, match=r"keep=1 leaves native OC-VTP no token beside \[CLS\]; keep at least 2"):
        method.select(tokens, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"VisualTokens\.cls_attention.*native=False"):
        method.select(VisualTokens(x=tokens.x), torch.tensor([3]))


def test_where_all_slots_differ_the_last_token_makes_room_for_cls(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method("oc_vtp", native=True)
    assert isinstance(method, OCVTP)
    held = torch.nn.functional.one_hot(torch.tensor([[5, 1, 3]]), 6).float()  # [1, slots, tokens]
    monkeypatch.setattr(method.slots, "forward", lambda *_: (torch.zeros(1, 3, method.slots.width), held))
    tokens = VisualTokens(x=torch.randn(1, 6, 16), cls_attention=torch.tensor([[0.9, 0.0, 0.8, 0.1, 0.0, 0.7]]))
    assert kept(method.select(tokens, 3)) == [[1, 3]]


def test_without_native_nothing_of_the_encoder_is_needed() -> None:
    method = make_method("oc_vtp")
    tokens = dataclasses.replace(make_tokens(), cls_attention=None)
    assert method.needs == frozenset()
    assert [len(row) for row in kept(method.select(tokens, torch.tensor([5, 4, 3])))] == [5, 4, 3]


def test_a_slot_starts_the_same_however_many_there_are() -> None:
    assert torch.equal(slot_noise(100, 4, 0)[:70], slot_noise(70, 4, 0))
    assert not torch.equal(slot_noise(5, 4, 0), slot_noise(5, 4, 1))
    assert slot_noise(200, 64, 0).std().item() == pytest.approx(1.0, abs=0.03)


def test_another_seed_is_another_start() -> None:
    tokens, k = pictures(4, seed=0), torch.full((4,), 3)
    first, same, other = (oc_vtp(seed=seed).select(tokens, k) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_what_is_saved_is_the_slots_alone_and_chooses_the_same() -> None:
    method, tokens, k = oc_vtp(), make_tokens(), torch.tensor([4, 3, 2])
    reconstruction_losses(method, [tokens], 2)
    state = exported_state(method.state_dict())
    assert state and all(name.startswith("slots.") for name in state)
    fresh = oc_vtp(weights=1)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.select(tokens, k), method.select(tokens, k))


def test_the_sizes_are_the_release_s_on_clip_s_width() -> None:
    slots = build_method("oc_vtp", block=dataclasses.replace(SPEC, width=1024, heads=16)).slots
    assert [slots.encode[index].out_features for index in (1, 3)] == [2048, 512]
    assert [slots.mlp[index].out_features for index in (1, 3)] == [2048, 512]
    assert slots.iterations == 3


@pytest.mark.parametrize("option", ["slot_width", "iterations"])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0"):
        build_method("oc_vtp", block=SPEC, **{option: 0})


def test_it_says_what_it_is_built_of() -> None:
    with pytest.raises(ValueError, match=r"block=BlockSpec\.from_config"):
        build_method("oc_vtp")
