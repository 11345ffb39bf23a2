"""Datasets of the Hugging Face hub."""

import logging
from collections.abc import Iterator
from pathlib import Path

from diffprune.config import DataConfig
from diffprune.extras import MissingExtraError
from diffprune.train.sources.rows import Row, require_columns
from diffprune.train.sources.stream import Stream

logger = logging.getLogger("diffprune")
SAFE = 4  # the first version of datasets that runs no code of a repository


class Hub(Stream):
    """A dataset of the Hugging Face hub, streamed: nothing is stored. Its shards come in an order drawn by `seed`."""

    def __init__(self, config: DataConfig) -> None:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingExtraError(
                "datasets of the extra 'train' is not installed: run pip install 'datasets>=4'"
            ) from None
        if int(datasets.__version__.partition(".")[0]) < SAFE:
            raise MissingExtraError(
                f"datasets {datasets.__version__} can run a dataset's own code, which {SAFE} and newer cannot: run "
                f"pip install 'datasets>={SAFE}'"
            )
        self.config, self.root = config, Path(config.images or "")
        logger.warning(
            f"data.name={config.name!r} is no folder or file here: asking the hub for a dataset of that name"
        )
        try:
            stream = datasets.load_dataset(config.name, split=config.split, streaming=True)
        except Exception as error:
            raise ValueError(
                f"data.name={config.name!r} is neither a folder or file here nor a dataset of the hub that can be "
                f"reached ({type(error).__name__})"
            ) from error
        features = stream.features or {}
        if features:
            require_columns([dict.fromkeys(features)], config, config.name)
        if isinstance(features.get(config.image), datasets.Image):
            stream = stream.cast_column(config.image, datasets.Image(decode=False))  # decoded where it is needed
        splits = stream.info.splits or {}
        self.total = splits[config.split].num_examples if config.split in splits else None
        self.stream = stream.shuffle(seed=config.seed, buffer_size=1)

    def count(self) -> int | None:
        return self.total

    def rows(self) -> Iterator[tuple[int, Row]]:
        yield from enumerate(self.stream)
