"""The old place of `diffprune.saving`; goes with the next release."""

import warnings

from diffprune.saving import *  # noqa: F403

warnings.warn("diffprune.checkpoint is now diffprune.saving", DeprecationWarning, stacklevel=2)
