"""The chain from nothing to answers at toy size, and what says whether a world may be frozen."""

import json
from pathlib import Path

import pytest
import torch

from diffprune.evaluate.answers import Answers, Entry, Sheet, answers_file, write_sheet
from diffprune.evaluate.encoded import encode_questions
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import Measurement, evaluate
from diffprune.model import PrunedVLM
from diffprune.results import write_results
from diffprune_lab.pretrain import passes as scenes_passes
from diffprune_lab.pretrain import turns
from diffprune_lab.pretrain.feed import parse_weights
from diffprune_lab.scarce import accept, pretrain, reference
from diffprune_lab.scarce.digest import frozen_digest
from diffprune_lab.scarce.feed import LanguageBatch, draw_batch
from diffprune_lab.scarce.passes import answer_pass
from diffprune_lab.scarce.source import SCARCE_TASKS
from diffprune_lab.scarce.world import make_scene
from diffprune_lab.scenes import reference as scenes_reference

TOY = ["--model", "scarce-tiny", "--steps", "2", "--batch", "4", "--workers", "0", "--device", "cpu", "--no-compile"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scarce")
    pretrain.main(["--stage", "tower", "--out", str(folder / "tower"), *TOY])
    pretrain.main(["--stage", "language", "--init", str(folder / "tower"), "--out", str(folder / "language"), *TOY])
    return folder


def test_the_chain_runs_and_logs_what_methods_without_training_keep(trained: Path) -> None:
    entries = [json.loads(line) for line in (trained / "language/log.jsonl").read_text().splitlines()]
    assert [entry["check"] for entry in entries if "check" in entry] == ["full", "oracle", *pretrain.CHECKED]
    tower = [json.loads(line) for line in (trained / "tower/log.jsonl").read_text().splitlines()]
    assert tower[-1]["covered"]["oracle"] > 0.99


def test_a_language_stage_starts_from_weights(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        pretrain.main(["--stage", "language", "--out", str(tmp_path), *TOY])
    with pytest.raises(ValueError, match="give --init a folder that a run wrote"):
        pretrain.main(["--stage", "language", "--init", str(tmp_path), "--out", str(tmp_path / "out"), *TOY])


def test_a_tower_alone_answers_nothing(trained: Path) -> None:
    with pytest.raises(ValueError, match="train the language stage"):
        reference.load_scarce("scarce-tiny", trained / "tower")
    with pytest.raises(ValueError, match="choose one of scarce-llava"):
        reference.scarce_spec("scenes-llava")


def test_the_pass_with_binding_answers_as_the_first_worlds_pass() -> None:
    tokenizer = reference.build_tokenizer()
    model = scenes_reference.build_model(reference.SPECS["scarce-tiny"], tokenizer)
    encode = turns.PieceEncoder(tokenizer)
    scenes = [make_scene("train", index) for index in range(3)]
    batch = draw_batch(LanguageBatch(encode, scenes_reference.END, count=4)(scenes), torch.device("cpu"))
    start = torch.tensor([scenes_reference.START, *encode(turns.BEFORE_PICTURE)])
    features, keep = torch.randn(3, 576, 32), torch.arange(0, 576, 9).expand(3, -1)
    with torch.no_grad():
        ours, guesses, _, middle = answer_pass(model, features, keep, batch, start)
        theirs, wanted, _ = scenes_passes.answer_loss(model, features, keep, batch, start)
    assert torch.allclose(ours, theirs, atol=1e-6) and torch.equal(guesses, wanted)
    assert middle.shape == (3, 64, 32)


def test_the_tokenizer_knows_every_word_of_the_texts() -> None:
    encode = turns.PieceEncoder(reference.build_tokenizer())
    make = LanguageBatch(encode, scenes_reference.END, count=12)
    batch = make([make_scene("train", index) for index in range(300, 340)])
    first_byte, last_byte = 4, 4 + 255
    used = batch["ids"][batch["ids"] > scenes_reference.IMAGE]
    assert ((used >= first_byte) & (used <= last_byte)).float().mean() < 0.5  # single letters are bytes, words are not
    assert (batch["lengths"] > 0).sum(1).min() >= 6


def test_weights_of_questions_are_checked() -> None:
    assert parse_weights("sign=20,size=4", LanguageBatch.default_weights) == {"sign": 20, "size": 4}
    with pytest.raises(ValueError, match="not the weight of a turn: write for example name=20,color=20"):
        parse_weights("signs=2", LanguageBatch.default_weights)


def test_the_library_answers_these_questions_through_the_deployed_path(trained: Path) -> None:
    base, processor = reference.load_scarce("scarce-tiny", trained / "language")
    vlm = PrunedVLM(base, processor, method="full")
    questions = SCARCE_TASKS.build(["scarce/sign", "scarce/relation"], split="validation", count=2)
    gallery = encode_questions(vlm, questions)
    assert len(gallery.prompts) == 6 and gallery.tokens.x.shape[1] == 576
    runs = accept.method_runs(vlm, ["random"], [64], [0])
    runs.append(Measurement("oracle", 64, 0, gallery.oracle()))
    runs.append(Measurement("item_tokens2", 64, 0, accept.ItemTokens(accept.items_of(gallery), 2)))
    answers = evaluate(vlm, gallery, runs)
    assert [one.entry.method for one in answers] == ["full", "random", "oracle", "item_tokens2"]
    assert all(set(one.score) == {"scarce/sign", "scarce/relation"} for one in answers)


def _rows(**changed: float) -> list[dict]:
    figures = {
        "full": 97.0,
        "blind": 20.0,
        "oracle": 98.0,
        "random": 60.0,
        "gots": 90.0,
        "feature_norm": 62.0,
    } | changed
    rows: list[dict] = [
        {"method": who, "task": "scarce/name", "score": figures[who], "chance": 18.0} for who in ("full", "blind")
    ]
    return rows + [
        {"method": who, "keep": 64, "retention": figures[who]} for who in figures if who not in ("full", "blind")
    ]


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, None),
        ({"full": 94.9}, 0),
        ({"blind": 23.1}, 1),
        ({"oracle": 96.9}, 2),
        ({"random": 65.1, "feature_norm": 66.0}, 3),
        ({"gots": 93.1}, 4),
        ({"gots": 74.9}, 4),
        ({"feature_norm": 70.1}, 5),
    ],
)
def test_each_line_of_the_acceptance_breaks_alone(changed: dict[str, float], broken: int | None) -> None:
    lines = accept.judge(_rows(**changed), ["random", "feature_norm", "gots"])
    assert [place for place, (_, holds, _) in enumerate(lines) if not holds] == ([] if broken is None else [broken])


