"""Features of the frozen tower kept on disk: the same tokens, without the tower, and never those of another one."""

import errno
import json
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffprune.model import PrunedVLM
from diffprune.train.features import CachedFeed, FeatureCache
from diffprune.train.feed import Broken, Feed, Sample
from diffprune.types import VisualTokens
from tests import tiny
from tests.train import runs
from tests.train.runs import losses, train

SIZES = [(40, 30), (60, 60), (30, 80)]


class Three(Feed):
    """Three pictures of different size."""

    per_epoch = 3

    def validation(self) -> list[Sample | Broken]:
        return []

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        return {index: Sample(index, tiny.picture(index, SIZES[index]), "what?", "a" * index) for index in wanted}


def tokens_of(feed: Feed, vlm: PrunedVLM, rows: Sequence[int]) -> VisualTokens:
    samples = [sample for sample in feed.read(range(3), rows).values() if isinstance(sample, Sample)]
    return feed.encode(vlm, samples)[1]


def assert_equal(found: VisualTokens, expected: VisualTokens) -> None:
    assert found.is_full == expected.is_full and len(found.planes) == len(expected.planes)
    for ours, theirs in zip(found.planes, expected.planes, strict=True):
        assert torch.equal(ours, theirs)
    for item in fields(VisualTokens):
        ours, theirs = getattr(found, item.name), getattr(expected, item.name)
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(ours, theirs), item.name
        elif item.name != "planes":
            assert ours == theirs, item.name


