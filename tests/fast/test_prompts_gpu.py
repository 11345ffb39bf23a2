"""Fifty prompts of every family that has a fast path, on a CUDA device: greedy tokens are the reference path's."""

import pytest
import torch

from tests import tiny
from tests.fast.compiled import answer, reference
from tests.fast.test_graphs_gpu import full_float32, on_gpu  # noqa: F401  # the fixture is used by its name
from tests.fast.test_newlines import questions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler has advice of its own for each kind of GPU
]


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl"])
def test_fifty_prompts_are_answered_as_by_the_reference_path(family: str) -> None:
    vlm = on_gpu(family, "diffprune", batch_sizes=(1,))
    differing = [
        question
        for seed, question in enumerate(questions(50))
        if not torch.equal(answer(vlm, [tiny.picture(seed)], question), reference(vlm, [tiny.picture(seed)], question))
    ]
    assert differing == []
