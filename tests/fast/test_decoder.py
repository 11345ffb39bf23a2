"""A decoder layer as one function that torch can compile."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
