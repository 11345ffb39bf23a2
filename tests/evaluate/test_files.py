"""Questions from files: asked as `generate` is, written down as they come, gone on with, put together again."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffprune.evaluate import runner
from diffprune.evaluate.answers import answers_file, read_sheet
from diffprune.evaluate.files import read_questions
from diffprune.evaluate.join import join_files
from diffprune.evaluate.journal import Journal, journal_file
from diffprune.evaluate.session import Session
from diffprune.evaluate.task import Question
from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from diffprune.results import read_results
from tests import tiny
from tests.evaluate.own_questions import PICTURES, asked, rows, save_model, write_jsonl, write_pictures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data"), 40)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "x.json"
    Session(asked(model, data, out)).run()
    return out


def said_one_by_one(vlm: PrunedVLM, path: Path, **generate) -> list[str]:
    """What `generate` says to each question, prompt by prompt."""
    questions = read_questions(path)
    said = []
    for task in questions.tasks:
        for question in task.questions:
            images = questions.open(question.images)
            if question.turns:
                (earlier,) = question.turns
                content = [{"type": "image"}] * len(images) + [{"type": "text", "text": earlier[0]}]
                talk = [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": [{"type": "text", "text": earlier[1]}]},
                    {"role": "user", "content": [{"type": "text", "text": question.prompt}]},
                ]
                prompt = vlm.processor.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
                said.append(vlm.generate(images, prompt, chat=False, do_sample=False, **generate))
            else:
                said.append(vlm.generate(images or None, question.prompt, do_sample=False, **generate))
    return said


@pytest.mark.parametrize("count", [48, pytest.param(200, marks=pytest.mark.slow)])
def test_questions_get_the_answers_that_generate_gives_one_by_one(model: Path, tmp_path: Path, count: int) -> None:
    path = write_jsonl(tmp_path, count)
    settings = asked(model, path, None, methods="divprune", keep="3", batch_size=20)
    full, pruned = Session(settings).run().answers
    vlm = PrunedVLM(*load_base(str(model)))
    assert full.said == said_one_by_one(vlm, path, max_new_tokens=3)
    assert pruned.said == said_one_by_one(vlm.with_method("divprune", keep=3), path, max_new_tokens=3)
    assert len(set(full.said)) > 12 and full.said != pruned.said, "the tiny model does look"
    assert list(full.score) == ["open", "letters", "presence"]


def test_four_methods_at_three_budgets_encode_each_picture_once(model: Path, data: Path, monkeypatch) -> None:
    encoded: list[int] = []
    kind = type(PrunedVLM(*tiny.build("llava")).backbone)
    encode = kind.encode
    monkeypatch.setattr(
        kind, "encode", lambda self, batch, *needs: encoded.append(batch.num_images) or encode(self, batch, *needs)
    )
    settings = asked(model, data, None, methods="divprune,random,uniform_grid,fastv", keep="2,4,0.5", hold=PICTURES)
    assert len(Session(settings).run().answers) == 1 + 4 * 3
    assert sum(encoded) == PICTURES


@pytest.mark.parametrize("moments", [["between"], pytest.param(["before", "after"], marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(
    model: Path, data: Path, unbroken: Path, tmp_path: Path, monkeypatch, moments: list[str]
) -> None:
    """SIGKILL before, in the middle of and after an append; nothing that is in the file is asked again."""
    chance = random.Random(7)
    points = [f"{moment}@{chance.randint(2, 5)}" for moment in moments]
    for point in points:
        (tmp_path / point).mkdir()
    command = [sys.executable, "-m", "tests.evaluate.killed", str(model), str(data), str(tmp_path), *points]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    again: list[int] = []
    add = Journal.add
    monkeypatch.setattr(Journal, "add", lambda self, asked, runs: again.extend(asked) or add(self, asked, runs))
    for point in points:
        out = tmp_path / point / "x.json"
        lines = journal_file(out).read_text().split("\n")[1:-1]  # whole ones, the first aside
        before = {place for line in lines for place in json.loads(line)["asked"]}
        assert len(lines) == int(point.partition("@")[2]) - (not point.startswith("after"))
        again.clear()
        Session(asked(model, data, out)).run()
        assert sorted([*again, *before]) == list(range(40)), point
        assert answers_file(out).read_bytes() == answers_file(unbroken).read_bytes(), point
        assert read_results(out).rows == read_results(unbroken).rows and not journal_file(out).exists()


def test_a_model_whose_numbers_overflow_loses_no_answers(tmp_path: Path) -> None:
    base, processor = copy.deepcopy(tiny.build("llava"))
    torch.nn.init.constant_(base.model.multi_modal_projector.linear_1.bias, float("inf"))
    base.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    read_rows(tmp_path, GOOD, GOOD | {"image": []})
    settings = asked(tmp_path / "model", tmp_path / "q.jsonl", tmp_path / "x.json", methods="random", keep="3")
    first, again = Session(settings).run(), Session(settings).run()
    assert first.rows == again.rows and first.answers[1].values["first_token_kl"] == [None, 0.0]
    assert first.sentences == ["2 answers have no first_token_kl: theirs or the full model's logits are not finite"]
    assert read_results(tmp_path / "x.json").notes.endswith(first.sentences[0])


def test_a_run_that_is_over_is_not_asked_again(model: Path, data: Path, unbroken: Path, monkeypatch) -> None:
    before = answers_file(unbroken).read_bytes()
    monkeypatch.setattr(runner, "make_runs", lambda *_: pytest.fail("asked again"))
    assert Session(asked(model, data, unbroken)).run().rows == read_results(unbroken).rows
    assert answers_file(unbroken).read_bytes() == before


def test_a_journal_left_beside_a_finished_file_is_removed(
    model: Path, data: Path, unbroken: Path, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "x.json"
    monkeypatch.setattr(Journal, "close", lambda self: pytest.fail("killed"))  # between the sheet and this
    with pytest.raises(pytest.fail.Exception):
        Session(asked(model, data, out)).run()
    assert journal_file(out).exists() and not out.exists()
    monkeypatch.setattr(runner, "make_runs", lambda *_: pytest.fail("asked again"))
    assert Session(asked(model, data, out)).run().rows == read_results(unbroken).rows
    assert not journal_file(out).exists() and out.exists()


def test_two_evaluations_that_write_to_one_file_do_not_mix_their_answers(tmp_path: Path) -> None:
    """Two shards with one --out, say: what the second said to its prompts would be taken for answers to the first's."""
    path, said = tmp_path / "x.answers.jsonl", [{"said": ["red"]}]
    first, second = (Journal(path, {"shard": f"{which}/2"}, runs=1, count=2) for which in range(2))
    first.add([0], said)
    with pytest.raises(ValueError, match=r"another evaluation writes to .*x\.answers\.jsonl too, or has removed it"):
        second.add([1], said)
    first.add([1], said)
    path.unlink()
    with pytest.raises(ValueError, match="give each its own --out, and start this one again"):
        first.add([1], said)
    assert not path.exists()


