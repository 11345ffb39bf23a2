"""Writes docs/screens.md: what `plan`, `profile`, `eval` and `train` put on a terminal of 80 columns, by running them.

Times differ from run to run and machine to machine; the page shows the form. All of it runs on a CPU in minutes.

    python tools/make_screens.py
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from diffprune.atomic import write_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "screens.md"
WIDTH = 80
TRAIN = "train --config lab/configs/scenes_nano/diffprune_any.yaml --out {folder}/run optim.steps=4 optim.accumulate=1"
SCREENS = (
    "plan --backbone llava-1.5-7b --keep 128,64,32 --batch 1,32 --gpu h200,rtx-4090",
    "profile --backbone llava-1.5-7b --random-weights --size tiny --device cpu --methods full,gots --keep 4 --runs 3",
    "eval --model scenes-nano --methods full,gots,random --keep 16,8 --questions 5 --seeds 0 --device cpu",
    f"{TRAIN} optim.batch_size=4 data.validation=8 saving.tensorboard=false",
)


def screen(command: str, folder: str) -> str:
    """A command as it is typed, and everything it prints, both streams in their order."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "diffprune_lab", *shlex.split(command.format(folder=folder))],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(f"diffprune {command} failed:\n{run.stdout}")
    typed, said = (text.replace("{folder}/run", "runs/nano").replace(f"{folder}/run", "runs/nano")
                   for text in (command, run.stdout))  # fmt: skip
    return f"```\n$ diffprune {typed}\n{said.strip()}\n```\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        screens = [screen(command, folder) for command in SCREENS]
    write_text(
        PAGE,
        "# Screens\n\nWhat commands print on a terminal of 80 columns, made by `python tools/make_screens.py` on a "
        "CPU: the form counts, not the times. `--wide` has every column, `--json` every value. On a terminal bars move "
        "with the time left (`0:09, 1:09 left`); here, in a pipe, a line is written when a stage is done.\n\n"
        + "\n".join(screens),
    )
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
