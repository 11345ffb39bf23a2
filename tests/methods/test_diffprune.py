"""DiffPrune: each option does what it says, and the parts are where the paper has them."""

import json
from pathlib import Path

import pytest
import torch

from diffprune.methods.base import TrainablePruner
from diffprune.methods.diffprune import DiffPrune
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.nn import BilinearScorer, BlockSpec, DiagonalBlock, GlobalBlock
from diffprune.types import VisualTokens
from tests import tiny
from tests.methods.examples import SPEC, make_method, make_tokens

CLIP_L = BlockSpec(width=1024, heads=16, mlp_width=4096, activation="quick_gelu", eps=1e-5)
K = torch.tensor([4, 3, 2])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def diffprune(name: str = "diffprune", **options: object) -> DiffPrune:
    method = make_method(name, **options)
    assert isinstance(method, DiffPrune)
    return method


def test_the_variants_are_options_of_one_class() -> None:
    assert build_method("diffprune-scale", block=SPEC).options.gate == "scale"
    assert isinstance(diffprune("diffprune-global").throttle_block, GlobalBlock)
    assert isinstance(diffprune().throttle_block, DiagonalBlock)
    assert diffprune(attention="none").throttle_block is None
    assert isinstance(diffprune(scorer="bilinear").scorer, BilinearScorer)


def test_an_option_given_by_hand_beats_the_variant_s() -> None:
    assert build_method("diffprune-scale", block=SPEC, gate="vp").options.gate == "vp"


def test_at_the_start_every_token_weighs_the_same() -> None:
    tokens = make_tokens()
    alpha = build_method("diffprune", block=SPEC).restrict(tokens, K, tau=2.0).alpha  # type: ignore[attr-defined]
    share = (K / tokens.counts)[:, None].expand_as(alpha)
    torch.testing.assert_close(alpha[tokens.mask], share[tokens.mask])


def test_a_lower_temperature_is_closer_to_hard_top_k() -> None:
    method, tokens = diffprune(), make_tokens()
    kept = torch.zeros(tokens.mask.shape, dtype=torch.bool)
    for row, indices in enumerate(method.select(tokens, K)):
        kept[row, indices[indices >= 0]] = True
    soft, hard = (method.restrict(tokens, K, tau=tau).alpha for tau in (1.0, 1e-4))
    torch.testing.assert_close(hard, kept.float(), rtol=0, atol=1e-3)
    assert (soft - kept.float()).abs().max() > 0.1


def test_without_block_the_gate_is_the_paper_s_equation() -> None:
    method, tokens = diffprune(attention="none"), make_tokens((12, 12))
    x, alpha, *_ = method.restrict(tokens, torch.tensor([4, 3]), tau=0.7, generator=seeded(5))
    noise = torch.randn(2, 12, 16, generator=seeded(5))
    expected = alpha[..., None].sqrt() * tokens.x + (1 - alpha[..., None]).sqrt() * noise
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)


def test_the_scale_gate_draws_no_noise() -> None:
    method, tokens = diffprune("diffprune-scale", attention="none"), make_tokens((12, 12))
    x, alpha, *_ = method.restrict(tokens, torch.tensor([4, 3]), tau=0.7)
    torch.testing.assert_close(x, alpha[..., None] * tokens.x)


def test_kept_exact_leaves_a_kept_token_as_it_is_deployed() -> None:
    tokens = make_tokens((12,))
    k = torch.tensor([4])
    for kept_exact in (True, False):
        method = diffprune(kept_exact=kept_exact)
        x = method.restrict(tokens, k, tau=1e-4, generator=seeded()).x[0]
        kept = method.select(tokens, k)[0]
        assert torch.allclose(x[kept], tokens.x[0, kept], atol=1e-3) == kept_exact
        dropped = torch.tensor([index for index in range(12) if index not in kept.tolist()])
        assert not torch.allclose(x[dropped], tokens.x[0, dropped], atol=1e-1)


def test_standardised_logits_do_not_care_for_their_scale() -> None:
    tokens = make_tokens()
    for standardise in (True, False):
        method = diffprune(standardise=standardise)
        before = method.restrict(tokens, K, tau=0.7).alpha
        with torch.no_grad():
            method.scorer.head.weight *= 5  # type: ignore[union-attr]
            method.scorer.head.bias *= 5  # type: ignore[union-attr]
        after = method.restrict(tokens, K, tau=0.7).alpha
        assert torch.allclose(before, after, atol=2e-2) == standardise


