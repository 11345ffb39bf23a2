"""The second world is frozen: code, weights and oracle are those that were accepted, and its doors work."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import diffprune_lab
from diffprune import PrunedVLM
from diffprune.config import DataConfig
from diffprune.results import read_results, write_results
from diffprune_lab.scarce import accept, digest, reference
from diffprune_lab.scarce.data import ScarceFeed
from diffprune_lab.scarce.digest import frozen_digest
from diffprune_lab.scarce.package import package
from diffprune_lab.scarce.world import content_hash
from diffprune_lab.scenes.reference import ASSETS
from lab.tests import tiny_sized

ROOT = Path(diffprune_lab.__file__).resolve().parents[2]
FROZEN = "9e36e4f2fb108e7e"


@pytest.fixture(scope="module")
def vlm() -> PrunedVLM:
    base, processor = reference.load_frozen()
    return PrunedVLM(base, processor, method="diffprune")


def test_world_tasks_oracle_and_weights_are_those_that_were_accepted() -> None:
    assert frozen_digest(ASSETS / reference.NAME) == FROZEN


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("scarce_*.json")), ids=lambda path: path.stem)
def test_every_row_of_the_scarce_results_bears_the_digest(path: Path) -> None:
    rows = json.loads(path.read_text())["rows"]
    assert rows and {row.get("digest") for row in rows} == {FROZEN}


def test_rows_of_another_world_are_not_called_those_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "scarce_x.json"
    for given, held in ((None, FROZEN), (FROZEN, FROZEN), ("of before", "of before")):
        row = {"method": "random", "keep": 64, "retention": 60.0} | ({"digest": given} if given else {})
        write_results(path, name="scarce_x", rows=[row], commit="abc1234")
        if held != FROZEN:
            with pytest.raises(ValueError, match=r"scarce_x.json has rows of another world or weights \(of before\)"):
                digest.stamp(path, FROZEN)
        else:
            digest.stamp(path, FROZEN)
        assert [row["digest"] for row in read_results(path).rows] == [held]


def test_the_acceptance_holds_line_by_line() -> None:
    rows = json.loads((ROOT / "results/scarce_full.json").read_text())["rows"]
    measured = [row for row in rows if "line" not in row]
    names = [name for name in accept.methods_without_training() if any(row["method"] == name for row in measured)]
    assert len(names) > 20
    assert all(holds for _, holds, _ in accept.judge(measured, names))


def test_no_scene_of_the_models_training_is_among_the_captions(vlm: PrunedVLM) -> None:
    feed = ScarceFeed(DataConfig(name="scarce", validation=3), seed=42)
    other = ScarceFeed(DataConfig(name="scarce"), seed=43)
    read, again = (feed.read(range(4), [1, 3]) for _ in range(2))
    assert read == again and read[1].id > 1 << 38
    assert not {sample.id for sample in other.read(range(4), range(4)).values()} & {one.id for one in read.values()}
    hashes = {content_hash(one.picture.things, "") for one in [*feed.validation(), *read.values()]}
    assert len(hashes) == 5


def test_captions_are_encoded_where_the_model_runs_and_their_loss_is_small(vlm: PrunedVLM) -> None:
    feed = ScarceFeed(DataConfig(name="scarce", validation=2), seed=42)
    samples = feed.validation()
    batch, tokens = feed.encode(vlm, samples)
    assert tokens.x.shape == (2, 576, 192)
    with torch.no_grad():
        full = vlm.with_method("full").loss(batch, tokens=tokens, hard=True)
    assert full < 0.1  # a trained model knows these pictures
    regions = feed.regions(vlm, tokens, samples)
    assert regions is not None and 0.05 < regions.float().mean() < 0.6


def test_another_prompt_or_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.prompt is 'What\?'"):
        ScarceFeed(DataConfig(name="scarce", prompt="What?"), seed=0)
    with pytest.raises(ValueError, match=r"data\.sizes is '384'"):
        ScarceFeed(DataConfig(name="scarce", sizes="384"), seed=0)


def test_damaged_or_missing_weights_are_told(tmp_path: Path) -> None:
    folder = tmp_path / reference.NAME
    with pytest.raises(ValueError, match=r"train them with runs/train_scarce\.sh"):
        reference.load_frozen(folder)
    shutil.copytree(ASSETS / reference.NAME, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        reference.load_frozen(folder)


def test_a_scorer_of_the_first_world_is_refused() -> None:
    base, processor = reference.load_frozen()
    with pytest.raises(ValueError, match="scarce-llava"):
        PrunedVLM.from_pretrained(ASSETS / "scenes-llava-diffprune", base=base, processor=processor)


def test_a_model_of_another_size_is_refused() -> None:
    other = tiny_sized.pruned("llava_next")
    feed = ScarceFeed(DataConfig(name="scarce", validation=1), seed=0)
    with pytest.raises(ValueError, match="which this model would resize"):
        feed.encode(other, feed.validation())


def test_packaging_copies_weights_byte_for_byte(tmp_path: Path) -> None:
    trained = tmp_path / "language"
    trained.mkdir()
    shutil.copy(ASSETS / reference.NAME / "model.safetensors", trained)
    shutil.copy(ROOT / "results/scarce_chain/language.jsonl", trained / "log.jsonl")
    package(trained, tmp_path / "out")
    for name in ("model.safetensors", "README.md", "SHA256SUMS", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (ASSETS / reference.NAME / name).read_bytes(), name
    made, shipped = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", ASSETS / reference.NAME)
    )
    assert made | {"transformers_version": ""} == shipped | {"transformers_version": ""}


def test_the_digest_is_written_into_every_row_and_nothing_else_changes(tmp_path: Path) -> None:
    source = json.loads((ROOT / "results/scarce_full.json").read_text())
    bare = [
        {key: value for key, value in row.items() if key != "digest"} for row in source["rows"] if "line" not in row
    ]
    path = tmp_path / "scarce_methods.json"
    path.write_text(json.dumps({**source, "rows": bare}))
    digest.main([str(path), str(tmp_path / "scarce_methods.answers.json")])  # answers lie beside it and are passed over
    found = json.loads(path.read_text())
    assert {row.pop("digest") for row in found["rows"]} == {FROZEN}
    assert found == {**source, "rows": bare}
