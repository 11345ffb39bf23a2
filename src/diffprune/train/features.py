"""The frozen tower's features on disk, so that a picture is encoded once and not in every epoch and run.

    FOLDER/cache.json  features-3f2a....safetensors  ...

`cache.json` says of which tower, processor and layer they are. A shard holds what was encoded between two checkpoints,
by one process; it is there whole or not at all. A picture is known by its pixels, so other questions about it, another
order and another data set find it too.
"""

import hashlib
import json
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Bool
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffprune.atomic import replacing, write_text
from diffprune.backbones.base import with_needs
from diffprune.backbones.pictures import MADE_LATER, join_tokens
from diffprune.backbones.prompts import Batch
from diffprune.fingerprint import base_fingerprint, features_of
from diffprune.json_files import read_json
from diffprune.model import PrunedVLM
from diffprune.ops.transfer import to_device
from diffprune.train.checkpointing import writing
from diffprune.train.feed import Broken, Feed, Sample
from diffprune.types import VisualTokens

ABOUT, SHARDS = "cache.json", "features-*.safetensors"
SHARD_BYTES = 1 << 28  # held in memory before they are written
MOST_OPEN = 256  # shards
CHECK = "check"  # the name of a picture's checksum among its tensors
PER_TOKEN = ("x", "mask", "coords", "segment", "boxes", "cls_attention", "keys")


