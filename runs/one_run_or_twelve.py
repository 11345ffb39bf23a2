"""CPU time of four methods at three budgets over one file of questions: in one run, and in twelve.

    PYTHONPATH=src:lab python3 runs/one_run_or_twelve.py --model scenes-nano --questions 24 --out out/twelve.json

Writes CPU seconds of this process, with loading the model and the questions, and how many pictures were encoded.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import diffprune_lab
from diffprune.evaluate.session import Asked, Session
from diffprune.evaluate.sources import find_tasks
from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from diffprune.results import device_name, library_versions, write_text

METHODS, BUDGETS = ("divprune", "visionzip", "uniform_grid", "fastv"), ("64", "32", "16")

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--model", default="scenes-nano")
parser.add_argument("--task", default="scenes/gqa")
parser.add_argument("--questions", type=int, default=40, help="a picture each")
parser.add_argument("--out", type=Path, required=True)
given = parser.parse_args()

diffprune_lab.join()
torch.set_num_threads(1)
kind = type(PrunedVLM(*load_base(given.model)).backbone)
encode, encoded = kind.encode, []
kind.encode = lambda self, batch, *needs: (encoded.append(batch.num_images), encode(self, batch, *needs))[1]


def measure(settings: Asked) -> dict[str, float]:
    """CPU seconds and pictures encoded of one run."""
    encoded.clear()
    start = time.process_time()
    Session(settings).run()
    return {"cpu_s": time.process_time() - start, "pictures": sum(encoded)}


with tempfile.TemporaryDirectory() as folder:
    source, names = find_tasks(given.task)
    questions = source.build(names, count=given.questions, sizes="fixed")
    (task,) = questions.tasks
    lines = []
    for number, question in enumerate(task.questions):
        (picture,) = questions.open(question.images)
        picture.save(Path(folder, f"{number}.png"))
        lines.append(json.dumps({"image": f"{number}.png", "question": question.prompt, "answer": question.answer}))
    data = Path(folder, "q.jsonl")
    data.write_text("\n".join(lines))
    everything = Asked(
        model=given.model, data=data, methods=",".join(METHODS), keep=",".join(BUDGETS), max_new_tokens=4
    )
    measure(replace(everything, methods="divprune", keep="64"))  # warm
    together = measure(everything)
    apart = [measure(replace(everything, methods=method, keep=keep)) for method in METHODS for keep in BUDGETS]
found = {
    "prompts": len(lines),
    "one_run": together,
    "twelve_runs": {key: sum(one[key] for one in apart) for key in together},
    "ratio": together["cpu_s"] / sum(one["cpu_s"] for one in apart),
}
print(json.dumps(found, indent=1))
write_text(given.out, json.dumps({"device": device_name(), "versions": library_versions(), **found}, indent=1))
