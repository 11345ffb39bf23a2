"""What the scenes-qwen models start from: the decoder of a LLaVA, grown, and a merger that writes what it knows."""

from dataclasses import replace

import pytest
import torch

from diffprune_lab.pretrain import feed, package
from diffprune_lab.pretrain import passes as any_passes
from diffprune_lab.pretrain import qwen as pretrain
from diffprune_lab.pretrain import qwen_passes as passes
from diffprune_lab.pretrain import qwen_start as start
from diffprune_lab.scenes import qwen, reference
from diffprune_lab.scenes.world import make_scene

CPU = torch.device("cpu")
TOWER = {"vision_width": 32, "vision_blocks": 2, "vision_hidden": 32}
SMALL = reference.ReferenceSpec(
    patch=16, vision_width=32, vision_blocks=2, vision_hidden=32, text_width=32, text_layers=2, text_hidden=48
)
SAME = qwen.QwenSpec(**TOWER, text_width=32, text_layers=2, text_hidden=48)
LARGER = qwen.QwenSpec(**TOWER, text_width=96, text_layers=4, text_hidden=80)


@pytest.fixture
def base():
    model = reference.build_model(SMALL, reference.build_tokenizer())
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        model.model.language_model.embed_tokens.weight.mul_(
            10
        )  # as large as trained ones, beside which epsilon is small
    return model.eval()


@pytest.fixture
def tokenizer():
    return qwen.build_tokenizer()


def pictures(count: int = 8):
    return feed.draw_batch(feed.picture_arrays([make_scene("train", index) for index in range(count)]), CPU)["pixels"]


# The decoder ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SAME, LARGER], ids=["same", "larger"])
def test_a_grown_decoder_says_of_a_text_what_the_small_one_says(base, tokenizer, spec):
    model = qwen.build_model(spec, tokenizer).eval()
    start.grow_decoder_(model, base)
    text = torch.tensor([[reference.START, *tokenizer.encode("Is there a red star?", add_special_tokens=False)]])
    with torch.no_grad():
        small = base(input_ids=text).logits
        large = model(input_ids=text).logits[..., : small.shape[-1]]
    torch.testing.assert_close(large, small, atol=1e-4, rtol=1e-4)
    assert float(small.std()) > 0.1


def test_what_is_new_in_a_grown_decoder_learns(base, tokenizer):
    model = qwen.build_model(LARGER, tokenizer)
    start.grow_decoder_(model, base)
    text = torch.tensor([tokenizer.encode("There is a red star on the left.", add_special_tokens=False)])
    model(input_ids=text, labels=text).loss.backward()
    for layer in model.model.language_model.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            assert bool((writer.weight.grad.abs().amax(1) > 0).all())  # every row of it, old and new


# The merger ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", [8, 16])
def test_the_tokens_of_the_base_are_averaged_over_what_a_token_looks_at(tokenizer, patch):
    base = reference.build_model(replace(SMALL, patch=patch), tokenizer).eval()
    shown = pictures(2)
    with torch.no_grad():
        tokens = start.base_tokens(base, shown)
        own = base.model.get_image_features(pixel_values=any_passes.normalise_pixels(shown)).pooler_output
    own = torch.stack(list(own))
    assert tokens.shape == (2, 144, 32)
    per = 16 // patch
    corner = own.unflatten(1, (12 * per, 12 * per))[:, -per:, -per:].mean((1, 2))
    torch.testing.assert_close(tokens[:, -1], corner, atol=1e-4, rtol=1e-4)


def test_an_aligned_merger_writes_what_the_decoder_is_used_to(base, tokenizer):
    model = qwen.build_model(LARGER, tokenizer).eval()
    tower, shown = model.model.visual, pictures(16)
    explained = start.align_merger_(tower, base, shown.split(4))
    with torch.no_grad():
        written = passes.merge_features(tower, passes.tower_features(tower, shown))
        wanted = start.base_tokens(base, shown)
    assert written.shape[-1] == 96 and not bool(written[..., 32:].any())
    left = (written[..., :32] - wanted).square().mean() / (wanted - wanted.mean((0, 1))).square().mean()
    assert explained == pytest.approx(1 - float(left), abs=1e-3)
    assert explained > 0.1  # patches alone explain that much


# Files ---------------------------------------------------------------------------------------------------------------


def test_a_tower_serves_another_size(tokenizer, tmp_path):
    one, two = (qwen.build_model(spec, tokenizer, seed=seed) for seed, spec in enumerate((SAME, LARGER)))
    package.save_weights(one, tmp_path, tower_only=True)
    last = two.model.visual.merger.mlp[2].weight.clone()
    assert start.load_start(two, tmp_path) is False
    blocks = zip(one.model.visual.blocks.parameters(), two.model.visual.blocks.parameters(), strict=True)
    assert all(torch.equal(a.bfloat16(), b.bfloat16()) for a, b in blocks)
    assert torch.equal(two.model.visual.merger.mlp[2].weight, last)
    package.save_weights(one, tmp_path, tower_only=False)
    assert start.load_start(qwen.build_model(SAME, tokenizer, seed=2), tmp_path) is True


@pytest.mark.parametrize("tower_only", [True, False])
def test_weights_of_another_shape_are_refused(tokenizer, tmp_path, tower_only):
    wider = replace(LARGER, vision_width=64) if tower_only else LARGER
    package.save_weights(qwen.build_model(wider, tokenizer), tmp_path, tower_only=tower_only)
    with pytest.raises(ValueError, match=r"does not fit the model: missing .*of another shape or name \['"):
        start.load_start(qwen.build_model(SAME, tokenizer), tmp_path)


@pytest.mark.slow
def test_a_language_run_on_a_tower_starts_from_the_decoder_that_its_size_names(tmp_path, monkeypatch):
    nano = qwen.QwenSpec(**TOWER, text_width=128, text_layers=4, text_hidden=256, start="scenes-nano")
    monkeypatch.setitem(qwen.SPECS, "scenes-qwen-s", nano)
    monkeypatch.setattr(pretrain, "CHECK_SIZES", ((176, 160), (160, 176)))
    common = ["--model", "scenes-qwen-s", "--batch", "2", "--workers", "0", "--device", "cpu", "--no-compile"]
    common += ["--steps", "1", "--lr", "1e-9"]
    pretrain.main([*common, "--stage", "tower", "--out", str(tmp_path / "tower")])
    for name, init in (("first", "tower"), ("second", "first")):
        pretrain.main([*common, "--stage", "language", "--init", str(tmp_path / init), "--out", str(tmp_path / name)])
    first, second = (package.read_log(tmp_path / name) for name in ("first", "second"))
    assert any("variance_explained" in entry for entry in first)
    assert not any("variance_explained" in entry for entry in second)  # it goes on with its own
    assert next(entry["loss"] for entry in first if "loss" in entry) < 4  # from nothing it would be log(683) = 6.5
    state = package.read_state(tmp_path / "first")
    known = reference.load_reference("scenes-nano")[0].lm_head.weight
    torch.testing.assert_close(state["lm_head.weight"][: len(known)], known, atol=1e-2, rtol=1e-2)
