"""PrunedVLM as a user meets it: calls, batches, decoding modes, saving, loading, and every wrong turn."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import diffprune as dp
from diffprune import api, fitting, saved_pruners
from diffprune.api import load_vlm
from diffprune.loading import refuse_gaps
from diffprune.methods.base import Card, Kept, MergingPruner
from diffprune.methods.cls_attention import ClsAttentionOptions
from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens, parse_budgets
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned


def ask(vlm: PrunedVLM, **kwargs):
    return vlm.generate([tiny.picture(1)], "what is it?", **{"max_new_tokens": 4, "do_sample": False, **kwargs})


def test_one_prompt_gives_a_string_and_several_give_a_list() -> None:
    vlm = pruned("llava", "feature_norm", keep=4)
    single = ask(vlm)
    assert isinstance(single, str)
    several = vlm.generate([tiny.picture(1)] * 2, ["what is it?"] * 2, max_new_tokens=4, do_sample=False)
    assert several == [single, single]


def test_the_budget_can_be_given_per_call() -> None:
    vlm = pruned("llava", EveryOther(), keep=4)
    assert len(vlm.select([tiny.picture(1)]).keep[0]) == 4
    assert len(vlm.select([tiny.picture(1)], keep=0.5).keep[0]) == 8
    assert torch.equal(ask(vlm, keep=1.0, return_ids=True), ask(pruned("llava"), return_ids=True))


def test_a_selection_can_be_read_by_image_or_by_field() -> None:
    selection = pruned("llava", "feature_norm", keep=3).select([tiny.picture(1), tiny.picture(2)])
    assert len(selection) == 2 and selection[1].grid == (4, 4) == selection.grid[1]
    assert torch.equal(selection[0].keep, selection.keep[0]) and selection.keep[0].dtype == torch.int64
    assert selection[0].logits.shape == (16,) and selection[0].boxes.shape == (16, 4)
    best = selection[0].logits.topk(3).indices.sort().values
    assert torch.equal(best, selection[0].keep)


def test_random_keeps_the_same_tokens_of_a_picture_in_any_batch() -> None:
    vlm = pruned("llava", "random", keep=5)
    pictures = [tiny.picture(seed) for seed in range(4)]
    together = vlm.select(pictures)
    alone = [vlm.select([picture])[0] for picture in reversed(pictures)]
    for one, other in zip(together, reversed(alone), strict=True):
        assert torch.equal(one.keep, other.keep)
    assert len({tuple(one.keep.tolist()) for one in together}) > 1
    other_seed = pruned("llava", "random", keep=5, seed=1).select(pictures)
    assert any(not torch.equal(a, b) for a, b in zip(together.keep, other_seed.keep, strict=True))


def test_a_method_with_options_in_its_name_is_built_around_a_model_wrapped_once(monkeypatch) -> None:
    plain, wrapped, wrap = pruned("llava"), [], fitting.wrap_backbone

    def count(*arguments):
        wrapped.append(wrap(*arguments))
        return wrapped[-1]

    for module in (saved_pruners, fitting):
        monkeypatch.setattr(module, "wrap_backbone", count)
    monkeypatch.setattr(api, "load_base", lambda name: (plain.base, plain.processor))
    # `budget` is an option of the method as well as of the model around it: each keeps its own.
    vlm = load_vlm("none", model="any", method="fastv[layer=1;budget=average]", keep="4", device="cpu")
    assert wrapped == [vlm.backbone] and vlm.budget_rule == "global" and vlm.budget.keep == 4
    assert vlm.method.name == "fastv" and (vlm.method.options.layer, vlm.method.options.budget) == (1, "average")


def test_sampling_beams_and_a_static_cache_go_through_the_models_own_generate() -> None:
    vlm = pruned("llava", EveryOther(), keep=5)
    greedy = ask(vlm, return_ids=True)
    assert torch.equal(ask(vlm, return_ids=True, cache_implementation="static"), greedy)
    assert ask(vlm, return_ids=True, num_beams=3).shape == (1, 4)
    torch.manual_seed(0)
    first = ask(vlm, return_ids=True, do_sample=True, temperature=2.0)
    torch.manual_seed(0)
    assert torch.equal(ask(vlm, return_ids=True, do_sample=True, temperature=2.0), first)


def test_beams_over_masked_tokens_are_beams_over_dropped_ones() -> None:
    vlm = pruned("llava", EveryOther(), keep=5)
    batch = vlm.prepare([tiny.picture(1)], ["what is it?"])
    _, lm = vlm.logits(batch)
    mask = torch.zeros_like(batch.features["attention_mask"]).scatter(1, lm.source, lm.attention_mask)
    with torch.no_grad():
        stock = vlm.base.generate(
            **{**batch.features, "attention_mask": mask, "position_ids": vlm.backbone.positions(batch)},
            num_beams=3,
            max_new_tokens=4,
            do_sample=False,
        )
    assert torch.equal(ask(vlm, return_ids=True, num_beams=3), stock[:, mask.shape[1] :])


def test_sampling_inside_the_language_model_follows_its_generator() -> None:
    vlm = pruned("llava", "hidden_norm", keep=5, layer=1)

    def draw(seed: int):
        generator = torch.Generator().manual_seed(seed)
        return ask(vlm, return_ids=True, do_sample=True, temperature=3.0, top_k=50, top_p=0.95, generator=generator)

    assert torch.equal(draw(0), draw(0))
    assert any(not torch.equal(draw(0), draw(seed)) for seed in range(1, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_answer(dtype: torch.dtype) -> None:
    from tests.tiny import llava

    torch.manual_seed(0)
    model, processor = llava.build()
    vlm = PrunedVLM(model.to(dtype), processor, method="diffprune", keep=4)
    assert isinstance(ask(vlm), str)
    loss = vlm.loss(
        vlm.prepare([tiny.picture(1)], ["what?"], ["red"]), tau=0.5, generator=torch.Generator().manual_seed(0)
    )
    loss.backward()
    assert loss.isfinite()


@pytest.mark.slow
def test_a_compiled_model_decodes_the_same() -> None:
    from tests.tiny import llava

    torch.manual_seed(0)
    model, processor = llava.build()
    vlm = PrunedVLM(tiny.finish(model, processor), processor, method=EveryOther(), keep=5)
    eager = ask(vlm, return_ids=True, cache_implementation="static")
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(ask(vlm, return_ids=True, cache_implementation="static"), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_merging_method_brings_new_tokens_and_their_places() -> None:
    class Pairs(MergingPruner):
        """The mean of neighbours, at the place of the first."""

        name = "pairs"
        card = Card(idea="for tests")

        def reduce(self, tokens: VisualTokens, k: torch.Tensor) -> Kept:
            size = tokens.x.shape[1] // int(k[0])
            x = tokens.x.unflatten(1, (-1, size)).mean(2)
            return Kept(x=x, index=(torch.arange(x.shape[1]) * size).expand(len(x), -1))

    vlm = pruned("llava", Pairs(), keep=8)
    assert isinstance(ask(vlm), str)
    assert vlm.select([tiny.picture(1)])[0].keep.tolist() == list(range(0, 16, 2))
    assert torch.equal(ask(vlm, keep=16, return_ids=True), ask(pruned("llava"), return_ids=True))


class Backwards(EveryOther):
    """Keeps the same tokens as its parent, the last one first."""

    name = "backwards"
    Options = ClsAttentionOptions  # for its `native`

    def select(self, tokens: VisualTokens, k: torch.Tensor) -> torch.Tensor:
        return super().select(tokens, k).flip(-1)


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen3_vl"])
def test_kept_tokens_of_any_order_are_spliced_in_raster_order(family: str) -> None:
    backwards = pruned(family, Backwards(ClsAttentionOptions(native=True)), keep=5, positions="original")
    batch = backwards.prepare([tiny.picture(1), tiny.picture(2, (180, 60))], ["what?", "where is it?"])
    ascending = pruned(family, EveryOther(), keep=5)
    (found, lm), (wanted, other) = backwards.logits(batch), ascending.logits(batch)
    assert torch.equal(found, wanted)
    assert torch.equal(lm.inputs_embeds, other.inputs_embeds) and torch.equal(lm.position_ids, other.position_ids)
    assert torch.equal(lm.origin.index, other.origin.index)
    kept = backwards.select([tiny.picture(1)])[0].keep
    assert kept.tolist() == sorted(kept.tolist()) == ascending.select([tiny.picture(1)])[0].keep.tolist()


@pytest.mark.parametrize("name", ["visionzip", "tome", "holov"])
def test_a_release_s_own_order_does_not_reach_the_language_model(name: str) -> None:
    vlm = pruned("llava", name, keep=6, native=True)
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    tokens = vlm.encode(batch)
    places = vlm.method.select(tokens, torch.tensor([6]))[0]
    assert places.tolist() != sorted(places.tolist())
    lm = vlm.lm_inputs(batch, tokens)
    assert lm.origin.index[lm.visual].tolist() == sorted(places[places >= 0].tolist())
    if isinstance(vlm.method, MergingPruner):
        merged = vlm.method.reduce(tokens, torch.tensor([6])).in_raster_order()
        expected = vlm.backbone.project(merged.x)[0]
    else:
        expected = vlm.backbone.project(tokens.x)[0, places[places >= 0].sort().values]
    torch.testing.assert_close(lm.inputs_embeds[lm.visual], expected)


def test_a_release_that_numbers_anew_does_so_with_native() -> None:
    for name in ("divprune", "fastervlm", "oc_vtp", "vispruner", "mmtok", "visionzip", "holov", "prunesid"):
        assert pruned("llava", name, native=True).positions == "packed"
        assert pruned("llava", name, native=True, positions="original").positions == "original"
        assert pruned("llava", name).positions == "original"
        assert pruned("qwen2_5_vl", name, native=True).positions == "original"  # three numbers each stay as they are
    for name in ("gots", "pyramiddrop"):  # the last one counts anew inside the language model, by itself
        assert pruned("llava", name, native=True).positions == "original"
    assert pruned("llava", "divprune", native=True).with_method("fastv").positions == "original"
    assert pruned("llava").with_method("divprune", native=True).positions == "packed"


# ------------------------------------------------------------------------------------------------- training path


def test_the_hard_loss_is_the_loss_of_the_deployed_path() -> None:
    vlm = pruned("llava", EveryOther(), keep=5)
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["red"])
    hard = vlm.loss(batch, hard=True)
    logits, lm = vlm.logits(batch)
    wanted = lm.labels[:, 1:] != -100
    expected = nn.functional.cross_entropy(logits[:, :-1][wanted], lm.labels[:, 1:][wanted])
    assert torch.allclose(hard, expected, atol=1e-6)
    with pytest.raises(ValueError, match="'every_other' has nothing to train"):
        vlm.loss(batch)


def test_at_full_budget_the_throttled_loss_is_the_untouched_models() -> None:
    vlm = pruned("llava", "diffprune", keep=1.0)
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["red"])
    assert torch.allclose(vlm.loss(batch, tau=1.0), vlm.loss(batch, hard=True), atol=1e-5)


def test_training_numbers_positions_as_deployment_does() -> None:
    vlm = pruned("qwen2_5_vl", "diffprune", keep=1.0, positions="packed")
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["red"])
    assert torch.allclose(vlm.loss(batch, tau=1.0), vlm.loss(batch, hard=True), atol=1e-5)


def test_a_rows_noise_does_not_depend_on_its_batch() -> None:
    vlm = pruned("llava", "diffprune", keep=4)
    pictures, texts, answers = [tiny.picture(1), tiny.picture(2)], ["what?", "where is it?"], ["red", "left"]

    def loss_of(rows: list[int]) -> torch.Tensor:
        batch = vlm.prepare([pictures[i] for i in rows], [texts[i] for i in rows], [answers[i] for i in rows])
        generators = [torch.Generator().manual_seed(100 + i) for i in rows]
        return vlm.loss(batch, tau=1.0, generator=generators, num_targets=1)

    assert torch.allclose(loss_of([0, 1]), loss_of([0]) + loss_of([1]), rtol=1e-5)


def test_a_batch_without_answers_has_no_loss() -> None:
    vlm = pruned("llava", "diffprune", keep=4)
    with pytest.raises(ValueError, match="no answers"):
        vlm.loss(vlm.prepare([tiny.picture(1)], ["what?"]), tau=1.0)


# ------------------------------------------------------------------------------------------------- save and load


def saved(tmp_path: Path) -> tuple[PrunedVLM, Path]:
    model, processor = tiny.build("llava")
    vlm = PrunedVLM(model, processor, method="diffprune", keep=4)
    with torch.no_grad():
        for parameter in vlm.method.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    model.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    vlm.save_pretrained(tmp_path / "pruner", base_id=str(tmp_path / "base"))
    return vlm, tmp_path / "pruner"


def test_a_saved_pruner_finds_its_base_and_answers_the_same(tmp_path: Path) -> None:
    vlm, folder = saved(tmp_path)
    loaded = dp.PrunedVLM.from_pretrained(folder, base=vlm.base, processor=vlm.processor)
    assert torch.equal(ask(loaded, return_ids=True), ask(vlm, return_ids=True))
    assert loaded.budget == vlm.budget and len(loaded.select([tiny.picture(3)], keep=2).keep[0]) == 2
    again = dp.PrunedVLM.from_pretrained(folder)
    assert torch.equal(again.select([tiny.picture(5)]).keep[0], vlm.select([tiny.picture(5)]).keep[0])


def test_a_saved_pruner_holds_neither_base_nor_throttler(tmp_path: Path) -> None:
    from safetensors import safe_open

    vlm, folder = saved(tmp_path)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert names and not any("throttle_" in name for name in names)
    assert names == {name for name in vlm.method.state_dict() if "throttle_" not in name}


def test_another_base_is_refused_by_name_unless_asked_for(tmp_path: Path) -> None:
    from tests.tiny import llava

    _, folder = saved(tmp_path)
    torch.manual_seed(7)
    other, processor = llava.build()
    with pytest.raises(ValueError, match=r"trained on .*base.* not on .*vision weights differ"):
        dp.PrunedVLM.from_pretrained(folder, base=other, processor=processor)
    dp.PrunedVLM.from_pretrained(folder, base=other, processor=processor, allow_other_base=True)


def test_a_checkpoint_with_a_weight_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 weights are missing, so random, the first is lm_head\.weight"):
        refuse_gaps("somewhere", {"missing_keys": ["lm_head.weight"], "unexpected_keys": []})
    refuse_gaps("somewhere", {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []})


# ------------------------------------------------------------------------------------------------- wrong turns


def test_a_budget_above_the_tokens_keeps_all_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    vlm = pruned("llava", "feature_norm", keep=99)
    with caplog.at_level(logging.WARNING, logger="diffprune"):
        first = ask(vlm, return_ids=True)
        ask(vlm)
    assert torch.equal(first, ask(pruned("llava"), return_ids=True))
    assert [record.message for record in caplog.records] == ["keep=99 is more than an image has (16): all are kept"]


@pytest.mark.parametrize("keep", [0, -3, 0.0, 1.5, float("nan"), True])
def test_a_budget_that_is_none_is_named(keep: float) -> None:
    with pytest.raises(ValueError, match="keep="):
        pruned("llava", "feature_norm", keep=keep)


def test_a_list_of_budgets_has_each_once_and_never_one_token_beside_all() -> None:
    assert parse_budgets("64,0.5,64,1") == [64, 0.5, 1]
    assert [type(keep) for keep in parse_budgets("1.0,1.0")] == [float]
    with pytest.raises(ValueError, match=r"keep=1 is one token and keep=1\.0 is all of them"):
        parse_budgets("1.0,64,1")


def test_a_budget_may_be_any_number_and_nothing_else() -> None:
    # In a process of its own, as a user has it: here the tests' type checks would speak first.
    program = """
