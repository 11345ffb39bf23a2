import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from diffprune.fingerprint import fingerprint, sampled_fingerprint
from diffprune.saving import exported_state, load_pruner, save_pruner

CONFIG = {
    "method": {"name": "diffprune", "options": {"scorer_depth": 2}},
    "base": {"id": "example/base", "revision": None, "model_type": "llava", "fingerprint": "00ff"},
    "features": {"layer": -2, "before": "projector"},
    "budgets": [64],
    "positions": "original",
    "notes": "",
}


def some_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "scorer.head.weight": torch.randn(1, 8, generator=generator),
        "scorer.head.bias": torch.zeros(1),
        "throttle_block.weight": torch.randn(8, 8, generator=generator),
        "throttle_mean": torch.zeros(8),
    }


@pytest.fixture
def saved(tmp_path):
    save_pruner(tmp_path / "run", state=some_state(), config=CONFIG)
    return tmp_path / "run"


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_saved_pruner_loads_back(saved):
    config, state = load_pruner(saved)
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert config["format"] == 1 and "torch" in config["versions"]
    expected = exported_state(some_state())
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_the_throttler_never_leaves_training(saved):
    assert set(load_file(saved / "model.safetensors")) == {"scorer.head.weight", "scorer.head.bias"}
    assert exported_state({"pruner.throttle_block.weight": torch.zeros(1)}) == {}


def test_the_folder_holds_three_files_and_no_leftovers(saved):
    assert sorted(files(saved)) == ["README.md", "config.json", "model.safetensors"]
    assert list(saved.parent.iterdir()) == [saved]


def test_other_files_in_the_folder_are_left_alone(saved):
    (saved / "training.safetensors").write_bytes(b"x")
    save_pruner(saved, state=some_state(1), config=CONFIG)
    assert (saved / "training.safetensors").read_bytes() == b"x"
    assert torch.equal(load_pruner(saved)[1]["scorer.head.weight"], some_state(1)["scorer.head.weight"])


def test_views_and_shared_tensors_are_saved_as_they_look(tmp_path):
    square = torch.arange(4.0).view(2, 2)
    save_pruner(tmp_path / "run", state={"a": square.T, "b": square}, config=CONFIG)
    _, state = load_pruner(tmp_path / "run")
    assert torch.equal(state["a"], square.T) and torch.equal(state["b"], square)


def test_a_method_without_weights_can_be_saved(tmp_path):
    save_pruner(tmp_path / "run", state={}, config={**CONFIG, "method": {"name": "divprune", "options": {}}})
    assert load_pruner(tmp_path / "run")[1] == {}


def test_the_card_names_the_base_and_shows_the_measured_rows(tmp_path):
    rows = [{"method": "diffprune", "keep": 64, "retention": 91.25}]
    save_pruner(tmp_path / "run", state=some_state(), config=CONFIG, card_rows=rows)
    card = (tmp_path / "run" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: diffprune\nbase_model: example/base\n")
    assert "| diffprune | 64 | 91.25 |" in card


def test_a_base_without_a_name_is_not_made_up(tmp_path):
    save_pruner(tmp_path / "run", state={}, config={**CONFIG, "base": {**CONFIG["base"], "id": ""}})
    card = (tmp_path / "run" / "README.md").read_text()
    assert "base_model:" not in card and "a model without a name" in card


def test_a_card_without_measurements_says_so(saved):
    assert "Nothing has been measured" in (saved / "README.md").read_text()


def test_a_save_that_fails_while_writing_leaves_the_old_files(saved):
    before = files(saved)
    with pytest.raises(ValueError, match=r"Out of range|not JSON compliant"):
        save_pruner(saved, state=some_state(1), config={**CONFIG, "notes": float("nan")})
    assert files(saved) == before and list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("moves_before_failure", [0, 1, 2, 3])
def test_a_save_that_fails_while_moving_leaves_the_old_files(saved, monkeypatch, moves_before_failure):
    before, replace, moves = files(saved), os.replace, []

    def fail_once(source, target):
        moves.append(target)
        if len(moves) == moves_before_failure + 1:
            raise OSError("disk gone")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="disk gone"):
        save_pruner(saved, state=some_state(1), config=CONFIG)
    assert files(saved) == before


