"""The pieces of the fast path: the choice without a sort, cuts, windows, and functions that torch can compile."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffprune.fast.buckets import num_columns
from diffprune.fast.choice import RANKED_AT_ONCE, keep_largest
from diffprune.fast.cuts import columns_after_cut
from diffprune.fast.options import NotCompiled, greedy_settings
from diffprune.ops import hard_topk
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_choice_without_a_sort_is_that_of_hard_topk(k: int) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(k))
    assert torch.equal(keep_largest(logits, k), hard_topk(logits, k))


def test_of_equal_logits_the_lower_index_goes_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert keep_largest(logits, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]] == hard_topk(logits, 4).tolist()


def test_a_row_too_long_for_all_pairs_is_sorted_instead() -> None:
    logits = torch.randn(1, RANKED_AT_ONCE + 8, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = logits[0, 9]
    assert torch.equal(keep_largest(logits, 64), hard_topk(logits, 64))


def test_a_cut_leaves_the_text_and_the_chosen_columns_in_order() -> None:
    first, keep = torch.tensor([2, 0]), torch.tensor([[0, 3], [1, 2]])
    left = columns_after_cut(first, keep, visual=4, width=8)
    assert left.tolist() == [[0, 1, 2, 5, 6, 7], [1, 2, 4, 5, 6, 7]]


def test_a_cache_has_room_for_the_prompt_and_its_answer_in_eights() -> None:
    assert num_columns(104, 24) == 128
    assert num_columns(104, 25) == 136


COMPILE = """
import torch
from torch._dynamo.testing import CompileCounter
from diffprune.fast.decoder import prefill_layer, read_decoder
from tests import tiny

model, _ = tiny.build("llava")
weights = read_decoder(model, model.model.language_model, fuse=True)
shape = weights.shape
hidden = torch.randn(1, 6, len(weights.final_norm), generator=torch.Generator().manual_seed(0))
tables = weights.rotary(hidden, torch.arange(6)[None])

def run(function, layer):
    cache = [torch.zeros(1, shape.key_heads, 8, shape.head_width) for _ in range(2)]
    with torch.no_grad():
        out = function(shape, hidden, torch.zeros_like(hidden), weights.layers[layer], *tables, *cache)
    return [*out, *cache]

counter = CompileCounter()
compiled = torch.compile(prefill_layer, fullgraph=True, dynamic=False, backend=counter)
for layer in range(3):
    for mine, eager in zip(run(compiled, layer), run(prefill_layer, layer), strict=True):
        assert torch.equal(mine, eager)
print("frames", counter.frame_count)
"""


def test_one_compiled_function_serves_all_layers_without_a_break() -> None:
    """In a process of its own: here signatures are checked at run time, which torch.compile cannot see through."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "frames 1" in done.stdout


def test_settings_that_leave_greedy_decoding_as_it_is_are_taken_and_others_named() -> None:
    model, _ = tiny.build("llava")
    config = model.generation_config
    taken = greedy_settings(config, {"max_new_tokens": 4, "do_sample": False, "top_p": 0.9, "eos_token_id": 7})
    assert taken == {"max_new_tokens": 4, "ends": [7], "pad_id": None}
    for kwargs, sentence in (
        ({"max_new_tokens": 4, "do_sample": True}, "do_sample=True"),
        ({"max_new_tokens": 4, "num_beams": 3}, "num_beams=3"),
        ({"max_new_tokens": 4, "repetition_penalty": 1.05}, "repetition_penalty=1.05"),
        ({"max_new_tokens": 4, "streamer": object()}, "streamer"),
        ({}, "max_new_tokens is not given"),
    ):
        with pytest.raises(NotCompiled, match=sentence):
            greedy_settings(config, kwargs)
