"""scenes-llava-next: its tiles and items, the order of its prompt, the training pass, and a run in small."""

import json

import pytest
import torch
from PIL import Image
from torch.nn import functional

from diffprune.loading import load_base
from diffprune.methods.base import take
from diffprune.model import PrunedVLM
from diffprune.rng import Rng
from diffprune_lab.pretrain import feed, package, passes, prefixes, turns
from diffprune_lab.pretrain import next as llava_next
from diffprune_lab.scenes import reference
from diffprune_lab.scenes.sizes import model_sizes, resize
from diffprune_lab.scenes.training_turns import training_turns_by_kind
from diffprune_lab.scenes.world import make_scene
from lab.tests.tiny_scenes import THREE_BLOCKS as TINY

CPU = torch.device("cpu")
SIDE = TINY.grid  # 8 tokens along a side of a tile
OVERVIEW, ROWS = SIDE**2, 2 * SIDE
TOKENS = 5 * OVERVIEW
PLACEHOLDERS = TOKENS + ROWS


@pytest.fixture(scope="module")
def base(tokenizer):
    """A scenes-llava in miniature, with weights far from the small random start, so that every mistake shows."""
    model = reference.build_model(TINY, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model.eval()


@pytest.fixture(scope="module")
def base_folder(base, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    reference.save_reference(base, reference.build_processor("scenes-llava", tokenizer), folder, card="")
    return folder


@pytest.fixture(scope="module")
def model(base, tokenizer):
    return llava_next.build_next(base, tokenizer)


@pytest.fixture(scope="module")
def processor(tokenizer):
    return llava_next.build_processor(tokenizer, patch=TINY.patch)


@pytest.fixture(scope="module")
def asked_batch(tokenizer):
    """Scenes, three turns about each, and the batch they make."""
    scenes = [make_scene("train", index) for index in range(3)]
    asked = [training_turns_by_kind(scene, Rng("test", scene.index), 3) for scene in scenes]
    encode = turns.PieceEncoder(tokenizer)
    batch = feed.draw_batch(feed.LanguageBatch(encode, reference.END, count=3)._arrays(scenes, asked), CPU)
    return scenes, asked, batch


@pytest.fixture(scope="module")
def pictures(asked_batch):
    large = resize(asked_batch[2]["pixels"], llava_next.LARGE, llava_next.LARGE)
    return [Image.fromarray(pixels.permute(1, 2, 0).numpy()) for pixels in large]


def features_of(model, batch):
    tiles = llava_next.cut_tiles(batch["pixels"])
    with torch.no_grad():
        states, _ = passes.tower_states(model.model.vision_tower, tiles.flatten(0, 1), last=False)
    return llava_next.join_tiles(states[:, 1:].unflatten(0, tiles.shape[:2]))


# What it sees --------------------------------------------------------------------------------------------------------


def test_the_far_end_of_a_long_prompt_is_no_farther_than_it_was():
    slowest = 1 - 2 / 32
    before, now = (length / base**slowest for length, base in ((1.0, 1e4), (5.0, llava_next.stretched_base(1e4, 32))))
    assert now == pytest.approx(before)


def test_tiles_are_those_of_the_stock_processor(processor, asked_batch, pictures):
    cut = llava_next.cut_tiles(asked_batch[2]["pixels"])
    stock = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
    ours = passes.normalise_pixels(cut.flatten(0, 1)).view_as(stock)
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=0)


def test_a_prompt_has_a_placeholder_for_each_token_and_each_row(processor, model, pictures):
    inputs = processor(images=pictures[:1], text="USER: <image>\nIs there a star? ASSISTANT:", return_tensors="pt")
    assert int((inputs["input_ids"] == reference.IMAGE).sum()) == PLACEHOLDERS
    full = llava_next.build_processor(processor.tokenizer, patch=8)
    ids = full(images=pictures[:1], text="<image>", return_tensors="pt")["input_ids"]
    assert int((ids == reference.IMAGE).sum()) == 2880 + 48
    assert model.config.text_config.max_position_embeddings > 2880 + 48 + feed.SLOTS


def test_features_and_their_order_are_the_backbones(model, processor, asked_batch, pictures):
    vlm = PrunedVLM(model, processor)
    tokens = vlm.encode(vlm.prepare([[picture] for picture in pictures], ["Is there a star?"] * 3))
    features = features_of(model, asked_batch[2])
    assert tokens is not None and tokens.x.shape == features.shape == (3, TOKENS, 32)
    torch.testing.assert_close(features, tokens.x, atol=1e-4, rtol=1e-4)
    assert tokens.segment is not None and torch.equal(llava_next.token_tiles(SIDE, CPU), tokens.segment[0])


def test_a_token_belongs_to_an_item_in_its_field_of_view(model, processor, asked_batch, pictures):
    scenes, _, batch = asked_batch
    vlm = PrunedVLM(model, processor)
    tokens = vlm.encode(vlm.prepare([[picture] for picture in pictures], ["Is there a star?"] * 3))
    assert tokens is not None and tokens.boxes is not None
    items = llava_next.items_of(batch, TINY.patch)
    for row, scene in enumerate(scenes):
        boxes = {slot: [thing.box] for slot, thing in enumerate(scene.things, start=1)}
        for slot, thing in enumerate(scene.things, start=1):
            boxes[slot] += [thing.tag_box] if thing.tag_box else []
        if scene.sign is not None:
            boxes[prefixes.SIGN] = [scene.sign.box]
        for view in (items[row, :OVERVIEW], items[row, OVERVIEW:]):
            assert set(view.tolist()) - {0} == set(boxes)
        for (x0, y0, x1, y1), item in zip((tokens.boxes[row] / 2).tolist(), items[row].tolist(), strict=True):
            touches = [x0 < b[2] and b[0] < x1 and y0 < b[3] and b[1] < y1 for b in boxes.get(item, [])]
            assert item == 0 or any(touches)


# Prefixes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", prefixes.RULES)
def test_every_rule_keeps_tokens_of_both_views(rule, asked_batch):
    items = llava_next.items_of(asked_batch[2], TINY.patch)
    features = torch.randn(*items.shape, 4, generator=torch.Generator().manual_seed(0))
    rules = torch.full((len(items),), list(prefixes.RULES).index(rule))
    places = llava_next.token_places(SIDE, CPU)
    priority = prefixes.priorities(items, features, rules, torch.Generator().manual_seed(1), places=places)
    keep = prefixes.take_prefix(priority, TOKENS // 3)
    assert (keep.diff(dim=-1) > 0).all()
    assert (keep < OVERVIEW).any() and (keep >= OVERVIEW).any()


def test_a_region_is_the_same_in_both_views():
    places = llava_next.token_places(SIDE, CPU)
    items = torch.zeros(1, TOKENS, dtype=torch.long)
    rules = torch.tensor([list(prefixes.RULES).index("block")])
    priority = prefixes.priorities(
        items, torch.zeros(1, TOKENS, 2), rules, torch.Generator().manual_seed(5), places=places
    )[0]
    overview, view = priority[:OVERVIEW].view(SIDE, SIDE), priority[OVERVIEW:].view(ROWS, ROWS)
    torch.testing.assert_close(view[::2, ::2], overview, atol=0.03, rtol=0)  # a little noise breaks ties


def test_prefixes_are_divided_between_the_views_in_every_way():
    tiles = llava_next.token_tiles(SIDE, CPU)
    added = llava_next.draw_division(400, tiles, torch.Generator().manual_seed(0))
    by_tile = torch.stack([added[:, tiles == tile][:, 0] for tile in range(5)], dim=1)
    assert torch.equal(by_tile[:, tiles], added)  # one number for all tokens of a tile
    as_one = (by_tile[:, 1:] == by_tile[:, 1:2]).all(1)
    kinds = {
        "even": (by_tile == 0).all(1),
        "leaning": as_one & (by_tile[:, 0] != by_tile[:, 1]) & (by_tile.amax(1) <= 0.4),
        "uneven": ~as_one & (by_tile.amax(1) <= 0.4),
        "one view first": as_one & (by_tile.amax(1) > 0.4),
        "tile by tile": ~as_one & (by_tile.amax(1) > 0.4),
    }
    for name, (often, _, _) in llava_next.DIVISIONS.items():
        assert kinds[name].float().mean() == pytest.approx(often / 100, abs=0.06), name


# The training pass ---------------------------------------------------------------------------------------------------


def test_the_loss_with_all_tokens_is_the_stock_models_own(model, processor, asked_batch, pictures):
    _, asked, batch = asked_batch
    keep = torch.arange(TOKENS).expand(3, -1)
    encode = turns.PieceEncoder(processor.tokenizer)
    start = torch.tensor([reference.START, *encode(turns.BEFORE_PICTURE)])
    total, weights, turn_count = 0.0, 0.0, 0
    with torch.no_grad():
        features = features_of(model, batch)
        loss, guesses, layout = llava_next.answer_loss(model, features, keep, batch, start, side=SIDE)
        for row, about in enumerate(asked):
            for turn in range(int((batch["lengths"][row] > 0).sum())):
                own = layout.turn[row] == turn
                prompt = f"USER: <image>\n{about[turn][1]} ASSISTANT: {about[turn][2]}</s>"
                inputs = processor(images=[pictures[row]], text=prompt, return_tensors="pt")
                assert torch.equal(inputs["input_ids"][0, -int(own.sum()) :], batch["ids"][row, own])
                logits = model(**inputs).logits[0, -int(own.sum()) :]
                target, weight = layout.target[row, own], layout.weight[row, own]
                losses = functional.cross_entropy(logits, target, ignore_index=turns.IGNORE, reduction="none")
                total, weights = total + float((losses * weight).sum()), weights + float(weight.sum())
                assert torch.equal(logits.argmax(-1), guesses[row, own])
                turn_count += 1
    assert turn_count == 9
    assert float(loss) == pytest.approx(total / weights, rel=1e-5)


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(torch.arange(5, 23), id="overview alone"),
        pytest.param(torch.arange(OVERVIEW + 2 * ROWS + 3, OVERVIEW + 2 * ROWS + 21), id="two rows of the tiles"),
        pytest.param(torch.arange(7, TOKENS, 18), id="all over both"),
    ],
)
def test_the_loss_with_some_tokens_is_that_of_the_pruned_path(model, processor, asked_batch, pictures, keep):
    _, asked, batch = asked_batch
    encode = turns.PieceEncoder(processor.tokenizer)
    start = torch.tensor([reference.START, *encode(turns.BEFORE_PICTURE)])
    vlm = PrunedVLM(model, processor)
    others = torch.arange(len(keep)) + TOKENS - 40  # other rows of the batch keep other rows of the picture
    kept = torch.stack((keep, others, keep))
    features = None
    for turn in range(2):
        prepared = vlm.prepare(
            [[picture] for picture in pictures],
            [about[turn][1] for about in asked],
            [about[turn][2] for about in asked],
        )
        tokens = vlm.encode(prepared)
        assert tokens is not None
        features = tokens.x if features is None else features
        with torch.no_grad():
            lm = vlm.splice(prepared, tokens, take(tokens, kept))
            logits = vlm.backbone.logits(lm)
            _, guesses, layout = llava_next.answer_loss(model, features, kept, batch, start, side=SIDE)
            assert lm.labels is not None
            for row in range(3):
                own = (layout.turn[row] == turn) & (layout.target[row] != turns.IGNORE)
                answer = lm.labels[row, 1:] >= 0
                assert torch.equal(layout.target[row, own], lm.labels[row, 1:][answer])
                assert torch.equal(guesses[row, own], logits[row, :-1][answer].argmax(-1))
            # The loss itself, for a batch in which every picture has this turn alone.
            alone = feed.LanguageBatch(encode, reference.END, count=1)._arrays(
                asked_batch[0], [[one[turn]] for one in asked]
            )
            loss, _, layout = llava_next.answer_loss(model, features, kept, alone, start, side=SIDE)
            losses = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), lm.labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
            )
            losses = losses.view(3, -1).sum(1)
            weight = torch.stack([(layout.weight[row] * (layout.turn[row] == 0)).max() for row in range(3)])
            expected = (losses * weight).sum() / layout.weight.sum()
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_newlines_stay_where_their_row_keeps_a_token():
    keep = torch.tensor([[0, OVERVIEW, OVERVIEW + ROWS - 1], [3, 4, OVERVIEW + 3 * ROWS + 1]])
    visual = torch.arange(1.0, 7.0).view(2, 3, 1)
    states, slots, real = llava_next.place_prefix(visual, keep, torch.tensor([-1.0]), side=SIDE)
    assert states.shape == (2, 3 + ROWS, 1)
    assert states[..., 0].where(real, 0)[:, :5].tolist() == [[1.0, 2.0, 3.0, -1.0, 0.0], [4.0, 5.0, 6.0, -1.0, 0.0]]
    assert slots[0, :4].tolist() == [0, OVERVIEW, OVERVIEW + ROWS - 1, OVERVIEW + ROWS]
    assert slots[1, 2:4].tolist() == [OVERVIEW + 3 * (ROWS + 1) + 1, OVERVIEW + 3 * (ROWS + 1) + ROWS]
    assert real.sum(1).tolist() == [4, 4]