@pytest.mark.parametrize("method", ["diffprune", "glimpse_prune"])
@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_tokens_from_the_cache_are_those_of_the_tower(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = PrunedVLM(*tiny.build(family), method=method, keep=4)
    expected = tokens_of(Three(), vlm, [0, 1, 2])
    feed = CachedFeed(Three(), FeatureCache(tmp_path, vlm, precision="float32"))
    assert_equal(tokens_of(feed, vlm, [0, 1, 2]), expected)
    feed.cache.flush()
    again = CachedFeed(Three(), FeatureCache(tmp_path, vlm, precision="float32"))
    monkeypatch.setattr(type(vlm.backbone), "encode", None)  # the tower is not asked
    for known in (feed, again):
        assert_equal(tokens_of(known, vlm, [0, 1, 2]), expected)
        assert torch.equal(tokens_of(known, vlm, [2]).x[0], expected.x[2][expected.mask[2]])
    (shard,) = tmp_path.glob("*.safetensors")
    assert {name.partition(".")[0] for name in load_file(shard)} == set(again.cache._shards)


def test_what_two_processes_wrote_is_found_by_a_third(tmp_path: Path) -> None:
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    for rows in ([0, 1], [1, 2]):
        feed = CachedFeed(Three(), FeatureCache(tmp_path, vlm, precision="float32"))
        tokens_of(feed, vlm, rows)
        feed.cache.flush()
        feed.cache.flush()  # nothing is new
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    third = FeatureCache(tmp_path, vlm, precision="float32")
    samples = [sample for sample in Three().read(range(3), range(3)).values() if isinstance(sample, Sample)]
    assert third.find(vlm, vlm.prepare([s.picture for s in samples], ["?"] * 3, ["a"] * 3)) is not None


def test_a_full_disk_is_told_without_a_word_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    feed = CachedFeed(Three(), FeatureCache(tmp_path, vlm, precision="float32"))
    tokens_of(feed, vlm, [0])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(
        OSError, match=r"^features of pictures cannot be written \(No space left on device\); make room"
    ):
        feed.cache.flush()


def test_a_shard_is_written_before_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffprune.train.features.SHARD_BYTES", 1)
    monkeypatch.setattr("diffprune.train.features.MOST_OPEN", 1)
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    feed = CachedFeed(Three(), FeatureCache(tmp_path, vlm, precision="float32"))
    for row in range(3):
        tokens_of(feed, vlm, [row])
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert len(tokens_of(feed, vlm, [0, 1, 2])) == 3  # of which one is open at a time


def test_features_of_another_tower_are_refused(tmp_path: Path) -> None:
    model, processor = deepcopy(tiny.build("llava"))  # other tests have the same ones
    vlm = PrunedVLM(model, processor, method="diffprune", keep=4)
    FeatureCache(tmp_path / "a", vlm, precision="float32")
    with pytest.raises(ValueError, match=r"data.cache=.* holds features of another precision than this run's; name"):
        FeatureCache(tmp_path / "a", vlm, precision="bfloat16")
    with torch.no_grad():
        next(model.model.vision_tower.parameters()).add_(1)
    with pytest.raises(ValueError, match="holds features of another tower"):
        FeatureCache(tmp_path / "a", vlm, precision="float32")
    FeatureCache(tmp_path / "b", vlm, precision="float32")
    processor.image_processor.rescale_factor *= 2
    with pytest.raises(ValueError, match="holds features of another processor"):
        FeatureCache(tmp_path / "b", vlm, precision="float32")
    (tmp_path / "b" / "cache.json").write_text("[]")
    with pytest.raises(ValueError, match="holds features of another format"):
        FeatureCache(tmp_path / "b", vlm, precision="float32")


def test_a_folder_of_something_else_and_a_damaged_shard_are_refused(tmp_path: Path) -> None:
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="holds something else than features; name a folder of its own"):
        FeatureCache(tmp_path / "other", vlm, precision="float32")
    with pytest.raises(ValueError, match="holds something else than features"):
        FeatureCache(tmp_path / "other" / "a.txt", vlm, precision="float32")
    FeatureCache(tmp_path / "new", vlm, precision="float32")
    (tmp_path / "new" / "features-0.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"features-0.safetensors of data.cache cannot be read .*; remove it"):
        FeatureCache(tmp_path / "new", vlm, precision="float32")
    (tmp_path / "new" / "cache.json").write_text("{")
    with pytest.raises(ValueError, match=r"cache.json of data.cache is damaged \(.*\); remove .*new"):
        FeatureCache(tmp_path / "new", vlm, precision="float32")


@pytest.mark.parametrize("harm", ["zeros", "lost"])
def test_features_that_are_not_what_was_written_are_not_trained_on(harm: str, tmp_path: Path) -> None:
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    feed = CachedFeed(Three(), FeatureCache(tmp_path, vlm, precision="float32"))
    tokens_of(feed, vlm, [0, 1, 2])
    feed.cache.flush()
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    if harm == "zeros":
        content = shard.read_bytes()
        shard.write_bytes(content[:-4096] + bytes(4096))
    else:
        save_file({name: value for name, value in tensors.items() if not name.endswith(".about")}, shard)
    again = CachedFeed(Three(), FeatureCache(tmp_path, vlm, precision="float32"))
    with pytest.raises(ValueError, match=r"features-.*.safetensors of data.cache is damaged; remove it"):
        for row in range(3):
            tokens_of(again, vlm, [row])


def test_runs_that_start_at_once_share_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    (tmp_path / ".cache.x8fj2k.json").write_text("")  # of a run that is about to rename it, or was killed there
    FeatureCache(tmp_path, vlm, precision="float32")
    is_file = Path.is_file
    late = [True]  # another run's file comes just after the look for it

    def looked(self: Path) -> bool:
        return not (self.name == "cache.json" and late and late.pop()) and is_file(self)

    monkeypatch.setattr(Path, "is_file", looked)
    FeatureCache(tmp_path, vlm, precision="float32")
    assert not late


def test_pictures_drawn_on_the_device_are_refused(tmp_path: Path) -> None:
    class Drawn(Three):
        def prepare(self, vlm: PrunedVLM, samples: Sequence[Sample]) -> None:
            return None

    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    with pytest.raises(ValueError, match=r"data\.cache is for pictures from files"):
        tokens_of(CachedFeed(Drawn(), FeatureCache(tmp_path, vlm, precision="float32")), vlm, [0])


def test_a_run_from_the_cache_has_the_losses_of_one_from_pixels_and_is_resumed_bit_equal(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice: dict[str, Any] = {"steps": 7, "epochs": 2}  # of 5 steps each: the second pass is cached
    train(disk, tmp_path / "pixels", optim=twice)
    cached = {"cache": str(tmp_path / "cache")}
    train(disk, tmp_path / "cached", optim=twice, data=cached)
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "pixels"), rel=1e-5)

    calls: list[int] = []
    encode = PrunedVLM.encode
    monkeypatch.setattr(PrunedVLM, "encode", lambda self, batch: (calls.append(1), encode(self, batch))[1])
    train(disk, tmp_path / "broken", optim=twice, data=cached)
    assert not calls, "all pictures are known"
    runs.forget_after(tmp_path / "broken", 4)
    train(disk, tmp_path / "broken", optim=twice, data=cached, resume=True)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("cached", "broken"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert json.loads((tmp_path / "cache" / "cache.json").read_text())["format"] == 2
