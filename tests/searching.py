"""Property tests: fixed examples in the default suite, a search for new ones with `make fuzz`."""

import os

from hypothesis import settings

IS_FUZZING = os.environ.get("DIFFPRUNE_FUZZ") == "1"  # of the tests alone; the package reads no environment variable

# Fixed: the same examples on every machine and every run, none remembered from the run before.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=2_000)


def load_profile() -> None:
    """Called by conftest.py before any test is imported."""
    settings.load_profile("fuzz" if IS_FUZZING else "fixed")


def examples(count: int) -> settings:
    """How many examples a property is tried on; twenty times as many when searching."""
    return settings(max_examples=20 * count if IS_FUZZING else count)
