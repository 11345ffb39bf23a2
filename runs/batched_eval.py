"""How much sooner answers come in batches, and whether they are the same: a GPU, a minute for every eight questions.

    PYTHONPATH=src:lab python3 runs/batched_eval.py --model scenes-llava --questions 8 --out results/batched_eval.json

Writes seconds of answering (pictures are encoded before) one by one and in batches of 32, and the share of equal
answers, in float32 without TF32 and in float16.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import diffprune_lab
from diffprune.evaluate.encoded import encode_questions
from diffprune.evaluate.runner import answer
from diffprune.evaluate.sources import find_tasks
from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from diffprune.results import write_results

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--model", default="scenes-llava")
parser.add_argument("--tasks", default="scenes")
parser.add_argument("--questions", type=int, default=8, help="of each task")
parser.add_argument("--method", default="divprune")
parser.add_argument("--keep", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--out", type=Path, required=True, help="results file to write")
parser.add_argument("--commit", help="commit to record where there is no git checkout")
given = parser.parse_args()

diffprune_lab.join()  # where it is not installed its tasks and models are known all the same
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
source, names = find_tasks(given.tasks)
rows = []
for dtype in (torch.float32, torch.float16):
    base, processor = load_base(given.model)
    vlm = PrunedVLM(base.to(given.device, dtype), processor)
    encoded = encode_questions(vlm, source.build(names, count=given.questions).for_model(vlm))
    for method, keep in (("full", 1.0), (given.method, given.keep)):
        pruned = vlm.with_method(method, keep=keep)
        answer(pruned, encoded, keep=keep, batch_size=given.batch_size)  # warm
        said, seconds = {}, {}
        for size in (given.batch_size, 1):
            start = time.perf_counter()
            said[size] = answer(pruned, encoded, keep=keep, batch_size=size)
            seconds[size] = time.perf_counter() - start
        equal = [a == b for a, b in zip(said[1], said[given.batch_size], strict=True)]
        rows.append(
            {
                "precision": str(dtype).removeprefix("torch."),
                "method": method,
                "keep": keep,
                "prompts": len(equal),
                "one_by_one_s": seconds[1],
                "batched_s": seconds[given.batch_size],
                "ratio": seconds[1] / seconds[given.batch_size],
                "equal": sum(equal) / len(equal),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    notes = f"answering alone, pictures are encoded before; batches of {given.batch_size}; float32 without TF32; "
    notes += "equal: share of answers that are the same one by one"
    cpu = "CPU" if given.device == "cpu" and torch.cuda.is_available() else None
    write_results(given.out, name=given.out.stem, rows=rows, commit=given.commit, device=cpu, notes=notes)