import numpy, torch, diffprune as dp
print(dp.Budget(numpy.int64(64)).count(576), dp.Budget(numpy.float32(0.5)).count(576))
for keep in ("16", torch.tensor(16), None):
    try:
        dp.Budget(keep)
    except ValueError as error:
        print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[0] == "64 288"
    assert len(said) == 4 and all("is no budget" in line for line in said[1:])


def test_another_method_goes_around_the_same_model_by_the_same_rules() -> None:
    vlm = pruned("llava", "feature_norm", keep=4, positions="packed")
    other = vlm.with_method("random", seed=3)
    assert other.base is vlm.base and other.budget == vlm.budget and other.positions == "packed"
    assert other.method.name == "random" and other.method.options.seed == 3


def test_prompts_and_pictures_must_match() -> None:
    vlm = pruned("llava")
    with pytest.raises(ValueError, match="no image placeholder"):
        vlm.generate([tiny.picture()], "what is it?", chat=False)
    with pytest.raises(ValueError, match=r"2 image\(s\) for 1 placeholder\(s\) <image>"):
        vlm.generate([tiny.picture(), tiny.picture()], "<image> what is it?")
    with pytest.raises(ValueError, match=r"0 image\(s\) for 1 placeholder"):
        vlm.generate(None, "<image> what is it?")
    with pytest.raises(ValueError, match="1 entries in images for 2 prompts"):
        vlm.generate([tiny.picture()], ["a", "b"])
    with pytest.raises(ValueError, match="give a list of images"):
        vlm.generate(tiny.picture(), "what?")
    for nothing in (None, [], tiny.picture()):
        with pytest.raises(ValueError, match="give a list of images"):
            vlm.select(nothing)


