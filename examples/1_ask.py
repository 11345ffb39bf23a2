"""Ask about a picture with 32 of its 576 visual tokens, and see which tokens those are.

    python examples/1_ask.py

The model and its scorer come with the lab; any Hugging Face model of a supported family does as well, with a method:
`dp.load("llava-hf/llava-1.5-7b-hf", method="divprune", keep=64)`.
"""

from pathlib import Path

from PIL import Image

import diffprune as dp
from diffprune.viz import light_up

PICTURE = Path(__file__).parent / "wolf.png"


def main(out: Path = Path("out/kept.png")) -> None:
    vlm = dp.load("scenes-llava-diffprune", keep=32)
    print(vlm.generate(images=[PICTURE], text="Which word does the sign show?", max_new_tokens=8))
    picture = Image.open(PICTURE)
    (selection,) = vlm.select([picture])
    out.parent.mkdir(parents=True, exist_ok=True)
    light_up(picture, selection).save(out)
    print(f"{len(selection.keep)} tokens kept, drawn in {out}")


if __name__ == "__main__":
    main()