class FeatureCache:
    """Features of pictures in a folder, all of one tower.

    Args:
        folder: Made where it is not there; one with features of another tower is refused.
        precision: Of the forward pass.
    """

    def __init__(self, folder: Path, vlm: PrunedVLM, *, precision: str) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._new: dict[str, dict[str, Tensor]] = {}  # not yet written
        self._claim(describe_tower(vlm, precision))
        self._shards: dict[str, tuple[Path, list[str]]] = {}  # of each picture, and the tensors it has there
        for shard in sorted(folder.glob(SHARDS)):
            self._list(shard, self._file(shard).keys())

    def _claim(self, about: dict[str, Any]) -> None:
        path = self.folder / ABOUT
        if not path.is_file():
            # Several runs may start at once: another's file may be there by now, or under its hidden name.
            if self.folder.exists() and (not self.folder.is_dir() or set(self.folder.glob("[!.]*")) - {path}):
                raise ValueError(
                    f"data.cache={self.folder} holds something else than features; name a folder of its own"
                )
            with writing("the cache of features", self.folder, of_run=False):
                write_text(path, json.dumps(about, indent=2) + "\n")
        try:
            found = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} of data.cache is damaged ({error}); remove {self.folder}") from error
        other = [key for key in about if not isinstance(found, dict) or found.get(key) != about[key]]
        if other:
            raise ValueError(
                f"data.cache={self.folder} holds features of another {other[0]} than this run's; name another "
                "folder, or remove that one"
            )

    def _list(self, shard: Path, names: Iterable[str]) -> None:
        for name in names:
            key, _, part = name.partition(".")
            self._shards.setdefault(key, (shard, []))[1].append(part)

    def _file(self, shard: Path) -> Any:
        if shard not in self._open:
            if len(self._open) >= MOST_OPEN:
                del self._open[next(iter(self._open))]
            try:
                self._open[shard] = safe_open(shard, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{shard} of data.cache cannot be read ({error}); remove it") from error
        return self._open[shard]

    def __contains__(self, key: str) -> bool:
        return key in self._new or key in self._shards

    def find(self, vlm: PrunedVLM, batch: Batch) -> VisualTokens | None:
        """The visual tokens of the batch; None where one of its pictures is not here."""
        keys = keys_of(vlm, batch)
        if not keys or any(key not in self for key in keys):
            return None
        rows = [unpack(self._read(key), seed) for key, seed in zip(keys, batch.seeds, strict=True)]
        tokens = move(join_tokens(rows), batch.features["input_ids"].device)
        return with_needs(vlm.backbone, batch, tokens, vlm.method.needs)

    def _read(self, key: str) -> dict[str, Tensor]:
        if key in self._new:
            return self._new[key]
        shard, parts = self._shards[key]
        tensors = {part: self._file(shard).get_tensor(f"{key}.{part}") for part in parts}
        if CHECK not in tensors or int(tensors.pop(CHECK)) != checksum(tensors):
            raise ValueError(f"{shard} of data.cache is damaged; remove it")
        return tensors

    def keep(self, vlm: PrunedVLM, batch: Batch, tokens: VisualTokens) -> None:
        """Take up what is new among the tokens of a batch."""
        for row, key in enumerate(keys_of(vlm, batch)):
            if key not in self:
                self._new[key] = pack(tokens, row)
        held = sum(value.nbytes for tensors in self._new.values() for value in tensors.values())
        if held > SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is new."""
        if not self._new:
            return
        shard = self.folder / SHARDS.replace("*", uuid.uuid4().hex)
        rows = {key: {**one, CHECK: torch.tensor(checksum(one))} for key, one in self._new.items()}
        tensors = {f"{key}.{name}": value for key, one in rows.items() for name, value in one.items()}
        with writing("features of pictures", self.folder, of_run=False), replacing(shard) as new:
            safetensors.torch.save_file(tensors, new)
        self._list(shard, tensors)
        self._new = {}


class CachedFeed(Feed):
    """Another feed, whose pictures are looked up before the tower is asked."""

    def __init__(self, feed: Feed, cache: FeatureCache) -> None:
        self.feed, self.cache = feed, cache

    @property
    def per_epoch(self) -> int | None:
        return self.feed.per_epoch

    def validation(self) -> list[Sample | Broken]:
        return self.feed.validation()

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        return self.feed.read(positions, wanted)

    def prepare(self, vlm: PrunedVLM, samples: Sequence[Sample]) -> Batch | None:
        batch = self.feed.prepare(vlm, samples)
        if batch is None:
            raise ValueError("data.cache is for pictures from files, and these are drawn on the device; set it to null")
        return batch

    def encode(
        self, vlm: PrunedVLM, samples: Sequence[Sample], batch: Batch | None = None
    ) -> tuple[Batch, VisualTokens]:
        batch = self.prepare(vlm, samples) if batch is None else batch
        assert batch is not None
        tokens = self.cache.find(vlm, batch)
        if tokens is None:
            batch, tokens = self.feed.encode(vlm, samples, batch)
            self.cache.keep(vlm, batch, tokens)
        return batch, tokens

    def regions(self, vlm: PrunedVLM, tokens: VisualTokens, samples: Sequence[Sample]) -> Bool[Tensor, "B N"] | None:
        return self.feed.regions(vlm, tokens, samples)


def describe_tower(vlm: PrunedVLM, precision: str) -> dict[str, Any]:
    """All that features follow from besides the picture, as plain values."""
    images: Any = getattr(vlm.processor, "image_processor", None)
    settings = json.dumps(images.to_dict() if hasattr(images, "to_dict") else {}, sort_keys=True, default=str)
    return {
        "format": 2,
        "tower": base_fingerprint(vlm.backbone),
        "layer": features_of(vlm.backbone)["layer"],
        "processor": hashlib.sha256(settings.encode()).hexdigest()[:32],
        "precision": f"{str(vlm.base.dtype).removeprefix('torch.')} in {precision}",
        "method's needs": sorted(vlm.method.needs - MADE_LATER),
    }


def keys_of(vlm: PrunedVLM, batch: Batch) -> list[str]:
    """What each picture of a batch is known by: its pixels, and how it is encoded in this batch."""
    return [f"{seed:014x}-{vlm.backbone.picture_mode(batch, image)}" for image, seed in enumerate(batch.seeds)]


def pack(tokens: VisualTokens, row: int) -> dict[str, Tensor]:
    """One picture's tokens as tensors on the CPU, without padding."""
    count = int(tokens.mask[row].sum())
    found = {name: getattr(tokens, name) for name in PER_TOKEN}
    found |= {f"plane{index}": plane for index, plane in enumerate(tokens.planes)}
    out = {name: value[row, :count] for name, value in found.items() if value is not None}
    if tokens.slots is not None:
        out["slots"] = tokens.slots[row, : int((tokens.slots[row] != -2).sum())]
    out["about"] = torch.tensor([*tokens.grid[row], tokens.group, tokens.is_full])
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in out.items()}


def checksum(tensors: dict[str, Tensor]) -> int:
    """Of one picture's tensors: a file that was cut off by a power failure may be whole and yet hold zeros."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


def unpack(tensors: dict[str, Tensor], seed: int) -> VisualTokens:
    """One picture's tokens, on the CPU."""
    rows, columns, group, is_full = tensors["about"].tolist()
    found = {name: value[None] for name, value in tensors.items() if name in (*PER_TOKEN, "slots")}
    if is_full:
        del found["mask"]
    planes = tuple(tensors[f"plane{index}"][None] for index in range(sum(name.startswith("plane") for name in tensors)))
    return VisualTokens(**found, grid=((rows, columns),), group=group, seeds=(seed,), planes=planes)


def move(tokens: VisualTokens, device: torch.device) -> VisualTokens:
    """The tokens on a device, without waiting for it."""
    found = {item.name: getattr(tokens, item.name) for item in fields(tokens)}
    moved = {name: to_device(value, device) for name, value in found.items() if isinstance(value, Tensor)}
    if tokens.is_full:
        moved["made_mask"] = moved["mask"]
    return replace(tokens, planes=tuple(to_device(plane, device) for plane in tokens.planes), **moved)
