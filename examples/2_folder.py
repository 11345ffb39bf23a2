"""One question about every picture of a folder, in batches; what is dropped is dropped for each picture by itself.

python examples/2_folder.py FOLDER "What is in the picture?"
"""

import sys
from pathlib import Path

import diffprune as dp

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
BATCH = 8


def main(folder: Path, question: str) -> None:
    vlm = dp.load("scenes-llava-diffprune", keep=32)
    pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    for start in range(0, len(pictures), BATCH):
        part = pictures[start : start + BATCH]
        for path, answer in zip(part, vlm.generate(part, [question] * len(part), max_new_tokens=8), strict=True):
            print(f"{path.name}\t{answer}")


if __name__ == "__main__":
    here = Path(__file__).parent
    folder, question, *_ = [*sys.argv[1:], *(here, "How many things are there?")[len(sys.argv[1:]) :]]
    main(Path(folder), str(question))
