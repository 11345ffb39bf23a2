"""Pictures with captions from wherever they lie, as numbered samples; a row that cannot be used is named, not fatal.

A feed answers one question: which samples belong to these positions of the run? The answer follows from the config and
the position alone, so a run that is resumed, or split over several processes, reads what the unbroken one would.
"""

import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from diffprune.backbones.base import Exchange
from diffprune.backbones.processors import open_image
from diffprune.config import DataConfig
from diffprune.extras import MissingExtraError
from diffprune.rng import hash_key
from diffprune_lab.scenes import Rng, Scene, make_scene
from diffprune_lab.scenes.language import caption

PICTURES = (".jpg", ".jpeg", ".png", ".webp")
QUESTION = "question"  # a column that wins over data.prompt, where a row has one


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture, what is asked about it, and the answer to learn; scenes are drawn where the model runs.

    Args:
        later: Questions and answers that follow in the same conversation.
    """

    id: int
    picture: Image.Image | Scene
    question: str
    answer: str
    later: tuple[Exchange, ...] = ()

    @property
    def answers(self) -> list[str]:
        """All that is to be learnt."""
        return [self.answer, *(answer for _, answer in self.later)]


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be used, and why."""

    id: int
    reason: str


Row = Mapping[str, Any]


# --- rows to samples --------------------------------------------------------------------------------------------------


def read_row(number: int, row: Row | ValueError, config: DataConfig, root: Path) -> Sample | Broken:
    """A row of columns as a sample, or what is wrong with it."""
    if isinstance(row, ValueError):
        return Broken(number, str(row))
    try:
        return Sample(
            id=number,
            picture=_picture(row.get(config.image), config, root),
            question=str(row.get(QUESTION) or config.prompt),
            answer=_caption(row.get(config.caption), config),
        )
    except ValueError as error:
        return Broken(number, str(error))


def _caption(value: object, config: DataConfig) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the caption is {value!r}: column {config.caption!r} must hold a text")
    return value.strip()


def _picture(value: Any, config: DataConfig, root: Path) -> Image.Image:
    """A picture from a file's name, a file's bytes, the hub's {"bytes", "path"}, or a decoded one."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value:
        return open_image(root / value)
    if isinstance(value, bytes):
        try:
            return open_image(Image.open(io.BytesIO(value)))
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"the picture's {len(value)} bytes cannot be read ({error})") from error
    if isinstance(value, Image.Image):
        return open_image(value)
    raise ValueError(f"there is no picture: column {config.image!r} holds {value!r}")


def require_columns(rows: Iterable[Row | ValueError], config: DataConfig, where: Path | str) -> None:
    """Raise where no row at all has the picture's or the caption's column."""
    found = dict.fromkeys(key for row in rows if not isinstance(row, ValueError) for key in row)
    for column, option in ((config.image, "data.image"), (config.caption, "data.caption")):
        if column not in found:
            kind = "pictures" if option == "data.image" else "captions"
            raise ValueError(
                f"{where} has no column {column!r} with {kind}; it has {', '.join(found) or 'none'}: "
                f"name the right one with {option}=..."
            )


# --- rows by number ---------------------------------------------------------------------------------------------------


class Table(ABC):
    """Rows that can be read in any order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> Sample | Broken: ...


class Listed(Table):
    """Rows in memory, pictures in files: a folder with JSONL."""

    def __init__(self, rows: Sequence[Row | ValueError], config: DataConfig, root: Path) -> None:
        self.rows, self.config, self.root = rows, config, root

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, number: int) -> Sample | Broken:
        return read_row(number, self.rows[number], self.config, self.root)


def read_jsonl(paths: Sequence[Path]) -> list[Row | ValueError]:
    """Every line as a row; one that is no JSON object is kept as the error it is."""
    rows: list[Row | ValueError] = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for line_number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    row = ValueError(f"{path.name} line {line_number} is not JSON ({error})")
                if not isinstance(row, dict | ValueError):
                    row = ValueError(f"{path.name} line {line_number} is no JSON object")
                rows.append(row)
    return rows