def test_what_would_silently_change_answers_is_refused() -> None:
    vlm = pruned("llava")
    with pytest.raises(ValueError, match="prefill_chunk_size=4"):
        ask(vlm, prefill_chunk_size=4)
    with pytest.raises(ValueError, match="position_ids is made by the pruned path"):
        ask(vlm, position_ids=torch.zeros(1, 1))
    with pytest.raises(ValueError, match="num_return_sequences"):
        ask(vlm, num_beams=3, num_return_sequences=3)
    assert ask(vlm, num_beams=3, num_return_sequences=3, return_ids=True).shape == (3, 4)
    model, processor = tiny.build("llava")
    old = model.config._attn_implementation
    model.config._attn_implementation_internal = "flash_attention_2"
    try:
        with pytest.raises(ValueError, match=r'flash_attention_2.*attn_implementation="sdpa"'):
            PrunedVLM(model, processor)
    finally:
        model.config._attn_implementation_internal = old


def test_wrong_models_methods_and_options_are_answered_with_what_there_is() -> None:
    model, processor = tiny.build("llava")
    with pytest.raises(
        ValueError, match=r"model type 'clip_vision_model' is not supported; there are .*llava.*add_a_backbone"
    ):
        PrunedVLM(model.model.vision_tower, processor)
    with pytest.raises(ValueError, match="unknown method 'featurenorm'; did you mean feature_norm"):
        PrunedVLM(model, processor, method="featurenorm")
    with pytest.raises(ValueError, match="has no option 'sed'; did you mean seed"):
        PrunedVLM(model, processor, method="random", sed=3)
    with pytest.raises(ValueError, match="positions='gapped'"):
        PrunedVLM(model, processor, positions="gapped")
    with pytest.raises(ValueError, match=r"'fastv' drops inside the language model"):
        PrunedVLM(model, processor, method="fastv", keep=4, positions="packed")
    with pytest.raises(ValueError, match="already"):
        PrunedVLM(PrunedVLM(model, processor), processor)


