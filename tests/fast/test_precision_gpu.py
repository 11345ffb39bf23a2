"""8 bits on a CUDA device: captured, near the model's own logits, and compiled as the plain functions give them."""

from typing import Any

import pytest
import torch

from diffprune.fast.decoder import apply
from diffprune.fast.precision import Scaled, scaled_map, why_not_eight_bits
from tests import tiny
from tests.fast.test_graphs_gpu import full_float32, on_gpu  # noqa: F401  # the fixture is used by its name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(why_not_eight_bits(torch.device("cuda"))),
        reason="needs a CUDA device with 8-bit products",
    ),
    pytest.mark.filterwarnings("default"),  # torch's compiler has advice of its own for each kind of GPU
]


@pytest.mark.parametrize("rows", [1, 7, 104, 616])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_those_of_the_same_numbers_in_float32(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, rows, 512, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(768, 512, device="cuda", generator=generator).to(dtype)
    linear: Any = scaled_map((weight, None))
    assert isinstance(linear, Scaled)
    found, wanted = apply(x, linear).float(), x.float() @ weight.float().t()
    assert found.isfinite().all() and (found - wanted).norm() / wanted.norm() < 0.06
    again = torch.compile(apply, fullgraph=True, dynamic=False)(x, linear).float()
    assert (found - again).norm() / wanted.norm() < 0.01


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_a_model_in_8_bits_is_captured_and_near_the_reference_path(family: str) -> None:
    vlm = on_gpu(family, "feature_norm", precision="fp8")
    assert vlm.fast.report.precision == "fp8" and vlm.fast.decoder.compiled
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], ["what?", "what does the sign say?"])
    run = vlm.fast.start(batch)
    assert all(vlm.fast.captured(run).values())
    wanted = vlm.logits(batch)[0][:, -1]
    assert (run.logits - wanted).norm() / wanted.norm() < 0.2
    answer = vlm.generate([tiny.picture(1)], "what?", max_new_tokens=6, do_sample=False, return_ids=True)
    assert answer.shape == (1, 6)