def test_shards_joined_are_one_run(model: Path, data: Path, unbroken: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"{which}.json" for which in range(3)]
    for which, out in enumerate(parts):
        Session(asked(model, data, out, shard=f"{which}/3")).run()
    counts = [len(read_sheet(answers_file(out)).questions) for out in parts]
    assert sum(counts) == 40 and all(counts)
    with pytest.raises(ValueError, match=r"shard 1/3 of .*0\.json is missing; answer it, and join all 3"):
        join_files([parts[0], parts[2]], tmp_path / "x.json")
    joined = join_files([parts[2], parts[0], parts[1]], tmp_path / "x.json")
    # Distances follow from floats, which the other prompts of a batch round otherwise; all else is the same file.
    one, parts_of_it = (read_sheet(answers_file(path)) for path in (unbroken, tmp_path / "x.json"))
    for a, b in zip(one.answers, parts_of_it.answers, strict=True):
        assert a.values.pop("first_token_kl") == pytest.approx(b.values.pop("first_token_kl"), abs=1e-4)
    assert one == parts_of_it
    assert joined.notes == read_results(unbroken).notes and read_results(parts[0]).notes == f"{joined.notes}; shard 0/3"
    expected = read_results(unbroken).rows
    for row, other in zip(joined.rows, expected, strict=True):
        assert row["first_token_kl"] == pytest.approx(other.pop("first_token_kl"), abs=1e-4)
        assert {key: row[key] for key in other} == other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keep": "2"}, "holds answers with other budgets (3, 0.4; now 2)"),
        ({"methods": "random"}, "holds answers with other methods"),
        ({"max_new_tokens": 2}, "holds answers with other length (3 tokens; now 2 tokens); give another --out, or"),
        ({"shard": "0/2"}, "holds answers with other shard"),
    ],
)
def test_answers_of_another_run_are_refused_and_stay(
    model: Path, data: Path, unbroken: Path, changes: dict, words: str
) -> None:
    before = answers_file(unbroken).read_bytes()
    settings = asked(model, data, unbroken)
    settings = type(settings)(**{key: getattr(settings, key) for key in settings.__slots__} | changes)
    with pytest.raises(ValueError) as error:
        Session(settings).run()
    assert words in str(error.value)
    assert answers_file(unbroken).read_bytes() == before