# A run in small ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(base_folder, tmp_path_factory):
    """Folders of a run, of the one that goes on with it, and the packaged model."""
    folder = tmp_path_factory.mktemp("next")
    small = ["--batch", "2", "--workers", "0", "--device", "cpu", "--no-compile", "--steps", "2"]
    common = ["--base", str(base_folder)]
    language = ["--stage", "language", *common, *small]
    llava_next.main([*language, "--out", str(folder / "first")])
    llava_next.main([*language, "--out", str(folder / "second"), "--init", str(folder / "first"), "--round", "1"])
    last, earlier, out = (str(folder / name) for name in ("second", "first", "model"))
    llava_next.main(["--stage", "package", *common, "--init", last, "--logs", earlier, "--out", out])
    return folder


def test_a_run_saves_what_it_trains_and_not_the_tower(trained, model):
    first, second = (package.load_file(trained / name / package.WEIGHTS) for name in ("first", "second"))
    assert first.keys() == second.keys() == llava_next.trained_part(model).keys()
    assert not any("vision_tower" in name for name in first)
    assert all(value.dtype == torch.bfloat16 for value in first.values())
    moved = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert {"model.image_newline", "lm_head.weight"} <= moved
    assert any("multi_modal_projector" in name for name in moved)


def test_rounds_see_scenes_that_scenes_llava_did_not(trained):
    rounds = [int(package.read_log(trained / name)[0]["settings"]["round"]) for name in ("first", "second")]
    assert rounds == [llava_next.NEXT.first_round, llava_next.NEXT.first_round + 1]