def test_parts_of_another_world_or_model_are_not_judged_together(tmp_path: Path) -> None:
    questions = [{"id": "0", "task": "scarce/name", "prompt": "what?", "answer": "yes"}]

    def part(name: str, method: str, digest: str, score: float = 100.0) -> Path:
        scored = {"scarce/name": score}
        both = [
            Answers(Entry(name, keep, 0), ["yes"], scored, scored, {"scarce/name": [score]})
            for name, keep in (("full", 1.0), (method, 64))
        ]
        path = tmp_path / name
        rows = [{**row, "digest": digest} for row in quality_rows(both, both[0])]
        write_results(path, name=path.stem, rows=rows, commit="abc1234")
        write_sheet(answers_file(path), Sheet(questions, {}, both))
        return path

    first = part("a.json", "random", "aa")
    joined = accept.join([first, part("b.json", "gots", "aa")], "aa")
    assert [one.entry.method for one in joined.answers] == ["full", "random", "gots"]
    with pytest.raises(ValueError, match=r"c.json was measured in another world or on other weights \(bb\) .* \(aa\)"):
        accept.join([first, part("c.json", "gots", "bb")], "aa")
    with pytest.raises(ValueError, match=r"the full model has 100.0 on scarce/name in .* and 50.0 in"):
        accept.join([first, part("d.json", "gots", "aa", 50.0)], "aa")
    with pytest.raises(ValueError, match=r"random at keep=64 with seed 0 is in .* and in"):
        accept.join([first, part("e.json", "random", "aa")], "aa")


def test_the_digest_follows_the_weights(trained: Path, tmp_path: Path) -> None:
    code, tower, language = (frozen_digest(f) for f in (None, trained / "tower", trained / "language"))
    assert len({code, tower, language}) == 3 and frozen_digest() == code
    with pytest.raises(ValueError, match=r"train them with runs/train_scarce\.sh"):
        frozen_digest(tmp_path)