def test_parquet_is_what_jsonl_is(tmp_path: Path, data: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = write_pictures(tmp_path)
    made = [row for row in rows(16, names) if "turns" not in row]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, made)))
    for row in made:
        row["image"] = [(tmp_path / name).read_bytes() for name in ([] if "image" not in row else [row["image"]])[:1]
                        for name in (name if isinstance(name, list) else [name])]  # fmt: skip
    columns = {key: [row.get(key) for row in made] for key in dict.fromkeys(key for row in made for key in row)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "mine.parquet", row_group_size=5)
    ours, theirs = (read_questions(tmp_path / f"mine.{kind}") for kind in ("parquet", "jsonl"))
    for one, other in zip(ours.tasks, theirs.tasks, strict=True):
        assert one.name == other.name and one.metric is other.metric
        for a, b in zip(one.questions, other.questions, strict=True):
            assert (a.id, a.prompt, a.answer, a.choices) == (b.id, b.prompt, b.answer, b.choices)
            pixels = [[image.tobytes() for image in q.open(x.images)] for q, x in ((ours, a), (theirs, b))]
            assert pixels[0] == pixels[1]


def test_a_whole_number_of_a_parquet_file_is_read_as_one_beside_missing_ones(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = (tmp_path / write_pictures(tmp_path)[0]).read_bytes()
    keys = ("question", "task", "id", "answer", "answers", "choices")
    made = [
        ("How many?", None, 7.0, 1.0, None, None),
        ("How much?", None, None, 2.5, None, None),
        ("How long?", None, None, None, [3.0, 0.5], None),
        ("Which?", "choice", None, 1.0, None, [5.0, 6.0]),
    ]
    table = pyarrow.Table.from_pylist([dict(zip(keys, row, strict=True)) | {"image": image} for row in made])
    parquet.write_table(table, tmp_path / "q.parquet")
    first, second, third, fourth = (
        one for task in read_questions(tmp_path / "q.parquet").tasks for one in task.questions
    )
    assert (first.answer, first.id, second.answer, third.answers) == ("1", "7", "2.5", ("3", "0.5"))
    assert fourth.choices == ("5", "6") and fourth.answer == "B"


def test_the_size_of_a_phone_s_picture_is_that_of_the_turned_one(tmp_path: Path) -> None:
    stored = tiny.picture(1, (30, 20))
    exif = stored.getexif()
    exif[0x0112] = 6  # as a phone held upright stores it
    stored.save(tmp_path / "phone.jpg", exif=exif)
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "What?", "answer": "red", "image": "phone.jpg"}) + "\n")
    questions = read_questions(path)
    (image,) = questions.tasks[0].questions[0].images
    assert questions.sizes_of([image]) == [questions.open([image])[0].size] == [(20, 30)]


GOOD = {"question": "What?", "answer": "red"}