def test_the_packaged_model_loads_as_any_other_and_says_its_size(trained, base):
    folder = trained / "model"
    loaded, processor = load_base(folder)
    assert type(loaded).__name__ == "LlavaNextForConditionalGeneration" and loaded.dtype == torch.float32
    assert model_sizes(folder) == "384" == json.loads((folder / "scenes.json").read_text())["sizes"]
    weights = package.load_file(trained / "second" / package.WEIGHTS)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value.float()) for name, value in weights.items())
    tower = base.model.vision_tower.state_dict()
    assert all(torch.equal(state[f"model.vision_tower.{k}"], v.bfloat16().float()) for k, v in tower.items())
    vlm = PrunedVLM(loaded, processor, method="random", keep=20)
    picture = Image.new("RGB", (llava_next.LARGE, llava_next.LARGE))
    (kept,) = vlm.select([picture]).keep
    assert len(kept) == 20
    assert isinstance(vlm.generate(images=[picture], text="Is there a star?", max_new_tokens=2), str)


def test_the_card_holds_the_figures_of_the_log(trained):
    card = (trained / "model" / "README.md").read_text()
    full = [entry for entry in package.read_log(trained / "second") if entry.get("check") == "full"][-1]
    assert full["kept"] == TOKENS and f"| full | {TOKENS} | {100 * full['mean']:.1f} |" in card
    assert f"| language | {llava_next.NEXT.first_round + 1} | 0 | 4 | 2 |" in card


