"""What vLLM is told: its server's command line, and what is refused before an engine starts. vLLM is not needed."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

import diffprune as dp
from diffprune.integrations import vllm
from diffprune.integrations.vllm import ARCHITECTURE
from diffprune.integrations.vllm_command import command, engine_arguments
from diffprune.integrations.vllm_settings import Settings, refuse_method
from diffprune.methods.base import Card, Pruner
from tests import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A saved base model of two families, and a saved pruner of the first."""
    root = tmp_path_factory.mktemp("served")
    out = {}
    for family in ("llava", "qwen2_5_vl"):
        model, processor = tiny.build(family)
        model.save_pretrained(root / family)
        processor.save_pretrained(root / family)
        out[family] = str(root / family)
    vlm = dp.PrunedVLM(*tiny.build("llava"), method="diffprune", keep=5)
    vlm.save_pretrained(root / "pruner", base_id=out["llava"])
    return out | {"pruner": str(root / "pruner")}


def test_a_saved_pruner_is_served_on_the_base_it_names(folders: dict[str, str]) -> None:
    line = command(folders["pruner"], keep=3, host="0.0.0.0", port=8123, more=["--dtype", "float32"])
    given = dict(itertools.pairwise(line))
    assert line[1:3] == ["-m", "vllm.entrypoints.openai.api_server"] and line[-2:] == ["--dtype", "float32"]
    assert given["--model"] == folders["llava"] and given["--port"] == "8123" and given["--host"] == "0.0.0.0"
    assert "--trust-request-mm-kwargs" in line
    overrides = json.loads(given["--hf-overrides"])
    assert overrides["architectures"] == [ARCHITECTURE]
    assert overrides["diffprune"] == {"pruner": folders["pruner"], "keep": 3}
    # One number for a place: three rows of positions are asked for, so that the gaps can be told.
    assert sum(overrides["text_config"]["rope_parameters"]["mrope_section"]) == tiny.WIDTH // tiny.HEADS // 2


def test_the_budget_is_the_largest_that_the_pruner_was_trained_for(folders: dict[str, str]) -> None:
    assert engine_arguments(folders["pruner"])["hf_overrides"]["diffprune"]["keep"] == 5


def test_three_rows_are_asked_for_where_the_model_has_one_and_places_are_kept(folders: dict[str, str]) -> None:
    packed = engine_arguments(model=folders["llava"], method="divprune", keep=4, positions="packed")
    assert "text_config" not in packed["hf_overrides"]
    qwen = engine_arguments(model=folders["qwen2_5_vl"], method="divprune", keep=4)
    assert "text_config" not in qwen["hf_overrides"]  # it has them already
    assert qwen["hf_overrides"]["diffprune"] == {"method": "divprune", "keep": 4}


def test_the_chat_begins_with_the_start_token_where_the_tokenizer_adds_it(
    folders: dict[str, str],
) -> None:
    _, processor = tiny.build("llava")
    line = command(model=folders["llava"], method="divprune", keep=4)
    adds = processor.tokenizer("a")["input_ids"][0] == processor.tokenizer.bos_token_id
    from_python = engine_arguments(model=folders["llava"], method="divprune", keep=4)
    assert adds == ("--chat-template" in line) == ("chat_template" in from_python)
    if adds:
        template = line[line.index("--chat-template") + 1]
        assert from_python["chat_template"] == template
        question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
        stated = processor.apply_chat_template(question, chat_template=template, add_generation_prompt=True)
        own = processor.apply_chat_template(question, add_generation_prompt=True)
        assert stated == processor.tokenizer.bos_token + own


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "fastv", "keep": 4}, "'fastv' drops inside the language model"),
        ({"method": "cdpruner", "keep": 4}, "'cdpruner' reads the question"),
        ({"method": "diffprune", "keep": 4}, "learned and needs weights"),
        ({"method": "divprune", "keep": 0}, "keep=0 keeps nothing"),
        ({"method": "divprune", "keep": 4, "positions": "dense"}, "positions='dense' is unknown"),
        ({"method": "divprune", "keep": 4, "newline": "rows"}, "newline='rows' cannot be served"),
        ({"method": "divprune", "share": 4}, "share is no setting"),
        ({"keep": 4}, "keep=4 needs something that chooses"),
        ({"method": "full", "keep": 0.5}, "keep=0.5 needs something that chooses"),
    ],
)
def test_what_cannot_be_served_is_refused_before_an_engine_starts(
    folders: dict[str, str], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        command(model=folders["llava"], **settings)


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        ({"budgets": []}, {}, "names no budget that it was trained for; give keep"),
        ({"budget": "per_tile"}, {}, "spends its budget tile by tile"),
        ({}, {"method": "full"}, "weights of 'diffprune' cannot be deployed as 'full'"),
        ({}, {"method": "divprune", "keep": 4}, "weights of 'diffprune' cannot be deployed as 'divprune'"),
    ],
)
def test_a_pruner_that_cannot_be_served_is_refused_before_an_engine_starts(
    folders: dict[str, str], change: dict[str, object], settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    shutil.copytree(folders["pruner"], tmp_path / "p")
    config = tmp_path / "p" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        command(str(tmp_path / "p"), **settings)
    assert engine_arguments(folders["pruner"], method="diffprune-diverse")["hf_overrides"]["diffprune"]["keep"] == 5


def test_a_method_that_looks_at_the_picture_for_its_count_is_refused() -> None:
    class Threshold(Pruner):
        card = Card(idea="keeps what is bright")
        is_exact = False

        def select(self, tokens, k):  # type: ignore[no-untyped-def]
            raise AssertionError

    with pytest.raises(ValueError, match="decides by the picture how many tokens stay"):
        refuse_method(Threshold, "threshold")


def test_a_model_is_named_with_no_pruner() -> None:
    with pytest.raises(ValueError, match="needs a base model"):
        command("none", keep=4)


def test_settings_are_written_without_what_is_usual() -> None:
    given = {"method": "divprune", "keep": 0.5}
    assert Settings.read({**given, "positions": "original"}).written() == given


@pytest.mark.parametrize(
    ("version", "words", "refused"),
    [("0.31.4", "too old: 0.32", True), ("0.32.1", "", False), ("0.40.0", "was not tested", False)],
)
def test_a_version_of_the_engine_that_is_not_known_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, words: str, refused: bool
) -> None:
    monkeypatch.setattr(vllm, "require", lambda extra: None)
    monkeypatch.setattr(vllm, "engine_version", lambda: version)
    if refused:
        with pytest.raises(ValueError, match=words):
            vllm.require_engine()
        return
    vllm.require_engine()
    assert (words in caplog.text) and bool(caplog.text) == bool(words)