def read_rows(folder: Path, *made: dict) -> tuple[Question, ...]:
    """The questions of a file of these rows, each about one picture."""
    tiny.picture(0).save(folder / "0.png")
    path = folder / "q.jsonl"
    path.write_text("\n".join(json.dumps({"image": "0.png"} | row) for row in made))
    return tuple(question for task in read_questions(path).tasks for question in task.questions)


def test_a_null_is_a_column_left_out(tmp_path: Path) -> None:
    first, second = read_rows(tmp_path, GOOD | {"id": None}, {"question": "?", "answer": None, "answers": ["a", "b"]})
    assert (first.id, second.id) == ("1", "2") and second.answers == ("a", "b")


def test_the_answer_is_right_whether_or_not_it_is_among_the_answers(tmp_path: Path) -> None:
    (question,) = read_rows(tmp_path, GOOD | {"answers": ["crimson"]})
    assert question.answers == ("red", "crimson")


@pytest.mark.parametrize(
    ("answer", "choices", "letter"),
    [
        ("3", ["1", "2", "3"], "C"),
        (2, ["1", "2", "3"], "C"),
        (1, [3, 4], "B"),
        (4, [3, 4], "B"),
        ("B", list("xy"), "B"),
    ],
)
def test_an_answer_is_an_option_its_letter_or_its_number(
    tmp_path: Path, answer: str | int, choices: list, letter: str
) -> None:
    (question,) = read_rows(tmp_path, {"question": "?", "answer": answer, "choices": choices})
    assert question.answer == letter


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    read_rows(tmp_path, GOOD)
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_questions(path).tasks[0].questions) == 1


def test_a_parquet_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, seen = tmp_path / "q.parquet", []
    for number in range(2):
        tiny.picture(number).save(tmp_path / "0.png")
        row = GOOD | {"image": (tmp_path / "0.png").read_bytes()}
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        questions = read_questions(path)
        seen += questions.open(questions.tasks[0].questions[0].images)
    assert seen[0].tobytes() != seen[1].tobytes()


def test_another_picture_of_the_same_name_and_size_is_another_question(tmp_path: Path) -> None:
    seen = []
    for number in range(2):
        tiny.picture(number).save(tmp_path / "0.bmp")
        read_rows(tmp_path, GOOD | {"image": "0.bmp"})
        questions = read_questions(tmp_path / "q.jsonl")
        seen.append(questions.identity(questions.tasks[0].questions[0].images[0]))
    assert seen[0] != seen[1]


def test_a_task_may_be_called_0(tmp_path: Path) -> None:
    read_rows(tmp_path, *(GOOD | {"task": name} for name in (0, 1, "")))
    assert [task.name for task in read_questions(tmp_path / "q.jsonl").tasks] == ["0", "1", "q"]


@pytest.mark.parametrize(
    "wrong", [{"turns": [["<image>\nWhat?", "A wall."]]}, {"question": "<image> or <image>?"}, {"image": ["0.png"] * 2}]
)
def test_a_question_with_a_placeholder_too_many_is_named_before_anything_is_asked(
    model: Path, tmp_path: Path, wrong: dict
) -> None:
    read_rows(tmp_path, GOOD, {"id": "odd", "question": "<image> what?", "answer": "red"} | wrong)
    with pytest.raises(ValueError, match=r"question 'odd' cannot be asked: \d image\(s\) for \d placeholder"):
        Session(asked(model, tmp_path / "q.jsonl", tmp_path / "x.json", batch_size=1)).run()
    assert not journal_file(tmp_path / "x.json").exists()


