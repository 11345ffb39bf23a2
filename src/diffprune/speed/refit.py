"""The plan's curves fitted anew to everything that was measured on the fast path.

    python -m diffprune.speed.refit results/ttft*.json

Writes `curves.json` beside this file, which `plan` reads; `make docs` then says how far off they are.
"""

import sys

from diffprune.atomic import write_text
from diffprune.speed.accuracy import read_profiles
from diffprune.speed.calibrate import as_json, calibrate
from diffprune.speed.roofline import CURVES


def main(*files: str) -> None:
    """Fit to the results files and write what came out; where they cannot be fitted to, the curves stay as they are."""
    try:
        if not files:
            raise ValueError("no results file was named; give some, as in results/ttft*.json")
        text = as_json(calibrate(read_profiles(files), "fast"))
    except ValueError as error:
        raise SystemExit(f"{error}; {CURVES.name} is as it was") from error
    write_text(CURVES, text)
    print(text, end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