class Conversations(Table):
    """LLaVA's conversation JSON: all questions of an entry with their answers.

    Entries without a picture are left out: there is nothing to prune in them.
    """

    def __init__(self, path: Path, config: DataConfig) -> None:
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error})") from error
        if not isinstance(entries, list):
            raise ValueError(f"{path} holds no list; give LLaVA's conversations, [{{image, conversations}}, ...]")
        self.config, self.root = config, Path(config.images) if config.images else path.parent
        self.entries = [entry for entry in entries if not isinstance(entry, dict) or "image" in entry]

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, number: int) -> Sample | Broken:
        entry = self.entries[number]
        try:
            (question, answer), *later = read_exchanges(entry.get("conversations") if isinstance(entry, dict) else None)
            if not all(asked for asked, _ in later):
                raise ValueError("a question after the first is empty")
            return Sample(
                id=number,
                picture=_picture(entry["image"], self.config, self.root),
                question=question or self.config.prompt,
                answer=answer,
                later=tuple(later),
            )
        except ValueError as error:
            return Broken(number, str(error))


def read_exchanges(turns: Any) -> list[Exchange]:
    """Questions, the picture's mark taken out, with their answers; a last question without an answer is left out."""
    try:
        pairs = list(zip(turns[::2], turns[1::2], strict=False))
        if not pairs or any((asked["from"], said["from"]) != ("human", "gpt") for asked, said in pairs):
            raise ValueError
        found = [(asked["value"].replace("<image>", "").strip(), said["value"].strip()) for asked, said in pairs]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(
            f"the entry has no question and answer, or not in turns: conversations is {str(turns)[:80]}"
        ) from None
    if not all(answer for _, answer in found):
        raise ValueError(f"an answer is empty: conversations is {str(turns)[:80]}")
    return found


class Shards(Table):
    """WebDataset tar shards: a sample is the files that share a name, `0001.jpg` with `0001.txt` or `0001.json`."""

    def __init__(self, paths: Sequence[Path], config: DataConfig) -> None:
        self.config = config
        self.files: list[dict[str, tuple[Path, int, int]]] = []  # for each sample, by suffix: where its bytes lie
        for path in paths:
            self.files += _index_shard(path).values()
        endings = {ending for files in self.files for ending in files}
        if not endings & {".txt", ".json"}:
            raise ValueError(
                f"{paths[0].parent} has no captions: the shards hold {', '.join(sorted(endings)) or 'nothing'}; "
                "put a .txt or .json beside each picture"
            )

    def __len__(self) -> int:
        return len(self.files)

    def read(self, number: int) -> Sample | Broken:
        files, row = self.files[number], {}
        try:
            picture = next((files[ending] for ending in PICTURES if ending in files), None)
            if picture is not None:
                row[self.config.image] = _bytes_at(picture)
            if ".json" in files:
                found = json.loads(_bytes_at(files[".json"]))
                row |= {key: value for key, value in found.items() if key != self.config.image}
            if ".txt" in files:
                row[self.config.caption] = _bytes_at(files[".txt"]).decode("utf-8")
        except (ValueError, AttributeError, OSError) as error:
            return Broken(number, f"the sample's files cannot be read ({error})")
        return read_row(number, row, self.config, Path())


