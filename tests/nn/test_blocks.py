"""Our block computes what the tower's own block computes: weights are copied over and outputs compared."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, DeiTConfig, LlavaConfig, SiglipVisionConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.deit.modeling_deit import DeiTLayer
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3EncoderLayer
from transformers.models.internvl.configuration_internvl import InternVLVisionConfig
from transformers.models.internvl.modeling_internvl import InternVLVisionLayer
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionBlock
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from diffprune.nn import Block, BlockSpec
from diffprune.nn.blocks import rotary_angles
from diffprune.registry import BACKBONES

# Last two parts of a tower's parameter names (without weight/bias), ours after them; "qkv" is split in three.
NAMES = {
    "norm1": ("layer_norm1", "layernorm_before", "norm1"),
    "norm2": ("layer_norm2", "layernorm_after", "norm2"),
    "attention.query": ("q_proj", "query"),
    "attention.key": ("k_proj", "key"),
    "attention.value": ("v_proj", "value"),
    "attention.out": ("out_proj", "o_proj", "attn.proj", "attention.output.dense", "projection_layer"),
    "attention.query_norm": ("q_norm",),
    "attention.key_norm": ("k_norm",),
    "mlp.gate": ("gate_proj",),
    "mlp.up": ("fc1", "linear_fc1", "up_proj", "intermediate.dense"),
    "mlp.down": ("fc2", "linear_fc2", "down_proj", "output.dense"),
}


def copy_weights(tower: nn.Module, ours: Block) -> None:
    """Every parameter of the tower's block into ours; each of ours must be met exactly once."""
    state: dict[str, Tensor] = {}
    for name, value in tower.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module.endswith("qkv"):
            parts = zip(("query", "key", "value"), value.chunk(3), strict=True)
            state |= {f"attention.{part}.{kind}": chunk for part, chunk in parts}
            continue
        matches = {
            ending: target
            for target, endings in NAMES.items()
            for ending in endings
            if f".{module}".endswith(f".{ending}")
        }
        assert matches, f"the test does not know {name}"
        state[f"{matches[max(matches, key=len)]}.{kind}"] = value  # the longest ending is the most specific
    ours.load_state_dict(state)


