"""Where training samples come from: one file per kind of data, and sources that other packages bring."""

from pathlib import Path

from diffprune import doors
from diffprune.config import DataConfig
from diffprune.train.feed import Feed
from diffprune.train.sources.conversations import Conversations
from diffprune.train.sources.hub import Hub
from diffprune.train.sources.jsonl import open_jsonl
from diffprune.train.sources.parquet import Parquet
from diffprune.train.sources.shards import Shards
from diffprune.train.sources.stream import StreamFeed
from diffprune.train.sources.table import Table, TableFeed


def open_feed(config: DataConfig, seed: int) -> Feed:
    """The feed for `data.name`: a source that an installed package brings, a folder, a file or a dataset of the hub.

    A package brings one by the entry-point group `diffprune.data`: a function `(config, seed) -> Feed`.
    """
    source = doors.load(doors.DATA, config.name)
    if source is not None:
        return source(config, seed)
    path = Path(config.name)
    if path.is_file():
        return TableFeed(_open_file(path, config), config, seed)
    if not path.is_dir():
        if config.name.count("/") == 1 and not config.name.startswith((".", "/")):
            return StreamFeed(Hub(config), config, seed)
        brought = "".join(f", or {name}" for name in sorted(doors.entries(doors.DATA)))
        raise ValueError(
            f"data.name={config.name!r} is not there; give a folder or file with pictures and captions, or a dataset "
            f"of the hub{brought}"
        )
    for ending in ("jsonl", "parquet", "tar"):
        paths = sorted(path.glob(f"*.{ending}"))
        if not paths:
            continue
        if ending == "jsonl":
            return TableFeed(open_jsonl(paths, config, path), config, seed)
        if ending == "tar":
            return TableFeed(Shards(paths, config), config, seed)
        return StreamFeed(Parquet(paths, config), config, seed)
    raise ValueError(
        f"{path} has no captions: it holds no .jsonl, .parquet or .tar; write metadata.jsonl with a line "
        f'{{"{config.image}": "a.jpg", "{config.caption}": "..."}} for each picture'
    )


def _open_file(path: Path, config: DataConfig) -> Table:
    if path.suffix == ".jsonl":
        return open_jsonl([path], config, path)
    if path.suffix == ".json":
        return Conversations(path, config)
    if path.suffix == ".tar":
        return Shards([path], config)
    raise ValueError(f"data.name={str(path)!r} is of no known kind; give .jsonl, .json (LLaVA's) or .tar, or a folder")