def _index_shard(path: Path) -> dict[str, dict[str, tuple[Path, int, int]]]:
    samples: dict[str, dict[str, tuple[Path, int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                if member.isfile():
                    folder, _, name = member.name.rpartition("/")
                    stem, dot, ending = name.partition(".")
                    place = (path, member.offset_data, member.size)
                    samples.setdefault(f"{folder}/{stem}", {})[(dot + ending).lower()] = place
    except tarfile.TarError as error:
        raise ValueError(f"the shard {path} is damaged or compressed ({error}); give whole, plain tar files") from error
    return samples


def _bytes_at(place: tuple[Path, int, int]) -> bytes:
    path, offset, size = place
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


# --- rows one after another -------------------------------------------------------------------------------------------


class Stream(ABC):
    """Rows that come in an order of their own, always the same one."""

    config: DataConfig
    root: Path

    @abstractmethod
    def count(self) -> int | None:
        """How many rows there are, where that is known."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Row]]:
        """Every row with its number."""


class Parquet(Stream):
    """Parquet files; their row groups are read in an order drawn by `data.seed`, since tables often come sorted."""

    def __init__(self, paths: Sequence[Path], config: DataConfig) -> None:
        try:
            import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingExtraError(
                "pyarrow, which reads parquet files, is not installed: run pip install 'diffprune[train]'"
            ) from None
        self.config, self.root = config, Path(config.images) if config.images else paths[0].parent
        self.groups: list[tuple[int, Path, int]] = []  # number of the first row, file, row group
        self.total = 0
        for path in paths:
            try:
                file = parquet.ParquetFile(path)
            except (OSError, ValueError) as error:
                raise ValueError(f"{path} is damaged or no parquet file: {str(error).splitlines()[0]}") from error
            require_columns([dict.fromkeys(file.schema_arrow.names)], config, path)
            for group in range(file.num_row_groups):
                self.groups.append((self.total, path, group))
                self.total += file.metadata.row_group(group).num_rows
        self.groups.sort(key=lambda item: hash_key(config.seed, "groups", item[0]))

    def count(self) -> int:
        return self.total

    def rows(self) -> Iterator[tuple[int, Row]]:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]

        used = {self.config.image, self.config.caption, QUESTION}
        for first, path, group in self.groups:
            file = parquet.ParquetFile(path)
            columns = [name for name in file.schema_arrow.names if name in used]
            table = file.read_row_group(group, columns=columns)
            for place in range(table.num_rows):
                yield first + place, {name: table.column(name)[place].as_py() for name in columns}


class Hub(Stream):
    """A dataset of the Hugging Face hub, streamed: nothing is stored. Its shards come in an order drawn by `seed`."""

    def __init__(self, config: DataConfig) -> None:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingExtraError("datasets is not installed: run pip install 'diffprune[train]'") from None
        self.config, self.root = config, Path(config.images or "")
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


# --- feeds ------------------------------------------------------------------------------------------------------------


class Feed(ABC):
    """Samples by their position in the run, and those held out."""

    @property
    @abstractmethod
    def per_epoch(self) -> int | None:
        """Training samples of one pass; None where there is no end of them."""

    @abstractmethod
    def validation(self) -> list[Sample | Broken]:
        """The held-out samples, always the same."""

    @abstractmethod
    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        """The wanted ones of these positions; streams pass over the others unread."""


def choose_rows(num_rows: int, config: DataConfig) -> list[int]:
    """The rows in use: exactly the configured share, in an order drawn by `data.seed` alone."""
    order = sorted(range(num_rows), key=lambda number: hash_key(config.seed, "share", number))
    return order[: int(config.share * num_rows + 0.5)]


class TableFeed(Feed):
    """Another order in every epoch, drawn from the run's seed."""

    def __init__(self, table: Table, config: DataConfig, seed: int) -> None:
        rows = choose_rows(len(table), config)
        self.table, self.seed = table, seed
        self.held_out, self.rows = sorted(rows[: config.validation]), sorted(rows[config.validation :])
        self.epoch, self.order = -1, self.rows
        if not self.rows:
            raise ValueError(
                f"{config.name} has {len(rows)} rows to use and {config.validation} are held out: nothing is left to "
                "train on; lower data.validation or raise data.share"
            )

    @property
    def per_epoch(self) -> int:
        return len(self.rows)

    def validation(self) -> list[Sample | Broken]:
        return [self.table.read(number) for number in self.held_out]

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        found = {}
        for position in wanted:
            epoch, place = divmod(position, len(self.rows))
            if epoch != self.epoch:
                self.epoch = epoch
                self.order = sorted(self.rows, key=lambda number: hash_key(self.seed, "order", epoch, number))
            found[position] = self.table.read(self.order[place])
        return found


class StreamFeed(Feed):
    """A stream through a shuffling buffer. Going back, or on after a break, reads it again from the start.

    The held-out samples are the first of the stream.
    """

    def __init__(self, stream: Stream, config: DataConfig, seed: int) -> None:
        self.stream, self.config, self.seed = stream, config, seed
        total = stream.count()
        if total is None and config.share < 1:
            raise ValueError(
                f"data.share={config.share} needs to know how many rows {config.name} has, and it does not say; "
                "set data.share=1.0 and optim.steps"
            )
        self.chosen = None if total is None or config.share == 1 else frozenset(choose_rows(total, config))
        self.total = total if self.chosen is None else len(self.chosen)
        if self.total is not None and self.total <= config.validation:
            raise ValueError(
                f"{config.name} has {self.total} rows to use and {config.validation} are held out: nothing is left to "
                "train on; lower data.validation or raise data.share"
            )
        self.position, self.flow = 0, self._flow()

    @property
    def per_epoch(self) -> int | None:
        return None if self.total is None else self.total - self.config.validation

    def validation(self) -> list[Sample | Broken]:
        rows = zip(range(self.config.validation), self._rows(), strict=False)
        return [self._decode(item) for _, item in rows]

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        if positions.start < self.position:
            self.position, self.flow = 0, self._flow()
        found = {}
        while self.position < positions.stop:
            item = next(self.flow)
            if self.position in wanted:
                found[self.position] = self._decode(item)
            self.position += 1
        return found

    def _decode(self, item: tuple[int, Row]) -> Sample | Broken:
        return read_row(*item, self.config, self.stream.root)

    def _rows(self) -> Iterator[tuple[int, Row]]:
        return (item for item in self.stream.rows() if self.chosen is None or item[0] in self.chosen)

    def _flow(self) -> Iterator[tuple[int, Row]]:
        """Training rows without end, shuffled within a window."""
        epoch = 0
        while True:
            rng, held, seen = Rng(self.seed, "buffer", epoch), [], False
            for place, item in enumerate(self._rows()):
                if place < self.config.validation:
                    continue
                seen = True
                if len(held) < self.config.buffer:
                    held.append(item)
                    continue
                out = rng.below(len(held))
                yield held[out]
                held[out] = item
            if not seen:
                raise ValueError(f"{self.config.name} gave no row to train on; check data.name and data.split")
            yield from rng.shuffle(held)
            epoch += 1


class SceneFeed(Feed):
    """Captions of scenes that are drawn on the fly, never the same one twice; another seed is another run of them."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        self.config = config
        self.first = hash_key(seed, "scenes") >> 24  # runs of different seeds lie far apart

    @property
    def per_epoch(self) -> None:
        return None

    def validation(self) -> list[Sample | Broken]:
        return [self._sample("validation", number) for number in range(self.config.validation)]

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        return {position: self._sample("train", self.first + position) for position in wanted}

    def _sample(self, split: str, number: int) -> Sample:
        scene = make_scene(split, number, seed=self.config.seed)
        text = caption(scene, Rng(self.config.seed, "captions", split, number))
        return Sample(id=number, picture=scene, question=self.config.prompt, answer=text)


def open_feed(config: DataConfig, seed: int) -> Feed:
    """The feed for `data.name`: scenes, a folder, a JSON file or a dataset of the hub."""
    if config.name == "scenes":
        return SceneFeed(config, seed)
    path = Path(config.name)
    if path.is_file():
        return TableFeed(_open_file(path, config), config, seed)
    if not path.is_dir():
        if config.name.count("/") == 1 and not config.name.startswith((".", "/")):
            return StreamFeed(Hub(config), config, seed)
        raise ValueError(
            f"data.name={config.name!r} is not there; give a folder or file with pictures and captions, or scenes"
        )
    for ending in ("jsonl", "parquet", "tar"):
        paths = sorted(path.glob(f"*.{ending}"))
        if not paths:
            continue
        if ending == "jsonl":
            return TableFeed(_open_jsonl(paths, config, path), config, seed)
        if ending == "tar":
            return TableFeed(Shards(paths, config), config, seed)
        return StreamFeed(Parquet(paths, config), config, seed)
    raise ValueError(
        f"{path} has no captions: it holds no .jsonl, .parquet or .tar; write metadata.jsonl with a line "
        f'{{"{config.image}": "a.jpg", "{config.caption}": "..."}} for each picture'
    )


def _open_file(path: Path, config: DataConfig) -> Table:
    if path.suffix == ".jsonl":
        return _open_jsonl([path], config, path)
    if path.suffix == ".json":
        return Conversations(path, config)
    if path.suffix == ".tar":
        return Shards([path], config)
    raise ValueError(f"data.name={str(path)!r} is of no known kind; give .jsonl, .json (LLaVA's) or .tar, or a folder")


def _open_jsonl(paths: Sequence[Path], config: DataConfig, where: Path) -> Table:
    rows = read_jsonl(paths)
    require_columns(rows, config, where)
    return Listed(rows, config, Path(config.images) if config.images else paths[0].parent)
