"""A compiled model whose parts are changed afterwards: seen, said once, and answered as without compile()."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diffprune.fast.seal import Parts
from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.vlm import pruned
from tests.fast.compiled import QUESTIONS, answer, compiled, reference


def own_model(family: str = "llava", method: Any = "diffprune", **options: Any) -> PrunedVLM:
    """A compiled tiny model whose weights are no other test's."""
    model, processor = tiny.build(family)
    vlm = PrunedVLM(copy.deepcopy(model), processor, method=method, keep=5)
    return compiled(family, method, vlm=vlm, batch_sizes=(1,), **options)


@pytest.fixture
def sayings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="diffprune")
    return lambda: [record.message for record in caplog.records]


def scaled(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(-1.0)


def replace_parameter(vlm: PrunedVLM) -> None:
    layer = vlm.base.model.language_model.layers[0].mlp
    layer.down_proj.weight = nn.Parameter(-layer.down_proj.weight.detach())


def replace_module(vlm: PrunedVLM) -> None:
    layers = vlm.base.model.language_model.layers
    other = copy.deepcopy(layers[1])
    scaled(other.mlp.down_proj.weight)
    layers[1] = other


def move_weights(vlm: PrunedVLM) -> None:
    for parameter in vlm.base.model.vision_tower.parameters():
        parameter.data = parameter.data.flip(0).clone()


def hook_tower(vlm: PrunedVLM) -> None:
    vlm.base.model.vision_tower.register_forward_hook(lambda module, args, out: negate(out))


def negate(out: Any) -> Any:
    out.hidden_states = tuple(-hidden for hidden in out.hidden_states)
    return out


def patch_forward(vlm: PrunedVLM) -> None:
    projector = vlm.base.model.multi_modal_projector
    stock = projector.forward
    projector.forward = lambda x: -stock(x)


CHANGES: dict[str, tuple[Callable[[PrunedVLM], object], str]] = {
    "decoder": (
        lambda vlm: scaled(vlm.base.model.language_model.layers[0].self_attn.q_proj.weight),
        "model.model.language_model.layers.0.self_attn.q_proj.weight was changed after compile()",
    ),
    "scorer": (lambda vlm: scaled(vlm.method.scorer.head.weight), "was changed after compile()"),
    "replaced parameter": (replace_parameter, "layers.0.mlp.down_proj.weight was replaced after compile()"),
    "replaced module": (replace_module, "model.model.language_model.layers.1 was replaced after compile()"),
    "moved": (move_weights, "was changed after compile()"),
    "hook": (hook_tower, "model.model.vision_tower was given a hook after compile()"),
    "forward": (patch_forward, "model.model.multi_modal_projector.forward was replaced after compile()"),
    "method": (
        lambda vlm: setattr(vlm, "method", pruned("llava", "feature_norm").method),
        "the method was 'diffprune' when it was compiled and is 'feature_norm' now",
    ),
    "positions": (
        lambda vlm: setattr(vlm, "positions", "packed"),
        "positions was 'original' when it was compiled and is 'packed' now",
    ),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_after_compile_is_seen_and_said_once(name: str, sayings: Callable[[], list[str]]) -> None:
    change, sentence = CHANGES[name]
    vlm, images = own_model(), [tiny.picture(1)]
    before = answer(vlm, images, QUESTIONS[1])
    change(vlm)
    for _ in range(2):
        assert torch.equal(answer(vlm, images, QUESTIONS[1]), reference(vlm, images, QUESTIONS[1]))
    assert not torch.equal(before, reference(vlm, images, QUESTIONS[1])), "the change must matter"
    (said,) = sayings()
    assert said.startswith("the fast path cannot answer here: ") and sentence in said
    assert "set vlm.fast = None and compile() again" in said
    vlm.fast = None
    if name == "decoder":
        vlm.compile(batch_sizes=(1,), text_buckets=(64,), max_new_tokens=6)
        assert torch.equal(answer(vlm, images, QUESTIONS[1]), reference(vlm, images, QUESTIONS[1]))
        assert len(sayings()) == 1


def test_a_changed_setting_of_the_method_is_seen(sayings: Callable[[], list[str]]) -> None:
    vlm = own_model(method="random")
    vlm.method.options = type(vlm.method.options)(seed=7)
    answer(vlm, [tiny.picture(1)], QUESTIONS[0])
    assert "a setting of 'random' was changed after compile()" in sayings()[0]


def test_newlines_kept_by_another_rule_are_seen(sayings: Callable[[], list[str]]) -> None:
    vlm = own_model("llava_next", "feature_norm")
    vlm.backbone.keeps_newlines = "none"
    images = [tiny.picture(1)]
    assert torch.equal(answer(vlm, images, QUESTIONS[0]), reference(vlm, images, QUESTIONS[0]))
    assert "newline was 'rows' when it was compiled and is 'none' now" in sayings()[0]


def test_a_model_with_a_hook_is_refused() -> None:
    vlm = own_model()
    vlm.fast = None
    handle = vlm.base.model.language_model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"model\.model\.language_model\.layers\.1 has one; remove it"):
        vlm.compile(text_buckets=(64,))
    handle.remove()
    vlm.compile(text_buckets=(64,))


def test_a_deep_copy_has_weights_and_answers_of_its_own(sayings: Callable[[], list[str]]) -> None:
    vlm, images = own_model(), [tiny.picture(1)]
    wanted = answer(vlm, images, QUESTIONS[1])
    other = copy.deepcopy(vlm)
    assert other.fast is None and sayings() == [
        "the copy of a compiled model is not compiled; call compile() on the copy"
    ]
    scaled(other.base.model.language_model.layers[0].self_attn.q_proj.weight)
    assert not torch.equal(answer(other, images, QUESTIONS[1]), wanted)
    assert torch.equal(answer(vlm, images, QUESTIONS[1]), wanted)
    assert len(sayings()) == 1


def test_answering_without_the_fast_path_is_no_change(sayings: Callable[[], list[str]]) -> None:
    vlm = own_model("qwen2_5_vl", "feature_norm")
    reference(vlm, [tiny.picture(1)], QUESTIONS[0], output_hidden_states=True, return_dict_in_generate=True)
    answer(vlm, [tiny.picture(1)], QUESTIONS[0])
    assert sayings() == []


def test_weights_made_in_inference_mode_have_no_version_and_are_watched_by_their_address() -> None:
    with torch.inference_mode():
        layer = nn.Linear(3, 3)
    parts = Parts({"model": layer})
    assert parts.changed() == ""
    layer.weight = nn.Parameter(torch.zeros(3, 3))
    assert parts.changed() == "model.weight was replaced"


def test_a_budget_shared_out_by_another_rule_is_seen(sayings: Callable[[], list[str]]) -> None:
    vlm = own_model("llava_next", "feature_norm")
    vlm.budget_rule = "per_tile"
    answer(vlm, [tiny.picture(1)], QUESTIONS[0])
    assert "budget was 'global' when it was compiled and is 'per_tile' now" in sayings()[0]


def test_weights_that_were_cast_are_said_before_they_are_multiplied(sayings: Callable[[], list[str]]) -> None:
    vlm, images = own_model(), [tiny.picture(1)]
    vlm.base.to(torch.float64)
    vlm.method.to(torch.float64)
    assert torch.equal(answer(vlm, images, QUESTIONS[1]), reference(vlm, images, QUESTIONS[1]))
    (said,) = sayings()
    assert "was changed after compile()" in said


def test_what_was_compiled_before_a_change_is_not_shared() -> None:
    first = own_model("llava", "full")
    other = first.with_method("feature_norm", keep=5)
    scaled(first.base.model.vision_tower.encoder.layers[0].self_attn.q_proj.weight)
    with pytest.raises(ValueError, match=r"share cannot be used: model\..*q_proj\.weight was changed after it was"):
        compiled("llava", vlm=other, share=first.fast)
    assert other.fast is None


class Adapted(nn.Module):
    """A linear map with something added to it, which shows the weight of the map alone, as adapters do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> torch.Tensor:
        return self.linear.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 0.01 * x.mean()


def test_an_adapted_map_in_the_tower_is_run_by_the_reference_code(sayings: Callable[[], list[str]]) -> None:
    model, processor = tiny.build("llava")
    vlm = PrunedVLM(copy.deepcopy(model), processor, method="feature_norm", keep=5)
    attention = vlm.base.model.vision_tower.encoder.layers[0].self_attn
    attention.v_proj = Adapted(attention.v_proj)
    compiled("llava", vlm=vlm)
    assert vlm.fast.tower is None and "does not know the vision tower of llava (one of its linear" in sayings()[0]
    assert torch.equal(answer(vlm, [tiny.picture(1)], "what?"), reference(vlm, [tiny.picture(1)], "what?"))


def test_an_adapted_map_in_any_place_of_the_language_model_is_refused() -> None:
    model, processor = tiny.build("llava")
    vlm = PrunedVLM(copy.deepcopy(model), processor, method="feature_norm", keep=5)
    layer = vlm.base.model.language_model.layers[1]
    layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    with pytest.raises(
        ValueError, match=r"does not know the language model of llava \(one of its linear maps is a Ada"
    ):
        compiled("llava", vlm=vlm)


def test_a_tower_whose_forward_somebody_put_in_place_is_run_by_the_reference_code(
    sayings: Callable[[], list[str]],
) -> None:
    model, processor = tiny.build("llava")
    vlm = PrunedVLM(copy.deepcopy(model), processor, method="feature_norm", keep=5)
    block = vlm.base.model.vision_tower.encoder.layers[0].mlp
    stock = block.forward
    block.forward = lambda x: -stock(x)
    compiled("llava", vlm=vlm)
    assert "the fast path gives other features for 1 x 16 visual tokens" in sayings()[0]
    for seed in range(3):
        images = [tiny.picture(seed)]
        assert torch.equal(answer(vlm, images, "what?"), reference(vlm, images, "what?"))