def test_matched_noise_has_the_features_mean_and_deviation() -> None:
    torch.manual_seed(0)
    channel_mean, channel_std = torch.linspace(-3, 3, 16), torch.linspace(0.5, 4, 16)
    mask = torch.ones(2, 400, dtype=torch.bool)
    mask[1, 200:] = False
    x = torch.where(mask[..., None], channel_mean + channel_std * torch.randn(2, 400, 16), 1e6)
    tokens = VisualTokens(x=x, mask=mask)
    method = build_method("diffprune", block=SPEC, noise="matched", attention="none")  # all weights still equal
    assert isinstance(method, DiffPrune)
    method.calibrate([tokens, tokens])
    assert method.throttle_noise is not None
    real = x[mask].double()
    torch.testing.assert_close(method.throttle_noise.mean, real.mean(0).float())
    torch.testing.assert_close(method.throttle_noise.std, real.std(0, correction=0).float())
    weakened, alpha, *_ = method.restrict(tokens, torch.tensor([4, 4]), tau=2.0, generator=seeded(5))
    mean, std, noise = real.mean(0), real.std(0, correction=0), torch.randn(2, 400, 16, generator=seeded(5))
    weight = alpha[..., None].double()
    expected = mean + weight.sqrt() * (x - mean) + (1 - weight).sqrt() * std * noise
    torch.testing.assert_close(weakened[mask], expected[mask].float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weakened[mask].std(0), std.float(), rtol=0.1, atol=0.0)  # the variance is preserved


def test_matched_noise_serves_tokens_of_several_patches() -> None:
    tokens = make_tokens(group=4)
    method = diffprune(noise="matched")
    method.calibrate([tokens])
    assert method.restrict(tokens, K, tau=0.7).x[tokens.mask].isfinite().all()


def test_matched_noise_must_be_calibrated_first() -> None:
    method = diffprune(noise="matched")
    with pytest.raises(ValueError, match=r"not calibrated; call calibrate\(\)"):
        method.restrict(make_tokens(), K, tau=0.7)
    with pytest.raises(ValueError, match="no visual token"):
        method.calibrate([])


def test_calibration_travels_with_the_training_checkpoint() -> None:
    method, tokens = diffprune(noise="matched"), make_tokens()
    method.calibrate([tokens])
    resumed = diffprune(noise="matched")
    resumed.load_state_dict(method.state_dict())
    first, second = (m.restrict(tokens, K, tau=0.7, generator=seeded()).x for m in (method, resumed))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_keep_the_frozen_model_s_precision(dtype: torch.dtype) -> None:
    tokens = make_tokens()
    restricted = diffprune().restrict(VisualTokens(x=tokens.x.to(dtype), mask=tokens.mask), K, tau=0.7)
    assert restricted.x.dtype == dtype
    assert restricted.alpha.dtype == restricted.logits.dtype == torch.float32
    torch.testing.assert_close(restricted.alpha.sum(-1), K.float(), rtol=1e-4, atol=1e-4)


def test_parameters_are_counted_as_stated() -> None:
    with torch.device("meta"):
        method = build_method("diffprune", block=CLIP_L)
    assert isinstance(method, TrainablePruner)
    millions = {name: round(count / 1e6, 1) for name, count in method.parameter_counts().items()}
    assert millions == {"scorer": 25.2, "all": 37.8, "trainable": 35.7}


@pytest.mark.parametrize(
    "option, value",
    [
        ("scorer", "conv"),
        ("response", "relu"),
        ("gate", "sqrt"),
        ("noise", "pink"),
        ("attention", "local"),
        ("scorer_depth", -1),
        ("groups", "pairs"),
        ("tiles", "mixed"),
    ],
)
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        build_method("diffprune", block=SPEC, **{option: value})


def test_generators_must_be_one_or_one_per_image() -> None:
    with pytest.raises(ValueError, match="2 generators for 3 rows"):
        diffprune().restrict(make_tokens(), K, tau=0.7, generator=[seeded(1), seeded(2)])


def test_how_groups_are_scored_is_kept_in_the_artefact_and_old_ones_score_patches(tmp_path: Path) -> None:
    model, processor = tiny.build("qwen2_5_vl")
    vlm = PrunedVLM(model, processor, method="diffprune", keep=4, groups="merged")
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    vlm.save_pretrained(tmp_path, base_id="x/y")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["method"]["options"]["groups"] == "merged"
    tokens = vlm.encode(vlm.prepare([tiny.picture(1)], ["what?"]))
    for method in (None, "diffprune-diverse"):
        loaded = PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor, method=method)
        assert torch.equal(loaded.method.score(tokens), vlm.method.score(tokens))
    del config["method"]["options"]["groups"]  # as artefacts were before there was a choice
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)
    assert old.method.scorer.groups == "patches"
    assert not torch.allclose(old.method.score(tokens), vlm.method.score(tokens))


def test_a_scorer_of_merged_groups_learns() -> None:
    model, processor = tiny.build("qwen2_5_vl")
    vlm = PrunedVLM(model, processor, method="diffprune", keep=4, groups="merged")
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["a sign"])
    vlm.loss(batch, tau=0.5).backward()
    assert vlm.method.scorer.head.weight.grad.abs().sum() > 0
