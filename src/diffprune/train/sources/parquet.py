"""Parquet files, one row group at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from diffprune.config import DataConfig
from diffprune.extras import MissingExtraError
from diffprune.rng import hash_key
from diffprune.terminal import first_line
from diffprune.train.sources.rows import QUESTION, Row, require_columns
from diffprune.train.sources.stream import Stream


class Parquet(Stream):
    """Parquet files; their row groups are read in an order drawn by `data.seed`, since tables often come sorted."""

    def __init__(self, paths: Sequence[Path], config: DataConfig) -> None:
        try:
            import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingExtraError(
                "pyarrow of the extra 'train', which reads parquet files, is not installed: run pip install pyarrow"
            ) from None
        self.config, self.root = config, Path(config.images) if config.images else paths[0].parent
        self.groups: list[tuple[int, Path, int]] = []  # number of the first row, file, row group
        self.total = 0
        for path in paths:
            try:
                file = parquet.ParquetFile(path)
            except Exception as error:  # a damaged footer makes pyarrow raise anything
                raise ValueError(f"{path} is damaged or no parquet file: {first_line(error)}") from error
            require_columns([dict.fromkeys(file.schema_arrow.names)], config, path)
            for group in range(file.num_row_groups):
                self.groups.append((self.total, path, group))
                self.total += file.metadata.row_group(group).num_rows
        self.groups.sort(key=lambda item: hash_key(config.seed, "groups", item[0]))

    def count(self) -> int:
        return self.total

    def rows(self) -> Iterator[tuple[int, Row | ValueError]]:
        for first, path, group in self.groups:
            for place, row in enumerate(self._group(path, group)):
                yield first + place, row

    def _group(self, path: Path, group: int) -> Iterator[Row | ValueError]:
        """The rows of a group; one that is damaged gives as many errors, and the run decides whether these are many."""
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]

        used = {self.config.image, self.config.caption, QUESTION}
        file = parquet.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in used]
        try:
            table = file.read_row_group(group, columns=columns)
        except Exception as error:  # damaged pages make pyarrow raise anything
            broken = ValueError(f"row group {group} of {path.name} is damaged ({first_line(error)})")
            yield from [broken] * file.metadata.row_group(group).num_rows
            return
        for place in range(table.num_rows):
            try:
                yield {name: table.column(name)[place].as_py() for name in columns}
            except Exception as error:
                yield ValueError(f"row {place} of group {group} of {path.name} is damaged ({first_line(error)})")
