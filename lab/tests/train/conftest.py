"""What the lab's tests of training share with the library's."""

from tests.train.conftest import disk

__all__ = ["disk"]