def test_the_base_model_is_no_part_of_the_module() -> None:
    vlm = pruned("llava", "diffprune", keep=4)
    assert not any(name.startswith(("_base", "backbone")) for name in vlm.state_dict())
    assert all(name.startswith("method.") for name, _ in vlm.named_parameters())
    assert vlm.base is tiny.build("llava")[0]


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [
        ([0], r"keep=\[0\] keeps nothing of an image"),
        ([-3], r"keep=\[-3\] keeps nothing of an image"),
        ([3, 3], r"keep=\[3, 3\] names 2 images, and there are 1"),
        ([0.5], r"keep=\[0.5\] is no count of tokens"),
    ],
)
def test_counts_given_one_by_one_are_checked(keep: list[float], sentence: str) -> None:
    vlm = pruned("llava", "feature_norm")
    batch = vlm.prepare([[tiny.picture(1)]], ["what?"], answers=["red"])
    with pytest.raises(ValueError, match=sentence):
        vlm.loss(batch, keep=torch.tensor(keep), hard=True)


def test_more_tokens_than_an_image_has_are_all_of_them() -> None:
    vlm = pruned("llava", "feature_norm")
    tokens = vlm.encode(vlm.prepare([tiny.picture(1)] * 2, ["what?"] * 2))
    assert vlm.counts(tokens, torch.tensor([99, 3])).tolist() == [16, 3]
