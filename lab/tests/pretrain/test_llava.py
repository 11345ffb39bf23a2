"""The reference models: their tokenizer and files, the targets of the tower, shared prefixes, and a run in small."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from diffprune.rng import Rng
from diffprune_lab.pretrain import feed, llava, muon, package, passes, prefixes, supervision, trainer, turns
from diffprune_lab.scenes import grounds, reference
from diffprune_lab.scenes.draw import pack, render
from diffprune_lab.scenes.language import all_texts
from diffprune_lab.scenes.training_turns import training_turns_by_kind
from diffprune_lab.scenes.world import WORDS, make_scene
from lab.tests.tiny_scenes import THREE_BLOCKS as TINY

CPU = torch.device("cpu")
TOKENS = TINY.grid**2


@pytest.fixture
def model(tokenizer):
    model = reference.build_model(TINY, tokenizer)
    with torch.no_grad():  # far from the small random start, so that every mistake shows in the logits
        for parameter in model.model.language_model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model.eval()


def asked(count: int = 3, pictures: int = 3):
    """Scenes and a few turns about each."""
    scenes = [make_scene("train", index) for index in range(pictures)]
    return scenes, [training_turns_by_kind(scene, Rng("test", scene.index), count) for scene in scenes]


# Tokenizer and files -------------------------------------------------------------------------------------------------


def test_words_are_single_tokens_and_signs_are_spelled(tokenizer):
    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces(" the purple triangle is unanswerable") == [" the", " purple", " triangle", " is", " unanswerable"]
    assert pieces(" MEAT 54") == [" M", "E", "A", "T", " 5", "4"]
    assert pieces("三角形的颜色") == ["三角形", "的", "颜色"]
    assert pieces("USER: ") == ["USER: "] and pieces(" ASSISTANT:") == [" ASSISTANT:"]


@pytest.mark.parametrize("text", ["\nIs the red star left of the tree? ASSISTANT: no", "naïve 日本 \t x_y-Zz 007!", ""])
def test_every_text_comes_back_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_vocabulary_depends_on_the_pieces_and_not_on_their_order(tokenizer):
    texts = list(all_texts())
    assert reference.vocabulary(reversed(texts)) == tokenizer.get_vocab()
    assert 600 <= len(tokenizer) <= 1000


def test_no_text_of_the_world_needs_bytes(tokenizer):
    alphabet_end = len(reference.SPECIALS) + 256
    for scene, about in zip(*asked(count=8, pictures=40), strict=True):
        for _, question, answer in about:
            for text in (f"\n{question} ASSISTANT:", f" {answer}"):
                ids = tokenizer.encode(text, add_special_tokens=False)
                # Single bytes occur as what they are: ASCII characters.
                assert all(token >= alphabet_end or tokenizer.decode([token]).isascii() for token in ids), scene
    assert len({tuple(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in WORDS}) == len(WORDS)


def test_the_fast_encoder_agrees_with_the_tokenizer_and_cuts_where_the_answer_starts(tokenizer, encode):
    for about in asked(count=8, pictures=20)[1]:
        for _, question, answer in about:
            whole = f"\n{question} ASSISTANT: {answer}"
            parts = encode(f"\n{question} ASSISTANT:") + encode(f" {answer}")
            assert encode(whole) == parts == tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("name", reference.SPECS)
def test_a_prompt_of_the_processor_is_what_training_saw(name, tokenizer, encode):
    processor = reference.build_processor(name, tokenizer)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What color is the star?"}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt == "USER: <image>\nWhat color is the star? ASSISTANT:"

    pixels = render(pack([make_scene("train", 0)]))
    assert isinstance(pixels, torch.Tensor)
    picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    inputs = processor(images=picture, text=prompt, return_tensors="pt")
    seen = [reference.START, *encode(turns.BEFORE_PICTURE)]
    seen += [reference.IMAGE] * reference.SPECS[name].grid ** 2 + encode("\nWhat color is the star? ASSISTANT:")
    assert inputs["input_ids"][0].tolist() == seen
    torch.testing.assert_close(inputs["pixel_values"], passes.normalise_pixels(pixels), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "tokens", "most"), [("scenes-llava", 576, 7_700_000), ("scenes-nano", 144, 1_800_000)]
)
def test_the_models_have_the_agreed_geometry_and_size(name, tokens, most, tokenizer):
    model = reference.build_model(reference.reference_spec(name), tokenizer)
    assert sum(parameter.numel() for parameter in model.parameters()) <= most
    assert model.model.vision_tower.embeddings.num_patches == tokens
    assert model.config.vision_feature_layer == -2
    assert model.config.image_token_index == reference.IMAGE


def test_an_unknown_model_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'scenes-huge'.*scenes-llava, scenes-nano"):
        reference.load_reference("scenes-huge")


def test_missing_weights_say_how_to_train_them(tmp_path):
    with pytest.raises(ValueError, match=r"train_scenes_llava\.sh"):
        reference.load_reference("scenes-nano", tmp_path)


# Many turns behind one prefix ----------------------------------------------------------------------------------------


def test_packed_turns_cost_what_the_stock_model_gives_each_turn_by_itself(model, encode):
    scenes, about = asked()
    batch = feed.draw_batch(feed.LanguageBatch(encode, reference.END, count=3)._arrays(scenes, about), CPU)
    keep = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(i))[:9] for i in range(3)])
    keep = keep.sort(-1).values
    start = torch.tensor([reference.START, *encode(turns.BEFORE_PICTURE)])
    pixels = passes.normalise_pixels(batch["pixels"])
    total, weights, turn_count = 0.0, 0.0, 0
    with torch.no_grad():
        features, _ = passes.tower_states(model.model.vision_tower, batch["pixels"], last=False)
        loss, guesses, layout = passes.answer_loss(model, features[:, 1:], keep, batch, start)
        for row in range(len(scenes)):
            for turn in range(int((batch["lengths"][row] > 0).sum())):
                own = layout.turn[row] == turn
                ids = torch.cat((start, torch.full((TOKENS,), reference.IMAGE), batch["ids"][row, own]))[None]
                mask = torch.zeros_like(ids)
                mask[0, : len(start)] = mask[0, len(start) + TOKENS :] = 1
                mask[0, len(start) + keep[row]] = 1
                logits = model(
                    input_ids=ids,
                    pixel_values=pixels[row : row + 1],
                    attention_mask=mask,
                    position_ids=torch.arange(ids.shape[1])[None],
                ).logits[0, -int(own.sum()) :]
                target, weight = layout.target[row, own], layout.weight[row, own]
                losses = functional.cross_entropy(logits, target, ignore_index=turns.IGNORE, reduction="none")
                total, weights = total + float((losses * weight).sum()), weights + float(weight.sum())
                assert torch.equal(logits.argmax(-1), guesses[row, own])
                turn_count += 1
    assert turn_count == 9
    assert float(loss) == pytest.approx(total / weights, rel=1e-5)


def test_the_layout_marks_answers_and_their_end_alone(encode, tokenizer):
    about = [[turns.Turn("x", "Is there a star?", "yes"), turns.Turn("x", "What does the sign say?", "OWL")]]
    packed = turns.pack_turns(about, encode, ("x",), tokens=40, end=reference.END)
    layout = turns.turn_layout(*(torch.from_numpy(array) for array in packed[:3]))
    said = [layout.target[0, (layout.turn[0] == turn) & (layout.target[0] >= 0)] for turn in range(2)]
    assert [tokenizer.decode(ids) for ids in said] == [" yes</s>", " OWL</s>"]
    assert layout.offset[0, int(packed.lengths[0, 0])] == 0
    assert (layout.turn[0, int(packed.lengths[0].sum()) :] == packed.lengths.shape[1]).all()
    # An answer of n tokens weighs sqrt(n).
    assert layout.weight[0].sum() == pytest.approx(2**0.5 + 4**0.5)


def test_a_turn_that_does_not_fit_is_left_out_whole(encode):
    about = [[turns.Turn("x", "Describe the picture.", "a " * 30), turns.Turn("x", "Is there a star?", "no")]]
    packed = turns.pack_turns(about, encode, ("x",), tokens=20, end=reference.END)
    assert packed.kinds[0].tolist()[:2] == [0, -1]
    assert packed.answers[0, 0] == 2


def test_right_turns_are_those_without_a_wrong_token(encode):
    about = [[turns.Turn("x", "Is there a star?", "yes"), turns.Turn("x", "What does the sign say?", "OWL")]]
    packed = turns.pack_turns(about, encode, ("x",), tokens=40, end=reference.END)
    layout = turns.turn_layout(*(torch.from_numpy(array) for array in packed[:3]))
    guesses = layout.target.clone()
    assert passes.right_turns(guesses, layout, packed.kinds.shape[1])[:, :2].tolist() == [[1.0, 1.0]]
    guesses[0, (layout.turn[0] == 1) & (layout.target[0] >= 0)] = 0
    assert passes.right_turns(guesses, layout, packed.kinds.shape[1])[:, :2].tolist() == [[1.0, 0.0]]


def test_weights_of_turns_are_read_and_checked():
    assert feed.parse_weights("gqa=20,mme=4") == {"gqa": 20, "mme": 4}
    assert feed.parse_weights("") == {}
    with pytest.raises(ValueError, match=r"gqi=20"):
        feed.parse_weights("gqi=20")


# Prefixes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looked_at():
    """The item of each of 24 x 24 tokens in a few pictures of every kind, and the scenes."""
    scenes = [make_scene("train", index, kind=kind) for index in range(4) for kind in ("plain", "sign", "diagram")]
    batch = feed.draw_batch(feed.picture_arrays(scenes), CPU)
    return scenes, *passes.items_of(batch, 8)


def priorities(items, rule: str):
    features = torch.randn(*items.shape, 6, generator=torch.Generator().manual_seed(0))
    rules = torch.full((len(items),), list(prefixes.RULES).index(rule))
    return prefixes.priorities(items, features, rules, torch.Generator().manual_seed(1))


def test_tokens_belong_to_the_item_they_look_at(looked_at):
    scenes, items, covers = looked_at
    for row, scene in enumerate(scenes):
        boxes = {slot: [thing.box] for slot, thing in enumerate(scene.things, start=1)}
        for slot, thing in enumerate(scene.things, start=1):
            boxes[slot] += [thing.tag_box] if thing.tag_box else []
        if scene.sign is not None:
            boxes[prefixes.SIGN] = [scene.sign.box]
        assert set(items[row].tolist()) - {0} == set(boxes)
        for token, item in enumerate(items[row].tolist()):
            x, y = token % 24 * 8, token // 24 * 8
            touched = {
                slot
                for slot, areas in boxes.items()
                if any(x0 < x + 8 and x < x1 and y0 < y + 8 and y < y1 for x0, y0, x1, y1 in areas)
            }
            assert item in touched or item == 0
            assert touched or covers[row, token] == 0


@pytest.mark.parametrize("rule", prefixes.RULES)
def test_every_rule_keeps_different_tokens_in_raster_order(rule, looked_at):
    keep = prefixes.take_prefix(priorities(looked_at[1], rule), 40)
    assert keep.shape == (len(looked_at[1]), 40)
    assert (keep.diff(dim=-1) > 0).all() and keep.min() >= 0 and keep.max() < 576


def test_rules_make_the_prefixes_they_name(looked_at):
    items = looked_at[1]

    def kept(rule: str, count: int):
        return items.gather(1, prefixes.take_prefix(priorities(items, rule), count))

    assert (kept("objects", 12) > 0).all()
    assert (kept("background", 100) == 0).all()
    for row, whole in zip(kept("balanced", 12), items, strict=True):
        numbers = [int((row == item).sum()) for item in set(whole.tolist()) - {0}]
        assert max(numbers) - min(numbers) <= 1
    for row, whole in zip(kept("one_missing", 576 - 60), items, strict=True):
        assert len(set(whole.tolist())) - len(set(row.tolist())) in (0, 1)
    few = kept("one_missing", 8)
    assert all(len(set(whole.tolist()) - {0} - set(row.tolist())) >= 1 for row, whole in zip(few, items, strict=True))
    assert all(len(set(row.tolist())) == 1 for row in kept("one_only", 3))


def test_prefix_lengths_cover_the_whole_range_in_steps():
    lengths = {prefixes.draw_length(576, 1.0, place / 1000) for place in range(1000)}
    assert min(lengths) == 8 and max(lengths) == 576 and all(length % 8 == 0 for length in lengths)
    assert prefixes.draw_length(576, 0.1, 0.0) == 576
    middle = sorted(prefixes.draw_length(576, 1.0, place / 1000) for place in range(1000))[500]
    assert 56 <= middle <= 80  # log-uniform: half of them below sqrt(8 * 576) = 68


# Targets of the tower ------------------------------------------------------------------------------------------------


def test_a_token_names_all_of_its_item_and_background_names_nothing(looked_at):
    scenes, item, covers = looked_at
    items, summary, pairs = map(torch.from_numpy, supervision.scene_targets(scenes))
    targets = supervision.token_targets(items, item, covers)
    place = {name: number for number, name in enumerate(supervision.FIELDS)}
    for row, scene in enumerate(scenes):
        if scene.quality == "ruined":
            assert set(torch.where(targets[row] != turns.IGNORE)[1].tolist()) == {place["quality"]}
            continue
        for slot, thing in enumerate(scene.things, start=1):
            mine = targets[row, item[row] == slot]
            for name in ("shape", "color", "size", "pattern", "cell"):
                assert (mine[:, place[name]] == getattr(thing, name)).all()
            assert (mine[:, place["tag"]] > 0).all() == bool(thing.tag)
        if scene.sign is not None:
            mine = targets[row, item[row] == prefixes.SIGN]
            letters = mine[:, place["letter0"] :]
            text = "".join(supervision.CHARACTERS[letter] for letter in letters[0])
            assert text.strip() == scene.sign.text and (letters == letters[0]).all()
        bare = targets[row, (item[row] == 0) & (covers[row] == 0)]
        assert (bare[:, place["cell"] :] == turns.IGNORE).all() and (bare[:, place["kind"]] == 0).all()
        corner = targets[row, (item[row] == 0) & (covers[row] > 0)]
        assert (corner[:, place["kind"]] == turns.IGNORE).all()
        assert pairs[row].sum() == len(scene.things) == summary[row, list(supervision.SUMMARY_FIELDS).index("count")]


def test_the_summary_tells_the_background_and_counts_the_clutter_where_it_lies():
    for index in range(20):
        scene = make_scene("train", index, quality="clear")
        marks = supervision.clutter_by_cell(scene)
        fewest, most = 4, 14  # of the world
        assert marks.shape == (9,) and fewest <= marks.sum() <= most
        alone = replace(scene, sprites=tuple(s for s in scene.sprites if s[0] in supervision.atlas.MARK_MASKS))
        pixels, bare = render(pack([alone]), CPU), render(pack([replace(scene, sprites=())]), CPU)
        shown = (pixels != bare).any(1)[0].unfold(0, 64, 64).unfold(1, 64, 64).any(-1).any(-1).flatten()
        assert all(shown[cell] for cell in np.flatnonzero(marks))
        assert (supervision.ground_sort(scene) == len(grounds.GROUND_PATTERNS)) == (scene.kind == "diagram")


def test_the_classes_of_the_targets_are_in_range():
    scenes = [make_scene("train", index) for index in range(100)]
    items, summary, _ = supervision.scene_targets(scenes)
    for targets, fields in ((items, supervision.FIELDS), (summary, supervision.SUMMARY_FIELDS)):
        assert (targets < np.array(list(fields.values()))).all()
        assert ((targets >= 0) | (targets == turns.IGNORE)).all()


def test_a_twin_lacks_items_and_a_token_that_hears_of_it_leaks():
    scene = make_scene("train", 3, kind="sign", quality="clear")
    twin = supervision.without_items(scene, Rng("twin", 3))
    assert twin.things == scene.things and len(twin.sprites) < len(scene.sprites)
    batch = feed.draw_batch(feed.tower_batch([scene]), CPU)
    assert not torch.equal(batch["pixels"], batch["twin"])

    local = functional.unfold(batch["pixels"].float(), 24, stride=24).transpose(1, 2)  # each token its own pixels alone
    local_twin = functional.unfold(batch["twin"].float(), 24, stride=24).transpose(1, 2)
    silent = supervision.leak(local, local_twin, batch["pixels"], batch["twin"], 24)
    spread, spread_twin = (part + part.mean(1, keepdim=True) for part in (local, local_twin))
    leaking = supervision.leak(spread, spread_twin, batch["pixels"], batch["twin"], 24)
    assert float(silent) < 1e-3 < float(leaking)


def test_scaling_the_features_scales_them_and_nothing_else(model):
    tower = model.model.vision_tower
    pixels = feed.draw_batch(feed.picture_arrays([make_scene("train", 0)]), CPU)["pixels"]
    with torch.no_grad():
        features, last = passes.tower_states(tower, pixels, last=True)
        attention, pooled = passes.cls_attention(tower, pixels), tower.post_layernorm(last)
        passes.scale_features_(tower, 0.25)
        scaled, last = passes.tower_states(tower, pixels, last=True)
        torch.testing.assert_close(scaled, features * 0.25, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(passes.cls_attention(tower, pixels), attention, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(tower.post_layernorm(last), pooled, atol=1e-3, rtol=1e-2)


def test_the_tower_pass_and_its_attention_are_the_stock_ones(model):
    tower = model.model.vision_tower
    pixels = feed.draw_batch(feed.picture_arrays([make_scene("train", 0)]), CPU)["pixels"]
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        stock = tower(passes.normalise_pixels(pixels), output_hidden_states=True, output_attentions=True)
        features, last = passes.tower_states(tower, pixels, last=True)
        torch.testing.assert_close(features, stock.hidden_states[-2])
        torch.testing.assert_close(last, stock.last_hidden_state)
        torch.testing.assert_close(passes.cls_attention(tower, pixels), stock.attentions[-2].mean(1)[:, 0, 1:])


def test_whitened_patches_spread_evenly_over_the_embedding(model):
    tower = model.model.vision_tower
    scenes = [make_scene("train", index) for index in range(24)]
    batch = feed.draw_batch(feed.picture_arrays(scenes), CPU)
    item = passes.items_of(batch, TINY.patch)[0]

    def spread() -> float:
        with torch.no_grad():
            embedded = tower.embeddings.patch_embedding(passes.normalise_pixels(batch["pixels"])).flatten(2)
        deviations = embedded.transpose(1, 2)[item > 0].std(0)
        return float(deviations.max() / deviations.min())

    before = spread()
    passes.whiten_patches_(tower, batch["pixels"], item)
    assert spread() < 2 < before


# Optimisation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 12, 12)])
def test_orthogonal_updates_move_all_directions_alike(shape):
    matrices = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(muon.orthogonalise(matrices))
    assert values.min() > 0.5 and values.max() < 1.3


def test_muon_descends_and_changes_entries_by_a_fifth_of_its_rate():
    weight = torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    goal = torch.eye(16)
    optimiser = muon.Muon([weight], lr=0.05, weight_decay=0.0)
    losses = []
    for _ in range(60):
        loss = (weight - goal).square().sum()
        optimiser.zero_grad()
        loss.backward()
        before = weight.detach().clone()
        optimiser.step()
        losses.append(float(loss.detach()))
        change = float((weight.detach() - before).square().mean().sqrt())
        assert 0.005 < change < 0.013
    assert losses[-1] < 0.5 * losses[0]


def test_the_learning_rate_rises_stays_and_ends_at_nothing():
    rates = [trainer.rate(share / 100, 0.05) for share in range(101)]
    assert rates[0] == 0 and rates[5] == rates[40] == 1 and rates[100] == 0
    assert rates[70] == pytest.approx(0.5)


# A run in small ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of a tower run, a language run on top of it, and the packaged model."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reference.SPECS, "scenes-nano", TINY)
        common = ["--model", "scenes-nano", "--batch", "4", "--workers", "0", "--device", "cpu", "--no-compile"]
        for stage, name, init in (
            ("tower", "tower", []),
            ("tower", "again", []),
            ("language", "first", ["--init", "tower"]),
            ("tower", "later", ["--init", "first"]),
        ):
            init = [str(folder / part) if part in ("tower", "first") else part for part in init]
            llava.main([*common, "--stage", stage, "--steps", "3", "--out", str(folder / name), *init])
        last, earlier, out = (str(folder / name) for name in ("first", "tower", "package"))
        common = ["--model", "scenes-nano", "--stage", "package"]
        llava.main([*common, "--init", last, "--logs", earlier, "--out", out])
        yield folder


def test_a_run_with_steps_gives_the_same_weights_again(trained):
    one, two = ((trained / name / package.WEIGHTS).read_bytes() for name in ("tower", "again"))
    assert one == two


def test_the_language_stage_leaves_the_tower_as_it_was(trained):
    tower, whole = (package.load_file(trained / name / package.WEIGHTS) for name in ("tower", "first"))
    assert tower.keys() < whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in tower.items())


def test_a_later_tower_stage_hands_the_decoder_on(trained):
    first, later = (package.load_file(trained / name / package.WEIGHTS) for name in ("first", "later"))
    moved = {name for name, value in first.items() if not torch.equal(value, later[name])}
    assert moved and all(".vision_tower." in name for name in moved)


def test_the_tower_stage_ends_with_features_of_deviation_one(trained):
    last = package.read_log(trained / "tower")[-1]
    assert last["deviation"] == pytest.approx(1.0, abs=0.01)


def test_a_log_tells_steps_losses_and_checks(trained):
    entries = package.read_log(trained / "first")
    assert entries[0]["settings"]["stage"] == "language"
    steps = [entry for entry in entries if "loss" in entry]
    assert steps[-1]["step"] == 3 and steps[-1]["pictures"] == 12 and steps[-1]["share"] == 1
    assert {"full", "random", "objects", "background"} <= {entry["check"] for entry in entries if "check" in entry}


def test_the_packaged_model_answers_through_the_stock_classes(trained, tokenizer):
    model, processor = reference.load_reference("scenes-nano", trained / "package")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    pixels = render(pack([make_scene("test", 0)]))
    assert isinstance(pixels, torch.Tensor)
    picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    inputs = processor(images=picture, text="USER: <image>\nIs there a star? ASSISTANT:", return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    assert processor.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_the_card_holds_the_figures_of_the_log(trained):
    card = (trained / "package" / "README.md").read_text()
    full = next(entry for entry in reversed(package.read_log(trained / "first")) if entry.get("check") == "full")
    assert f"| full | {TOKENS} | {100 * full['mean']:.1f} |" in card
    assert "| language | 0 | 0 | 12 | 3 |" in card and "| tower | 0 | 0 | 12 | 3 |" in card
    assert "in runs one after the other" in card and "are stand-ins for them" in card


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_weight_file_is_named_with_the_way_to_restore_it(trained, tmp_path, damage):
    for file in (trained / "package").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "model.safetensors"
    whole = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    else:
        whole[-1] ^= 1
        shard.write_bytes(whole[: len(whole) // 2] if damage == "cut" else whole)
    with pytest.raises(ValueError, match=r"model\.safetensors is (damaged|missing).*git checkout -- "):
        reference.load_reference("scenes-nano", tmp_path)


def test_starting_from_nothing_or_from_other_weights_is_refused(trained, tokenizer, tmp_path):
    model = reference.build_model(TINY, tokenizer)
    with pytest.raises(ValueError, match=r"no .*model\.safetensors to start from"):
        package.load_weights(model, tmp_path)
    package.save_file({"model.other": torch.zeros(2)}, tmp_path / package.WEIGHTS)
    with pytest.raises(ValueError, match="does not fit the model"):
        package.load_weights(model, tmp_path)
    with pytest.raises(SystemExit):
        llava.main(["--model", "scenes-nano", "--stage", "language", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="no log"):
        package.read_log(tmp_path)


def test_batches_come_in_order_whatever_the_number_of_workers(monkeypatch):
    stream = feed.SceneStream(lambda scenes: {"index": torch.tensor([s.index for s in scenes])}, first=100, size=2)
    alone = [batch["index"].tolist() for batch in islice(iter(stream), 4)]
    assert alone == [[100, 101], [102, 103], [104, 105], [106, 107]]
    monkeypatch.setattr(feed, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2))
    assert [batch["index"].tolist() for batch in islice(iter(stream), 2)] == [alone[1], alone[3]]


def test_an_error_in_the_feed_reaches_who_waits():
    def broken():
        yield feed.picture_arrays([make_scene("train", 0)])
        raise RuntimeError("no more scenes")

    feeder = feed.Feeder(broken(), CPU)
    assert feeder.next()["pixels"].shape == (1, 3, 192, 192)
    with pytest.raises(RuntimeError, match="no more scenes"):
        feeder.next()
    feeder.stop()


def test_another_round_and_stage_see_other_scenes(trained):
    settings = json.loads((trained / "tower" / package.LOG).read_text().splitlines()[0])["settings"]
    base = trainer.Settings(model="scenes-nano", stage="tower", out=Path(settings["out"]))
    firsts = {
        trainer.first_scene(replace(base, stage=stage, round=number)) for stage in trainer.STAGES for number in range(3)
    }
    assert len(firsts) == 6 and all(first % trainer.ROUND_SCENES == 0 for first in firsts)
