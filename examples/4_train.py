"""Train a scorer on pictures with captions, on a frozen model, and deploy it.

    python examples/4_train.py                      # the lab's small model and a few captions: shows that it runs
    diffprune train --config configs/llava/diffprune_k64.yaml --out runs/llava-k64 data.name=MY_FOLDER

A folder of captions is pictures and a `metadata.jsonl` with a line {"image": "a.png", "caption": "..."} for each.
"""

import json
import tempfile
from pathlib import Path

from PIL import Image

import diffprune as dp
from diffprune.config import load_config

CONFIG = """
backbone: {name: scenes-nano}
method:   {name: diffprune}
budget:   {keep: 16}
optim:    {steps: 4, batch_size: 2, accumulate: 1}
data:     {name: FOLDER, validation: 4}
"""
COLORS = ("red", "green", "blue", "yellow")


def write_captions(folder: Path, count: int = 16) -> None:
    """Plain pictures of one color each: enough to run on, nothing to learn from."""
    lines = []
    for number in range(count):
        color = COLORS[number % len(COLORS)]
        Image.new("RGB", (192, 192), color).save(folder / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "caption": f"The picture is {color}."}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        captions, run = Path(temporary) / "captions", Path(temporary) / "run"
        captions.mkdir()
        write_captions(captions)
        file = Path(temporary) / "config.yaml"
        file.write_text(CONFIG.replace("FOLDER", str(captions)))
        summary = dp.train(load_config(file), run, quiet=True)
        print(f"{summary['step']} steps, held-out loss with tokens dropped {summary['best']['hard']:.2f}")
        vlm = dp.load(run, keep=16)
        print(
            vlm.generate(images=[Path(__file__).parent / "wolf.png"], text="What color is the house?", max_new_tokens=8)
        )


if __name__ == "__main__":
    main()