def test_a_placeholder_in_a_question_does_not_go_with_blind(model: Path, tmp_path: Path) -> None:
    read_rows(tmp_path, GOOD, {"id": "own", "question": "What is <image>?", "answer": "red"})
    given = asked(model, tmp_path / "q.jsonl", tmp_path / "x.json", methods="full", blind=True)
    with pytest.raises(ValueError, match="question 'own' says by <image> where its picture stands, and --blind asks"):
        Session(given).run()
    assert not journal_file(tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"answer": "red"}], "row 1 has no question"),
        ([GOOD, {"question": "What?"}], "row 2 has no answer; give `answer` or `answers`"),
        ([GOOD | {"image": "none.png"}], "row 1: there is no image file"),
        ([GOOD | {"image": "broken.png"}], "broken.png is no image that can be read"),
        ([GOOD | {"image": "page.png"}], "page.png is no image that can be read"),
        ([GOOD | {"image": "line.png"}], "1 x 201 pixels, one side more than 200 times the other"),
        ([GOOD | {"image": 7}], "row 1 has the image 7; give a path, or bytes in a parquet file"),
        ([GOOD | {"metric": "bleu"}], "row 1 has the metric 'bleu'; choose from exact, vqa"),
        ([GOOD | {"metric": "pope"}], "the metric 'pope' needs yes or no, not 'red'"),
        ([GOOD | {"metric": "choice"}], "the metric 'choice' needs `choices`"),
        ([GOOD | {"metric": "vqa"}], "the metric 'vqa' compares with at least 4 annotators' `answers`, not 1"),
        ([GOOD | {"choices": ["a", "b"]}], "the answer 'red' is none of its 2 choices"),
        ([GOOD | {"answer": "AB", "choices": ["a", "b"]}], "the answer 'AB' is none of its 2 choices"),
        ([GOOD | {"answer": "A", "choices": ["B", "A"]}], "the answer 'A' may mean A or B; give its number from 0"),
        ([GOOD | {"answer": 1, "choices": [1, 2]}], "the answer 1 may mean A or B; give its letter"),
        ([GOOD | {"choices": ["red", "red"]}], "the answer 'red' may mean A or B; give its number from 0"),
        ([GOOD | {"choices": {"A": "red"}}], "row 1 has the choices {'A': 'red'}; write a list of them"),
        ([GOOD | {"choices": "red"}], "row 1 has the choices 'red'; write a list of them"),
        ([GOOD | {"choices": [["red"]]}], "row 1 has the choice ['red']; write it as a text or a number"),
        ([GOOD | {"answer": True, "choices": ["yes", "no"]}], "row 1 has the answer True; write it as a text"),
        (['{"question": "What?", "answer": NaN}'], "row 1 has the answer nan; write it as a text or a number"),
        ([GOOD | {"answers": ["red", None]}], "row 1 has the answer None; write it as a text or a number"),
        ([GOOD | {"image": [[0] * 1000]}], " 0, 0, 0...; give a path, or bytes in a parquet file"),
        ([GOOD | {"images": "0.png"}], "has a picture, so nothing can be dropped; put it into the column `image`"),
        ([GOOD | {"id": "a"}, GOOD | {"id": "a"}], "row 2 has the id 'a' of row 1; give each question its own"),
        ([GOOD, {"question": "?", "answer": "yes", "metric": "pope"}], "give them two `task` names"),
        ([GOOD | {"turns": [["What?"]]}], "write [question, answer] for each"),
        ([], "holds no questions; write a line for each"),
        (["{"], "row 1 is no JSON"),
    ],
)
def test_a_bad_row_is_one_sentence(tmp_path: Path, lines: list, words: str) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "page.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    tiny.picture(0, (1, 201)).save(tmp_path / "line.png")
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    with pytest.raises(ValueError) as error:
        read_questions(path)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shard": "4/4"}, "--shard '4/4' is no part; give WHICH/OF, from 0/4 to 3/4"),
        ({"shard": "a/b"}, "--shard 'a/b' is no part"),
        ({"hard": True}, "--hard compares with downscale, which is not among the methods"),
        ({"data": Path("none.jsonl")}, "there is no data file none.jsonl"),
        ({"data": Path(__file__)}, "is neither .jsonl nor .parquet"),
    ],
)
def test_bad_settings_are_told_before_the_model_is_loaded(model: Path, data: Path, changes: dict, words: str) -> None:
    given = {"data": data} | changes
    with pytest.raises(ValueError) as error:
        Session(asked(model, given.pop("data"), None, **given))
    assert words in str(error.value)