def random_weights(module: nn.Module) -> None:
    """Norms, too, get weights that are not 1 and biases that are not 0, so that a swapped one shows."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
PLAIN_TOWERS = {
    "clip": (CLIPVisionConfig(**SIZES), CLIPEncoderLayer),
    "siglip": (SiglipVisionConfig(**SIZES), SiglipEncoderLayer),
    "deit": (DeiTConfig(**SIZES), DeiTLayer),
    "deit without qkv bias": (DeiTConfig(**SIZES, qkv_bias=False), DeiTLayer),
    "idefics3": (Idefics3VisionConfig(**SIZES), Idefics3EncoderLayer),
}
ROTARY_TOWERS = {
    "qwen2_vl": (Qwen2VLVisionConfig(embed_dim=32, num_heads=2, mlp_ratio=2), Qwen2VLVisionBlock),
    "qwen2_5_vl": (Qwen2_5_VLVisionConfig(hidden_size=32, num_heads=2, intermediate_size=24), Qwen2_5_VLVisionBlock),
    "qwen3_vl": (Qwen3VLVisionConfig(hidden_size=32, num_heads=2, intermediate_size=24), Qwen3VLVisionBlock),
}


@pytest.mark.parametrize("name", PLAIN_TOWERS)
def test_our_block_is_the_tower_s_block(name: str) -> None:
    config, layer_class = PLAIN_TOWERS[name]
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    tower, ours = layer_class(config).eval(), Block(BlockSpec.from_config(config))
    random_weights(tower)
    copy_weights(tower, ours)
    x = torch.randn(2, 7, 32)
    output = tower(x, attention_mask=None)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(ours(x), output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROTARY_TOWERS)
def test_our_block_is_the_tower_s_block_with_rotary_positions(name: str) -> None:
    config, block_class = ROTARY_TOWERS[name]
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    spec = BACKBONES.get(name).tower_block(config)
    tower, ours = block_class(config).eval(), Block(spec)
    random_weights(tower)
    copy_weights(tower, ours)
    x = torch.randn(1, 12, 32)
    coords = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), dim=-1).view(1, 12, 2)
    angles = rotary_angles(coords, spec)
    lengths = torch.tensor([0, 12], dtype=torch.int32)
    theirs = tower(x[0], cu_seqlens=lengths, position_embeddings=(angles[0].cos(), angles[0].sin()))
    torch.testing.assert_close(ours(x, angles=angles)[0], theirs, rtol=1e-5, atol=1e-5)


def test_rotary_angles_are_qwen_s_own() -> None:
    config = Qwen2_5_VLVisionConfig(hidden_size=32, num_heads=2, intermediate_size=24)
    coords = torch.tensor([[[0, 0], [0, 3], [5, 0], [7, 2]]])
    # Qwen's layout, written out: row frequencies, then column frequencies, then both again.
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    half = torch.cat([coords[0, :, :1] * frequencies, coords[0, :, 1:] * frequencies], dim=-1)
    expected = torch.cat([half, half], dim=-1)
    torch.testing.assert_close(rotary_angles(coords, BACKBONES.get("qwen2_5_vl").tower_block(config))[0], expected)


@pytest.mark.parametrize("norm, qk_norm", [("layer_norm", False), ("rms_norm", True)])
def test_our_block_is_internvl_s_without_its_layer_scale(norm: str, qk_norm: bool) -> None:
    config = InternVLVisionConfig(**SIZES, norm_type=norm, use_qk_norm=qk_norm, attention_bias=not qk_norm)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    tower, ours = InternVLVisionLayer(config).eval(), Block(BlockSpec.from_config(config))
    random_weights(tower)
    scales = {name: tower._parameters.pop(name) for name in ("lambda_1", "lambda_2")}
    copy_weights(tower, ours)
    for name, scale in scales.items():
        setattr(tower, name, nn.Parameter(torch.ones_like(scale)))
    x = torch.randn(2, 7, 32)
    output = tower(x)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(ours(x), output, rtol=1e-5, atol=1e-5)


def test_padding_is_never_attended_to() -> None:
    torch.manual_seed(0)
    block = Block(BlockSpec(width=16, heads=2, mlp_width=32))
    x = torch.randn(2, 6, 16)
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    other = torch.where(mask[..., None], x, 1e4)
    torch.testing.assert_close(block(x, mask=mask)[mask], block(other, mask=mask)[mask])
    torch.testing.assert_close(block(x, mask=mask)[0, :4], block(x[:1, :4])[0], rtol=1e-5, atol=1e-6)


def test_a_row_of_padding_alone_stays_finite() -> None:
    block = Block(BlockSpec(width=16, heads=2, mlp_width=32))
    assert block(torch.zeros(1, 3, 16), mask=torch.zeros(1, 3, dtype=torch.bool)).isfinite().all()


def test_a_model_s_config_gives_the_block_of_its_tower() -> None:
    config = LlavaConfig(vision_config=CLIPVisionConfig(**SIZES))
    assert BlockSpec.from_config(config) == BlockSpec.from_config(config.vision_config)
    assert BlockSpec.from_config(config).mlp_width == 48


def test_an_unknown_tower_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"model_type='swin' .*BlockSpec\(width="):
        BlockSpec.from_config(SimpleNamespace(model_type="swin"))


@pytest.mark.parametrize("name", ROTARY_TOWERS)
def test_a_tower_built_otherwise_is_refused_and_left_to_its_family(name: str) -> None:
    with pytest.raises(ValueError, match=r"not built like CLIP's .*layer_norm_eps.*\.backbone\.block"):
        BlockSpec.from_config(ROTARY_TOWERS[name][0])


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"heads": 3}, "width=16 does not split into heads=3"),
        ({"norm": "batch"}, "norm='batch'"),
        ({"activation": "swoosh"}, "activation='swoosh'"),
        ({"heads": 8, "rotary": 10000.0}, "divisible by 4, not 2"),
    ],
)
def test_a_spec_that_cannot_be_built_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSpec(**({"width": 16, "heads": 2, "mlp_width": 32} | wrong))


def test_another_width_keeps_the_kind_of_block() -> None:
    tower = BlockSpec(width=1152, heads=16, mlp_width=4304, activation="gelu_pytorch_tanh")  # SigLIP so400m
    wide = tower.resized(3584)
    assert (wide.width, wide.mlp_width, wide.activation) == (3584, 13390, "gelu_pytorch_tanh")
    assert wide.head_width == 64  # the divisor of 3584 nearest to SigLIP's 72
    assert tower.resized(1152) == tower
    with pytest.raises(ValueError, match="width=6"):
        dataclasses.replace(tower, rotary=10000.0).resized(6)
