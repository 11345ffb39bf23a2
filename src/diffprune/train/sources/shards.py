"""WebDataset tar shards, read in place."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

from diffprune.config import DataConfig
from diffprune.json_files import parse_json
from diffprune.train.feed import Broken, Sample
from diffprune.train.sources.rows import read_row
from diffprune.train.sources.table import Table

PICTURES = (".jpg", ".jpeg", ".png", ".webp")


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
                found = parse_json(_bytes_at(files[".json"]))
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
            end = shard.offset
        with path.open("rb") as file:  # a tar ends with blocks of zeros; one cut between two members has none
            file.seek(end)
            if len(file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
                raise ValueError(f"the shard {path} is cut short after {len(samples)} samples; copy it again")
    except tarfile.TarError as error:
        raise ValueError(f"the shard {path} is damaged or compressed ({error}); give whole, plain tar files") from error
    return samples


def _bytes_at(place: tuple[Path, int, int]) -> bytes:
    path, offset, size = place
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)
