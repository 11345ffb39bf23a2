"""The campaigns by name, and one case of one of them."""

import random
import traceback
from collections.abc import Callable

from tests.fuzz import differential, outside

CAMPAIGNS: dict[str, Callable[[random.Random], None]] = {**differential.CAMPAIGNS, **outside.CAMPAIGNS}


def attempt(name: str, seed: int, case: int) -> tuple[str, str]:
    """How a case ended ("held", "refused", "broke"), and in what words.

    A `ValueError` of one line is a refusal; what else is raised is a finding.
    """
    try:
        CAMPAIGNS[name](random.Random(f"{seed}:{name}:{case}"))
    except ValueError as error:
        text = str(error)
        return ("broke" if "\n" in text.strip() else "refused"), text[:300]
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "broke", f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {str(error)[:300]}"
    return "held", ""
