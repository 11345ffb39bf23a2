"""A folder of pictures with JSONL files, or one such file."""

from collections.abc import Sequence
from pathlib import Path

from diffprune.config import DataConfig
from diffprune.json_files import parse_json
from diffprune.train.feed import Broken, Sample
from diffprune.train.sources.rows import Row, read_row, require_columns
from diffprune.train.sources.table import Table


class Listed(Table):
    """Rows in memory, pictures in files: a folder with JSONL."""

    def __init__(self, rows: Sequence[Row | ValueError], config: DataConfig, root: Path) -> None:
        self.rows, self.config, self.root = rows, config, root

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, number: int) -> Sample | Broken:
        return read_row(number, self.rows[number], self.config, self.root)


def open_jsonl(paths: Sequence[Path], config: DataConfig, where: Path) -> Table:
    rows = read_jsonl(paths)
    require_columns(rows, config, where)
    return Listed(rows, config, Path(config.images) if config.images else paths[0].parent)


def read_jsonl(paths: Sequence[Path]) -> list[Row | ValueError]:
    """Every line as a row; one that is no JSON object is kept as the error it is."""
    rows: list[Row | ValueError] = []
    for path in paths:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    row = ValueError(f"{path.name} line {line_number} is not JSON ({error})")
                if not isinstance(row, dict | ValueError):
                    row = ValueError(f"{path.name} line {line_number} is no JSON object")
                rows.append(row)
    return rows
