"""What is readable from a throttled token: the probe on made-up tokens, the contents of both worlds, and a real run."""

import json
from pathlib import Path

import pytest
import torch

from diffprune_lab.scarce import masks
from diffprune_lab.scarce.world import make_scene as make_scarce
from diffprune_lab.scenes import atlas
from diffprune_lab.scenes.world import make_scene
from diffprune_lab.studies import leak
from diffprune_lab.studies.contents import NONE, WORLDS
from lab.tests.probes.test_temperature import short_run

FITTED, TRIED, EACH = 120, 80, 5


def made_tokens(signal: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of noise with so much of a picture's colors in them; whether each color is there; the scene of each."""
    generator = torch.Generator().manual_seed(0)
    scene = torch.arange(FITTED + TRIED).repeat_interleave(EACH)
    there = torch.rand(FITTED + TRIED, 3, generator=generator) < 0.6
    directions = torch.randn(3, 16, generator=generator)
    x = torch.randn(len(scene), 16, generator=generator) + signal * there[scene].float() @ directions
    return x, there[scene], scene


def test_what_is_in_a_token_is_read_and_what_is_not_is_not() -> None:
    x, there, scene = made_tokens(signal=3.0)
    found = leak.read(x, there, scene, FITTED, TRIED, exclusive=False)
    assert found is not None and found[1] == 2
    assert float(found[0].accuracy()) > 95
    silent = leak.read(made_tokens(signal=0.0)[0], there, scene, FITTED, TRIED, exclusive=False)
    assert silent is not None and 40 < float(silent[0].accuracy()) < 60


def test_a_token_that_was_shrunk_alone_is_as_readable_as_before() -> None:
    x, there, scene = made_tokens(signal=1.0)
    shrunk = x * torch.rand(len(x), 1, generator=torch.Generator().manual_seed(1)).mul(0.04).add(1e-3)
    whole, small = (leak.read(one, there, scene, FITTED, TRIED, exclusive=False) for one in (x, shrunk))
    assert whole is not None and small is not None
    assert float(small[0].accuracy()) == pytest.approx(float(whole[0].accuracy()), abs=1e-6)


def test_one_of_several_is_guessed_where_only_one_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    scene = torch.arange(FITTED + TRIED).repeat_interleave(EACH)
    kind = torch.randint(4, (len(scene),), generator=generator)
    x = torch.randn(len(scene), 16, generator=generator) + 4 * torch.randn(4, 16, generator=generator)[kind]
    wanted = torch.nn.functional.one_hot(kind, 6).bool()  # two of them are never there
    found = leak.read(x, wanted, scene, FITTED, TRIED, exclusive=True)
    assert found is not None
    reading, guesses = found
    assert guesses == 4 and float(reading.accuracy()) > 95
    assert reading.asked.sum() == TRIED * EACH  # every token that was not fitted is asked once


def test_nothing_is_said_where_there_is_nothing_to_tell_apart() -> None:
    x, there, scene = made_tokens(signal=1.0)
    assert leak.read(x, torch.ones_like(there), scene, FITTED, TRIED, exclusive=False) is None
    assert leak.read(x[:0], there[:0], scene[:0], FITTED, TRIED, exclusive=False) is None


def test_what_the_block_adds_is_paired_by_scene() -> None:
    x, there, scene = made_tokens(signal=0.0)
    louder = made_tokens(signal=2.0)[0]
    found = {
        stage: leak.read(one, there, scene, FITTED, TRIED, exclusive=False)
        for stage, one in (("features", louder), ("gate", x), ("block", louder))
    }
    cells = {cell.key["stage"]: cell.values for cell in leak.cells({"place": "ground"}, 1, found, len(x))}
    assert cells["block"]["added"] == pytest.approx(cells["block"]["accuracy"] - cells["gate"]["accuracy"])
    assert cells["block"]["accuracy"] == cells["features"]["accuracy"]
    assert 0 < cells["block"]["added_error"] < 5 and "added" not in cells["gate"]


@pytest.mark.parametrize("world", ["scenes", "scarce"])
def test_contents_are_what_is_drawn(world: str) -> None:
    make = {"scenes": make_scene, "scarce": make_scarce}[world]
    scenes = [make("validation", number) for number in range(4)]
    found = WORLDS[world].contents(scenes, 8, torch.device("cpu"))
    assert found.own.shape == (4, 576) and found.others.shape[-1] == WORLDS[world].colors
    assert not (found.on_ground & found.on_thing).any()
    assert ((found.own == NONE) == ~(found.on_ground | found.on_thing)).all()
    for row, scene in enumerate(scenes):
        colors = {thing.color for thing in scene.things} if world == "scenes" else set()
        colors |= {half for thing in scene.things for half in (thing.top, thing.bottom)} if world == "scarce" else set()
        ground, on_thing = found.on_ground[row], found.on_thing[row]
        assert ground.any() and on_thing.any()
        # On the ground every thing is another one; on a thing its color is one of the picture's.
        there = {color for color in range(WORLDS[world].colors) if found.others[row, ground][0, color]}
        assert there == colors and (found.others[row, ground] == found.others[row, ground][0]).all()
        assert set(found.own[row, on_thing].tolist()) <= colors
    names = {"scenes": atlas.COLORS, "scarce": masks.COLORS}[world]
    assert WORLDS[world].colors == len(names)


def test_a_thing_alone_has_no_others() -> None:
    scene = next(one for one in (make_scene("train", n) for n in range(400)) if len(one.things) == 1)
    found = WORLDS["scenes"].contents([scene], 8, torch.device("cpu"))
    assert not found.others[found.on_thing].any() and found.others[found.on_ground].any()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    optim = {"steps": 2, "batch_size": 2, "accumulate": 1, "precision": "float32", "lr": 1e-2, "warmup": 0}
    return [
        short_run(folder / name, method={"name": name}, recipe=recipe, optim=optim)
        for name, recipe in (("diffprune-scale", "bridge"), ("diffprune", "paper"), ("gumbel_ste", "default"))
    ]


def test_runs_are_measured_stage_by_stage_and_others_are_passed_over(runs, tmp_path, capsys) -> None:
    out = tmp_path / "scenes_leak.json"
    told = ["--size", "tiny", "--device", "cpu", "--out", str(out)]
    leak.main(["--runs", *map(str, runs), str(tmp_path / "nothing"), *told])
    said = capsys.readouterr()
    assert "nothing holds no run" in said.err and "is no run of DiffPrune (gumbel_ste)" in said.err
    rows = json.loads(out.read_text())["rows"]
    assert {(row["recipe"], row["throttler"]) for row in rows} == {
        ("bridge", "scale gate"),
        ("paper", "diagonal attention"),
    }
    assert len(rows) == 2 * 2 * 2 * len(leak.STAGES)
    found = {}
    for row in rows:
        if "accuracy" not in row:  # too few such tokens
            assert row["n_seeds"] == 0
            continue
        assert row["ci95"][0] < row["accuracy"] < row["ci95"][1] and row["by_seed"]["42"]["tokens"] > 0
        assert row["is_read"] == (row["ci95"][0] > row["chance"])
        found[row["throttler"], row["place"], row["reads"], row["stage"]] = row["accuracy"]
    shrunk, whole = (found["scale gate", "ground", "other", stage] for stage in ("gate", "features"))
    assert shrunk == pytest.approx(whole, abs=1e-3)  # made small alone, so as readable as it was


def test_runs_that_cannot_be_used_are_told(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        leak.main(["--runs", str(tmp_path), "--out", str(tmp_path / "leak.json"), "--device", "cpu"])
    assert "none can be used" in capsys.readouterr().err
