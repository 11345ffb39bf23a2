"""Training on scenes at other picture sizes, through the models' own processors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from diffprune.config import RunConfig, make_config, to_yaml
from diffprune.model import PrunedVLM
from diffprune.train.run import train_pruner
from diffprune.train.sources import open_feed
from diffprune.train.trainer import Trainer
from diffprune_lab.scenes import make_scene
from diffprune_lab.scenes.captions import caption_batch, train_on_captions
from diffprune_lab.scenes.sizes import picture_size
from lab.tests import tiny_scenes
from tests import tiny
from tests.train.runs import losses, save_model, values

SCENES = {"name": "scenes", "validation": 2}
SHORT = {"batch_size": 2, "accumulate": 1, "steps": 2}


def config_for(model: Path | str, family: str, **data: object) -> RunConfig:
    backbone = {"name": family, "weights": str(model), "dtype": "float32"}
    return make_config(values(Path(), Path(), backbone=backbone, budget={"keep": 0.2}, optim=SHORT, data=SCENES | data))


def test_a_folder_s_own_sizes_are_trained_on(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llava_next")
    (folder / "scenes.json").write_text(json.dumps({"sizes": "384"}))
    config = config_for(folder, "llava_next")
    train_pruner(config, tmp_path / "run", quiet=True)
    assert len(losses(tmp_path / "run")) == 2 and all(map(math.isfinite, losses(tmp_path / "run")))
    vlm = PrunedVLM.from_pretrained(tmp_path / "run")
    for sizes, side in ((None, 384), ("fixed", 192)):
        feed = open_feed(replace(config.data, sizes=sizes), config.seed)
        batch = feed.prepare(vlm, [feed.read(range(1), [0])[0]])
        assert batch is not None and batch.sizes == ((side, side),)


def test_pictures_of_varying_size_train_with_a_budget_of_each_one_s_own(tmp_path: Path) -> None:
    config = config_for("none", "qwen2_5_vl", sizes="varying")
    run = Trainer(config, tmp_path, Accelerator(), frozen=(*tiny.build("qwen2_5_vl"), "tiny"))
    run.begin()
    before = run.vlm.method.scorer.head.weight.clone()
    parts = run.read(0)
    (part,) = parts
    wanted = [picture_size(sample.picture, "varying") for sample in part.samples]
    assert part.batch is not None and part.batch.sizes == tuple((width, height) for height, width in wanted)
    record = run.record(run.take_step(parts, stop=False))
    assert math.isfinite(record["loss"]) and not torch.equal(run.vlm.method.scorer.head.weight, before)
    tokens = run.vlm.encode(part.batch)
    counts = run.objective._budgets(tokens, part.samples, 0)
    assert counts.tolist() == [int(0.2 * count + 0.5) for count in tokens.counts.tolist()]
    assert math.isfinite(run.validate()["hard"])


def test_a_batch_drawn_at_once_is_what_the_processor_gives() -> None:
    scenes = [make_scene("train", index) for index in range(3)]
    texts = ["a red star", "two", "a very small blue ring"]
    for family, sizes in (("qwen2_5_vl", "varying"), ("llava_next", "384")):
        vlm = PrunedVLM(*tiny.build(family), method="diffprune", keep=0.3)
        batch, tokens = caption_batch(vlm, scenes, texts, sizes)
        assert batch.sizes == tuple(picture_size(scene, sizes)[::-1] for scene in scenes)
        assert batch.labels is not None and len(tokens) == 3
        loss = vlm.loss(batch, tokens=tokens, hard=True)
        torch.testing.assert_close(loss, vlm.loss(batch, hard=True))


def test_a_model_s_sizes_hold_for_quick_training_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = tiny_scenes.pruned("diffprune", 8, noise="matched")
    (tmp_path / "scenes.json").write_text('{"sizes": "varying"}')
    monkeypatch.setattr(vlm.base.config, "_name_or_path", str(tmp_path))
    seen: list[tuple[tuple[int, int], ...]] = []
    prepared = vlm.prepare
    vlm.prepare = lambda *arguments: (batch := prepared(*arguments), seen.append(batch.sizes))[0]
    values = train_on_captions(vlm, steps=1, batch_size=2, budgets=(2, 8), calibration=2)
    assert math.isfinite(values[0]) and len(seen) == 2  # to calibrate, and to train
    assert {size for sizes in seen for size in sizes} != {(192, 192)}


def test_sizes_are_read_and_written() -> None:
    given = {"backbone": {"name": "llava", "weights": "none"}, "budget": {"keep": 4}, "data": {"name": "scenes"}}
    for text, wanted in (("384", "384"), ("varying", "varying"), ("null", None)):
        config = make_config(given, [f"data.sizes={text}"])
        assert config.data.sizes == wanted
        assert make_config(given | {"data": {"name": "scenes", "sizes": wanted}}) == config
    assert "sizes: '384'" in to_yaml(make_config(given, ["data.sizes=384"]))
    with pytest.raises(ValueError, match=r"data.sizes is 'wide'"):
        make_config(given, ["data.sizes=wide"])


def test_scenes_of_the_model_s_own_size_are_drawn_where_it_runs() -> None:
    vlm = tiny_scenes.pruned("diffprune", 8)
    config = config_for("none", "llava")
    feed = open_feed(config.data, 0)
    samples = list(feed.read(range(2), [0, 1]).values())
    assert feed.prepare(vlm, samples) is None
    batch, tokens = open_feed(replace(config.data, sizes="varying"), 0).encode(vlm, samples)
    assert batch.sizes == tuple(picture_size(sample.picture, "varying")[::-1] for sample in samples)
    assert tokens.x.shape[1] == tiny_scenes.NUM_VISUAL
