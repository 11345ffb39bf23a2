"""Sampling on a CUDA device: drawn from the same distribution as on the reference path."""

from typing import Any

import pytest
import torch

from tests import tiny
from tests.fast.test_graphs_gpu import full_float32, on_gpu  # noqa: F401  # the fixture is used by its name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler has advice of its own for each kind of GPU
]
ROWS, DRAWS = 100, 10_000


def test_ten_thousand_first_tokens_are_spread_as_by_the_reference_path() -> None:
    vlm = on_gpu("llava", "feature_norm", batch_sizes=(ROWS,))
    batch = vlm.prepare([[tiny.picture(1)]] * ROWS, ["what is it?"] * ROWS)
    asked: dict[str, Any] = {"do_sample": True, "top_k": 3, "max_new_tokens": 1}
    tokens = vlm.encode(batch)
    lm = vlm.lm_inputs(batch, tokens)
    torch.manual_seed(0)
    with torch.inference_mode():
        fast = [vlm.fast.generate(batch, max_new_tokens=1, steering=asked) for _ in range(DRAWS // ROWS)]
        slow = [vlm.decoder.generate(lm, None, **asked) for _ in range(DRAWS // ROWS)]
    counts = [torch.bincount(torch.cat(found)[:, 0].cpu(), minlength=400).float() / DRAWS for found in (fast, slow)]
    assert counts[0].count_nonzero() == counts[1].count_nonzero() == 3
    distance = 0.5 * (counts[0] - counts[1]).abs().sum()
    assert distance < 0.02


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_a_seed_gives_the_same_answer_twice_and_penalties_are_the_reference_path_s(family: str) -> None:
    vlm = on_gpu(family, "feature_norm")
    answers = []
    for _ in range(2):
        torch.manual_seed(3)
        answers.append(
            vlm.generate([tiny.picture(1)], "what?", max_new_tokens=6, do_sample=True, top_k=50, return_ids=True)
        )
    assert torch.equal(*answers)
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 3.0, "return_ids": True}
    found = vlm.generate([tiny.picture(1)], "what?", **asked)
    fast, vlm.fast = vlm.fast, None
    wanted = vlm.generate([tiny.picture(1)], "what?", **asked)
    vlm.fast = fast
    assert torch.equal(found, wanted)