def test_weights_of_another_model_and_an_empty_folder_are_refused(tokenizer, base_folder, tmp_path):
    with pytest.raises(ValueError, match=r"no .*model\.safetensors to start from"):
        llava_next.load_next(tokenizer, tmp_path, base_folder)
    package.write_state({"lm_head.weight": torch.zeros(2)}, tmp_path)
    with pytest.raises(ValueError, match="holds no weights of scenes-llava-next"):
        llava_next.load_next(tokenizer, tmp_path, base_folder)


def test_a_run_that_was_saved_in_several_files_is_read_whole(tokenizer, base_folder, model, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "SHARD_BYTES", 4096)
    package.write_state(llava_next.trained_part(model), tmp_path)
    assert len(package.weight_files(tmp_path)) > 1
    loaded = llava_next.trained_part(llava_next.load_next(tokenizer, tmp_path, base_folder))
    assert all(
        torch.equal(loaded[name], value.bfloat16().float()) for name, value in llava_next.trained_part(model).items()
    )


def test_packaging_needs_the_log_of_the_run(tokenizer, base_folder, model, tmp_path):
    package.write_state(llava_next.trained_part(model), tmp_path)
    with pytest.raises(ValueError, match="no log"):
        llava_next.package(llava_next.NAME, tmp_path, [], tmp_path / "out", base_folder)
