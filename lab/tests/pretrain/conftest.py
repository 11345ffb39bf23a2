"""What the tests of every reference model share; a family with a tokenizer of its own gives that fixture anew."""

import pytest

from diffprune_lab.pretrain import turns
from diffprune_lab.scenes import reference


@pytest.fixture(scope="module")
def tokenizer():
    return reference.build_tokenizer()


@pytest.fixture(scope="module")
def encode(tokenizer):
    return turns.PieceEncoder(tokenizer)