@pytest.mark.parametrize("kill_at", range(5))
def test_a_save_killed_between_its_moves_leaves_a_pruner_that_loads(saved, kill_at):
    """SIGKILL before each rename: first the one that makes the save valid, then the three files; 4: not killed."""
    child = os.fork()
    if child == 0:
        replace, moves = os.replace, []

        def kill(source, target):
            if len(moves) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            moves.append(target)
            replace(source, target)

        os.replace = kill
        save_pruner(saved, state=some_state(1), config=CONFIG)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) == (kill_at < 4)
    _, state = load_pruner(saved)
    expected = exported_state(some_state(0 if kill_at == 0 else 1))
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    save_pruner(saved, state=some_state(2), config=CONFIG)
    assert {path.name for path in saved.iterdir() if not path.name.startswith(".unfinished-")} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }


def test_a_first_save_that_fails_while_moving_leaves_no_file(tmp_path, monkeypatch):
    replace = os.replace

    def fail_on_config(source, target):
        if target.name == "config.json":
            raise OSError("disk gone")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_on_config)
    with pytest.raises(OSError, match="disk gone"):
        save_pruner(tmp_path / "run", state=some_state(), config=CONFIG)
    assert files(tmp_path / "run") == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("method", None), ("budgets", 64), ("base", {"id": "example/base"}), ("method", {"name": "diffprune"})],
)
def test_a_wrong_config_entry_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(ValueError, match=key):
        save_pruner(tmp_path / "run", state=some_state(), config={**CONFIG, key: value})
    assert list(tmp_path.iterdir()) == []


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-8])


def fill_with_text(path):
    path.write_text("this is no such file")


def use_a_base_models_config(path):
    path.write_text(json.dumps({"model_type": "llava"}))


def use_a_newer_format(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def drop_an_entry(path):
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "features"})
    )


def change_one_weight(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model.safetensors", cut_short, "is damaged"),
        ("model.safetensors", fill_with_text, "is damaged"),
        ("model.safetensors", change_one_weight, "does not belong"),
        ("model.safetensors", os.unlink, "is missing"),
        ("config.json", cut_short, "is damaged"),
        ("config.json", fill_with_text, "is damaged"),
        ("config.json", use_a_base_models_config, "not of a saved pruner"),
        ("config.json", use_a_newer_format, "upgrade diffprune"),
        ("config.json", drop_an_entry, "features is None"),
        ("config.json", os.unlink, "is missing"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_by_name(saved, file, damage, message):
    damage(saved / file)
    with pytest.raises(ValueError, match=message) as error:
        load_pruner(saved)
    assert file in str(error.value)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", cut_short),
        ("model.safetensors", change_one_weight),
        ("model.safetensors", os.unlink),
        ("config.json", cut_short),
        ("config.json", os.unlink),
    ],
)
def test_a_damaged_pruner_of_the_package_is_restored_not_saved_again(saved, file, damage):
    damage(saved / file)
    with pytest.raises(ValueError, match="save") as error:
        load_pruner(saved)
    assert "restore" not in str(error.value)
    with pytest.raises(ValueError, match=f"restore it with `git checkout -- {saved / file}` or install") as error:
        load_pruner(saved, restore="restore it with `git checkout -- {path}` or install the package again")
    assert "again" in str(error.value) and "download" not in str(error.value)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Values as a 16-bit checkpoint holds them, subnormals of float16 included."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(40, 50, generator=generator) * 0.02
    tiny = torch.randn(300, generator=generator) * 1e-5
    return {name: value.to(torch.bfloat16).to(dtype) for name, value in (("wide", wide), ("tiny", tiny))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fingerprint_is_the_same_in_every_precision_of_a_16_bit_model(dtype):
    assert fingerprint(weights(dtype=dtype).items()) == fingerprint(weights().items())


def test_a_fingerprint_does_not_depend_on_the_order():
    assert fingerprint(reversed(weights().items())) == fingerprint(weights().items())


def test_a_fingerprint_distinguishes_values_names_and_shapes():
    base = weights()
    others = [
        weights(1),
        {"renamed": base["wide"], "tiny": base["tiny"]},
        {"wide": base["wide"].view(50, 40), "tiny": base["tiny"]},
        {"wide": base["wide"]},
    ]
    prints = [fingerprint(other.items()) for other in [base, *others]]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("place", [0, 1, 777, 1_999])
def test_a_fingerprint_is_of_every_value(place):
    changed = {name: value.clone() for name, value in weights().items()}
    changed["wide"].view(-1)[place] += 1
    assert fingerprint(changed.items()) != fingerprint(weights().items())


def test_the_fingerprint_of_samples_is_what_it_was():
    """As pruners hold it that were saved when 1,024 values of each tensor were hashed."""
    steps = torch.arange(4096, dtype=torch.float32)
    tensors = {"a": steps.view(64, 64) / 64, "b": (steps[:100] - 50) * 1e-6}
    assert sampled_fingerprint(tensors.items()) == "07f07e55bace199750fbbe6ca5982a08"
