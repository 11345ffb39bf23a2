"""The scenes-qwen models: the passes of their training against the stock model, their targets, and a run in small."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch.nn import functional

from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from diffprune.rng import Rng
from diffprune_lab.pretrain import feed, package, prefixes, turns
from diffprune_lab.pretrain import passes as any_passes
from diffprune_lab.pretrain import qwen as pretrain
from diffprune_lab.pretrain import qwen_passes as passes
from diffprune_lab.pretrain import qwen_supervision as supervision
from diffprune_lab.pretrain import supervision as any_supervision
from diffprune_lab.pretrain.trainer import Clock, Settings
from diffprune_lab.scenes import qwen, reference
from diffprune_lab.scenes.sizes import draw_sized, model_sizes, picture_size
from diffprune_lab.scenes.training_turns import training_turns_by_kind
from diffprune_lab.scenes.world import make_scene

CPU = torch.device("cpu")
TINY = qwen.QwenSpec(
    vision_width=32,
    vision_blocks=4,
    vision_hidden=48,
    text_width=32,
    text_layers=2,
    text_hidden=48,
    head_width=16,
)
SIZE = (176, 208)  # 11 x 13 tokens: windows of 4 x 4 are cut at the right and at the bottom
GRID = (11, 13)


@pytest.fixture(scope="module")
def tokenizer():
    return qwen.build_tokenizer()


@pytest.fixture
def model(tokenizer):
    model = qwen.build_model(TINY, tokenizer)
    with torch.no_grad():  # far from the small random start, so that every mistake shows in the logits
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
    return model.eval()


def scenes_of(count: int) -> list:
    return [make_scene("train", index) for index in range(count)]


def processed(tokenizer, pixels, question="What color is the star?"):
    """What the processor makes of pictures [B, 3, H, W] with one question."""
    processor = qwen.build_processor(tokenizer)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels]
    return processor(images=pictures, text=[prompt] * len(pictures), return_tensors="pt")


# The model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("scenes-qwen-s", 4e6, 5e6), ("scenes-qwen-m", 8e6, 9e6), ("scenes-qwen-l", 16e6, 17e6)],
)
def test_the_three_sizes_are_one_architecture(name, least, most, tokenizer):
    with torch.device("meta"):
        model = qwen.Qwen2_5_VLForConditionalGeneration(qwen.qwen_config(qwen.qwen_spec(name), tokenizer))
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most
    vision = model.config.vision_config
    assert (vision.patch_size, vision.spatial_merge_size, vision.window_size) == (8, 2, 64)
    assert (vision.hidden_size, vision.depth) == (192, 8)  # as in the large models the tower is one and the same
    windowed = set(range(vision.depth)) - set(vision.fullatt_block_indexes)
    assert windowed and vision.depth - 1 in vision.fullatt_block_indexes


def test_the_tokenizer_is_that_of_the_other_models_with_marks_behind_it(tokenizer):
    plain = reference.build_tokenizer()
    assert {token: tokenizer.get_vocab()[token] for token in plain.get_vocab()} == plain.get_vocab()
    assert tokenizer.image_token == "<|image_pad|>" and len(tokenizer) == len(plain) + 4


def test_a_prompt_of_the_processor_is_what_training_saw(tokenizer, encode):
    pixels = torch.stack(draw_sized(scenes_of(1), "fixed"))
    pixels = pretrain.at_size({"pixels": pixels, "owner": pixels[:, 0]}, *SIZE)["pixels"]
    inputs = processed(tokenizer, pixels)
    seen = [reference.START, *encode(turns.BEFORE_PICTURE), tokenizer.vision_start_token_id]
    seen += [tokenizer.image_token_id] * (GRID[0] * GRID[1]) + [tokenizer.vision_end_token_id]
    assert inputs["input_ids"][0].tolist() == seen + encode("\nWhat color is the star? ASSISTANT:")
    assert inputs["image_grid_thw"].tolist() == [[1, 2 * GRID[0], 2 * GRID[1]]]
    patches = passes.patches_of(pixels, 8, 2).flatten(0, 2).unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1)
    torch.testing.assert_close(inputs["pixel_values"], patches.flatten(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scene", scenes_of(3))
def test_no_picture_of_the_world_is_resized_by_the_processor(tokenizer, scene):
    height, width = picture_size(scene, "varying")
    inputs = processed(tokenizer, draw_sized([scene], "varying"))
    assert inputs["image_grid_thw"].tolist() == [[1, height // 8, width // 8]]


@pytest.mark.parametrize("head_width", [16, 32, 64])
def test_time_row_and_column_share_all_frequencies_of_a_head(head_width):
    sections = qwen.sections(head_width)
    assert sum(sections) == head_width // 2 and len(sections) % 3 == 0


def test_an_unknown_model_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'scenes-qwen-xl'.*scenes-qwen-s"):
        qwen.qwen_spec("scenes-qwen-xl")


# Passes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SIZE, (192, 256), (160, 272)])
def test_the_tower_pass_is_the_stock_one(model, tokenizer, size):
    drawn = feed.draw_batch(feed.picture_arrays(scenes_of(2)), CPU)
    pixels = pretrain.at_size(drawn, *size)["pixels"]
    inputs = processed(tokenizer, pixels)
    tower = model.model.visual
    with torch.no_grad():
        stock = tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        features = passes.tower_features(tower, pixels)
        merged = passes.merge_features(tower, features)
    torch.testing.assert_close(merged.flatten(0, 1), stock, atol=1e-4, rtol=1e-4)
    encoded = PrunedVLM(model, qwen.build_processor(tokenizer)).backbone
    batch = encoded.prepare(
        [[Image.fromarray(picture.permute(1, 2, 0).numpy())] for picture in pixels], ["Is there a star?"] * 2
    )
    torch.testing.assert_close(features, encoded.encode(batch).x, atol=1e-4, rtol=1e-4)


def test_packed_turns_cost_what_the_stock_model_gives_each_turn_by_itself(model, tokenizer, encode):
    scenes = scenes_of(3)
    about = [training_turns_by_kind(scene, Rng("test", scene.index), 3) for scene in scenes]
    batch = feed.draw_batch(feed.LanguageBatch(encode, reference.END, count=3)._arrays(scenes, about), CPU)
    batch = pretrain.at_size(batch, *SIZE)
    tokens = GRID[0] * GRID[1]
    keep = torch.stack([torch.randperm(tokens, generator=torch.Generator().manual_seed(i))[:9] for i in range(3)])
    keep = keep.sort(-1).values
    start = torch.tensor([reference.START, *encode(turns.BEFORE_PICTURE), tokenizer.vision_start_token_id])
    end = torch.tensor([tokenizer.vision_end_token_id])
    inputs = processed(tokenizer, batch["pixels"])
    total, weights, turn_count = 0.0, 0.0, 0
    with torch.no_grad():
        features = passes.tower_features(model.model.visual, batch["pixels"])
        loss, guesses, layout = passes.answer_loss(model, features, keep, batch, GRID, start, end)
        for row in range(len(scenes)):
            patches = slice(row * tokens * 4, (row + 1) * tokens * 4)
            for turn in range(int((batch["lengths"][row] > 0).sum())):
                own = layout.turn[row] == turn
                image = torch.full((tokens,), tokenizer.image_token_id)
                ids = torch.cat((start, image, end, batch["ids"][row, own]))[None]
                grid = inputs["image_grid_thw"][row : row + 1]
                types = (ids == tokenizer.image_token_id).int()
                positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
                mask = (types == 0).long()
                mask[0, len(start) + keep[row]] = 1
                logits = model(
                    input_ids=ids,
                    pixel_values=inputs["pixel_values"][patches],
                    image_grid_thw=grid,
                    attention_mask=mask,
                    position_ids=positions,
                ).logits[0, -int(own.sum()) :]
                target, weight = layout.target[row, own], layout.weight[row, own]
                losses = functional.cross_entropy(logits, target, ignore_index=turns.IGNORE, reduction="none")
                total, weights = total + float((losses * weight).sum()), weights + float(weight.sum())
                assert torch.equal(logits.argmax(-1), guesses[row, own])
                turn_count += 1
    assert turn_count == 9
    assert float(loss) == pytest.approx(total / weights, rel=1e-5)


def test_scaling_the_features_scales_them_and_nothing_else(model):
    tower = model.model.visual
    pixels = feed.draw_batch(feed.picture_arrays(scenes_of(1)), CPU)["pixels"]
    with torch.no_grad():
        features = passes.tower_features(tower, pixels)
        merged = passes.merge_features(tower, features)
        passes.scale_features_(tower, 0.25)
        scaled = passes.tower_features(tower, pixels)
        torch.testing.assert_close(scaled, features * 0.25, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(passes.merge_features(tower, scaled), merged, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("width", [128, 192, 256])  # fewer filters than directions, as many, and more
def test_whitened_patches_spread_evenly_over_the_embedding(width, tokenizer):
    tower = qwen.build_model(replace(TINY, vision_width=width), tokenizer).model.visual
    batch = feed.draw_batch(feed.picture_arrays(scenes_of(24)), CPU)
    item = any_passes.items_of(batch, 16)[0]
    shown = passes.patches_of(batch["pixels"], 8, 2)[item > 0].flatten(0, 1)

    def spread() -> float:
        with torch.no_grad():
            embedded = passes.embed_patches(tower, shown[:, None, None])[:, 0]
        sizes = embedded.square().mean(0).sqrt()[:192][-128:]  # filters of the larger directions come last
        return float(sizes.max() / sizes.min())

    before = spread()
    passes.whiten_patches_(tower, shown)
    assert spread() < 2.5 < before


# Targets of the tower ------------------------------------------------------------------------------------------------


def test_a_token_names_how_far_away_and_how_large_its_item_is():
    scenes = [make_scene("train", index, quality="clear") for index in range(6)]
    batch = pretrain.at_size(feed.draw_batch(supervision.tower_batch(scenes), CPU), *SIZE)
    item, covers = any_passes.items_of(batch, 16)
    targets = supervision.token_targets(batch["items"], batch["boxes"], item, covers, GRID, 16)
    place = {name: number for number, name in enumerate(supervision.FIELDS)}
    assert (targets < torch.tensor(list(supervision.FIELDS.values()))).all()
    named = 0
    for row, scene in enumerate(scenes):
        for slot, thing in enumerate(scene.things, start=1):
            x0, y0, x1, y1 = (
                side * stretch / 192 for side, stretch in zip(thing.box, (SIZE[1], SIZE[0]) * 2, strict=True)
            )
            for token in (item[row] == slot).nonzero()[:, 0].tolist():
                said = targets[row, token]
                assert said[place["shape"]] == thing.shape and said[place["kind"]] == 1
                middle = (token % GRID[1] * 16 + 8, token // GRID[1] * 16 + 8)
                for name, at, low, high in (("across", 0, x0, x1), ("down", 1, y0, y1)):
                    off = (int(said[place[name]]) - supervision.REACH) * supervision.STEP
                    assert abs(off - ((low + high) / 2 - middle[at])) <= supervision.STEP / 2 + 1e-3
                assert int(said[place["width"]]) == int((x1 - x0) / supervision.STEP + 1e-6)
                named += 1
        bare = targets[row, (item[row] == 0) & (covers[row] == 0)]
        unknown = [place[name] for name in ("across", "down", "width", "height", "shape", "color")]
        assert (bare[:, unknown] == turns.IGNORE).all() and (bare[:, place["kind"]] == 0).all()
        assert (bare[:, place["picture_width"]] == (SIZE[1] - 160) // 16).all()
    assert named > 20


def test_of_a_ruined_picture_a_token_names_the_quality_alone():
    scenes = [make_scene("train", index, quality="ruined") for index in range(2)]
    batch = pretrain.at_size(feed.draw_batch(supervision.tower_batch(scenes), CPU), *SIZE)
    item, covers = any_passes.items_of(batch, 16)
    targets = supervision.token_targets(batch["items"], batch["boxes"], item, covers, GRID, 16)
    named = set(torch.where(targets != turns.IGNORE)[2].tolist())
    assert named == {list(supervision.FIELDS).index("quality")}


def test_owners_and_pixels_are_sized_alike():
    batch = pretrain.at_size(feed.draw_batch(feed.picture_arrays(scenes_of(3)), CPU), 272, 160)
    assert batch["pixels"].shape == (3, 3, 272, 160) and batch["owner"].shape == (3, 272, 160)
    item, _ = any_passes.items_of(batch, 16)
    for row, scene in enumerate(scenes_of(3)):
        for token, number in enumerate(item[row].tolist()):
            if 0 < number < prefixes.SIGN and not scene.things[number - 1].tag:
                x0, y0, x1, y1 = scene.things[number - 1].box
                x, y = token % 10 * 16 * 192 / 160, token // 10 * 16 * 192 / 272
                assert x0 - 16 * 1.2 <= x <= x1 and y0 - 16 <= y <= y1


# A run in small ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of a tower run, a language run on top of it, and the packaged model."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(qwen.SPECS, "scenes-qwen-s", TINY)
        common = ["--model", "scenes-qwen-s", "--batch", "2", "--workers", "0", "--device", "cpu", "--no-compile"]
        for stage, name, init in (
            ("tower", "tower", []),
            ("tower", "again", []),
            ("language", "first", ["--init", str(folder / "tower")]),
        ):
            pretrain.main([*common, "--stage", stage, "--steps", "2", "--out", str(folder / name), *init])
        last, earlier, out = (str(folder / name) for name in ("first", "tower", "package"))
        common = ["--model", "scenes-qwen-s", "--stage", "package"]
        pretrain.main([*common, "--init", last, "--logs", earlier, "--out", out])
        yield folder


def test_a_run_with_steps_gives_the_same_weights_again(trained):
    one, two = ((trained / name / package.WEIGHTS).read_bytes() for name in ("tower", "again"))
    assert one == two


def test_the_tower_stage_ends_with_features_of_deviation_one(trained):
    assert package.read_log(trained / "tower")[-1]["deviation"] == pytest.approx(1.0, abs=0.01)


def test_the_language_stage_moves_the_merger_and_leaves_the_blocks_as_they_were(trained):
    tower, whole = (package.load_file(trained / name / package.WEIGHTS) for name in ("tower", "first"))
    assert tower.keys() < whole.keys()
    moved = {name for name, value in tower.items() if not torch.equal(value, whole[name])}
    assert moved and all(".merger." in name for name in moved)


def test_the_packaged_model_is_loaded_by_its_folder_and_answers_pruned(trained):
    folder = trained / "package"
    assert model_sizes(folder) == "varying" and qwen.named_in(folder) == "scenes-qwen-s"
    model, processor = load_base(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    (picture,) = draw_sized([make_scene("test", 0)], "varying")
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    vlm = PrunedVLM(model, processor, method="divprune", keep=0.1111)
    said = vlm.generate(images=[image], text="Is there a star?", max_new_tokens=2)
    assert isinstance(said, str)
    tokens = (picture.shape[1] // 16) * (picture.shape[2] // 16)
    assert len(vlm.select(images=[image])[0].keep) == int(0.1111 * tokens + 0.5)


def test_the_card_holds_the_figures_of_the_log(trained):
    card = (trained / "package" / "README.md").read_text()
    full = next(entry for entry in reversed(package.read_log(trained / "first")) if entry.get("check") == "full")
    assert f"| full | 165 | {100 * full['mean']:.1f} |" in card
    assert "| language | 0 | 0 | 4 | 2 |" in card and "| tower | 0 | 0 | 4 | 2 |" in card


def test_weights_larger_than_a_shard_come_back_from_several_files(tmp_path, monkeypatch, tokenizer):
    model = qwen.build_model(TINY, tokenizer)
    package.save_weights(model, tmp_path, tower_only=True)
    monkeypatch.setattr(reference, "SHARD_BYTES", 60_000)
    package.save_weights(model, tmp_path, tower_only=False)
    files = package.weight_files(tmp_path)
    assert len(files) > 1 and not (tmp_path / package.WEIGHTS).exists()
    other = qwen.build_model(TINY, tokenizer, seed=1)
    assert package.load_weights(other, tmp_path)
    same = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(one.bfloat16(), two.bfloat16()) for one, two in same)


@pytest.mark.parametrize("text", ["{}", "no json", json.dumps({"sizes": "varying", "model": "scenes-llava-next"})])
def test_a_folder_with_another_model_is_none_of_these(tmp_path, text):
    (tmp_path / "scenes.json").write_text(text)
    assert qwen.named_in(tmp_path) is None
    with pytest.raises(ValueError, match=r"holds none of scenes-qwen-s.*runs/scaling\.sh"):
        qwen.load_model(tmp_path)


def test_the_leak_of_a_tower_is_measured_at_any_size():
    scene = make_scene("train", 3, kind="sign", quality="clear")
    batch = pretrain.at_size(feed.draw_batch(supervision.tower_batch([scene]), CPU), *SIZE)
    local, local_twin = (passes.patches_of(batch[name], 8, 2).flatten(2) for name in ("pixels", "twin"))
    silent = any_supervision.leak(local, local_twin, batch["pixels"], batch["twin"], 16)
    spread, spread_twin = (part + part.mean(1, keepdim=True) for part in (local, local_twin))
    leaking = any_supervision.leak(spread, spread_twin, batch["pixels"], batch["twin"], 16)
    assert float(silent) < 1e-3 < float(leaking)


def test_a_tower_from_nothing_learns_to_see_before_a_leak_counts(tmp_path):
    run = pretrain.TowerRun.__new__(pretrain.TowerRun)
    first = Settings(model="scenes-qwen-s", stage="tower", out=tmp_path, steps=100)
    weights = []
    for step, init in ((0, None), (25, None), (50, None), (0, tmp_path)):
        run.settings, run.clock = replace(first, init=init), Clock(1.0, 100)
        run.clock.step = step
        weights.append(run.leak_weight() / any_supervision.LEAK_WEIGHT)
    assert weights == pytest.approx([0.0, 0.5, 1.0, 1.0])
