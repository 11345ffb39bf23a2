"""`make fuzz`: cases of every campaign in turn until the time is up, and what broke, each with how to see it again.

python -m tests.fuzz --seconds 300 --seed 0
python -m tests.fuzz --only before --seed 0 --case 17      # that one again, with its traceback
"""

import argparse
import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter

from tests.fuzz.search import CAMPAIGNS, attempt


def search_operators(seconds: float, seed: int) -> bool:
    """Hypothesis over the properties of operators and schedules; False where one broke."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", f"--hypothesis-seed={seed}"]
    try:
        run = subprocess.run(
            [*command, "tests/ops", "tests/test_schedules.py"],
            env={**os.environ, "DIFFPRUNE_FUZZ": "1"},
            timeout=seconds,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # nothing broke in the time there was
    if run.returncode:
        print(run.stdout[-3000:])
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*CAMPAIGNS, "operators"], default=None)
    parser.add_argument("--case", type=int, default=None)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.case is not None:
        CAMPAIGNS[options.only](random.Random(f"{options.seed}:{options.only}:{options.case}"))
        return 0
    end = time.monotonic() + options.seconds
    found: list[str] = []
    if options.only in (None, "operators"):
        share = options.seconds * (0.2 if options.only is None else 1.0)
        if not search_operators(share, options.seed):
            found.append("operators: a property does not hold (see above)")
    names = [options.only] if options.only else list(CAMPAIGNS)
    outcomes: Counter[tuple[str, str]] = Counter()
    case = 0
    while time.monotonic() < end and options.only != "operators":
        for name in names:
            outcome, sentence = attempt(name, options.seed, case)
            outcomes[name, outcome] += 1
            if outcome == "broke":
                found.append(
                    f"{name}: {sentence}\n  python -m tests.fuzz --only {name} --seed {options.seed} --case {case}"
                )
                print(found[-1], flush=True)
            if time.monotonic() >= end:
                break
        case += 1
    for name in names:
        counts = {word: outcomes[name, word] for word in ("held", "refused", "broke")}
        print(f"{name:12}" + "".join(f"{word} {count:6}  " for word, count in counts.items()))
    print(f"seed {options.seed}: {sum(outcomes.values())} cases, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
