"""The ten tasks: well formed, balanced, exact, and scored with their own metric."""

import re
from collections import Counter

import pytest

from diffprune.evaluate.task import Task
from diffprune_lab.scenes.language import LETTERS, UNANSWERABLE
from diffprune_lab.scenes.tasks import TASKS, build_task
from diffprune_lab.scenes.world import COLORS, SHAPES

COUNT = 96


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {name: build_task(name, "test", COUNT) for name in TASKS}


def prompts_per_unit(name: str) -> int:
    return {"mmbench": 4, "mmbench_cn": 4, "mme": 2}.get(name, 1)


def test_the_ten_tasks_have_the_benchmarks_names():
    assert TASKS == (
        "gqa", "mmbench", "mmbench_cn", "mme", "pope", "scienceqa", "vqav2", "textvqa", "seed", "vizwiz",
    )  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_as_many_scored_units_as_asked_for(tasks, name):
    task = tasks[name]
    assert len(task.questions) == COUNT * prompts_per_unit(name)
    assert [q.group for q in task.questions] == [i // prompts_per_unit(name) for i in range(len(task.questions))]
    scored = task.score([q.answer for q in task.questions])
    assert len(scored.per_question) == COUNT
    assert len({q.id for q in task.questions}) == len(task.questions)


@pytest.mark.parametrize("name", TASKS)
def test_answering_right_reaches_the_ceiling(tasks, name):
    task = tasks[name]
    ceiling = task.score([q.answer for q in task.questions]).score
    assert task.ceiling == ceiling
    assert ceiling >= 97 if name in ("vqav2", "textvqa", "vizwiz") else ceiling == pytest.approx(100)


@pytest.mark.parametrize("name", TASKS)
def test_answering_nothing_scores_nothing(tasks, name):
    task = tasks[name]
    expected = task.chance if name == "pope" else 0  # POPE's script reads whatever is not a no as a yes
    assert task.score([""] * len(task.questions)).score == pytest.approx(expected)


@pytest.mark.parametrize("name", TASKS)
def test_the_score_is_the_mean_of_its_units(tasks, name):
    task = tasks[name]
    outputs = [q.answer if q.group % 3 else "no" for q in task.questions]
    scored = task.score(outputs)
    assert 0 < scored.score < 100
    assert sum(scored.per_question) / COUNT == pytest.approx(scored.score)
    assert scored.raw == pytest.approx(scored.score * (12 if name == "mme" else 1))  # 6 subtasks of 200 points


@pytest.mark.parametrize("name", TASKS)
def test_guessing_from_the_wording_alone_gets_no_more_than_chance(tasks, name):
    """A guesser that knows another sample of the task by heart: the most frequent answer to each wording."""
    known: dict[str, Counter] = {}
    for question in build_task(name, "train", 200).questions:
        known.setdefault(wording(question.prompt), Counter())[content(question)] += 1
    outputs = []
    for question in tasks[name].questions:
        seen = known.get(wording(question.prompt))
        if question.choices is None:
            outputs.append(seen.most_common(1)[0][0] if seen else "")
        else:
            likely = max(question.choices, key=lambda option: (seen or Counter())[option])
            outputs.append(LETTERS[question.choices.index(likely)])
    assert tasks[name].score(outputs).score <= tasks[name].chance + 10


def wording(prompt: str) -> str:
    """A question with what it refers to left out."""
    return re.sub(r"(the|an?) .*", "...", prompt.split("\n")[0])


def content(question) -> str:
    return question.answer if question.choices is None else question.choices[LETTERS.index(question.answer)]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("gqa", 20, 32), ("mmbench", 25, 25), ("mmbench_cn", 25, 25), ("mme", 37.5, 37.5), ("pope", 66, 67.5),
        ("scienceqa", 25, 25), ("vqav2", 35, 50), ("textvqa", 0, 8), ("seed", 25, 30), ("vizwiz", 40, 50),
    ],
)  # fmt: skip
def test_chance_is_what_the_best_guess_gets(tasks, name, low, high):
    assert low <= tasks[name].chance <= high


@pytest.mark.parametrize("name", ["gqa", "mme", "pope", "vqav2"])
def test_yes_and_no_are_balanced(tasks, name):
    families: dict[str, Counter] = {}
    for question in tasks[name].questions:
        if question.answer in ("yes", "no"):
            families.setdefault(question.subset, Counter())[question.answer] += 1
    assert families
    for answers in families.values():
        assert abs(answers["yes"] - answers["no"]) <= 1


@pytest.mark.parametrize("name", ["mmbench", "scienceqa", "seed"])
def test_every_letter_is_right_equally_often(tasks, name):
    families: dict[str, Counter] = {}
    for question in tasks[name].questions:
        families.setdefault(question.subset, Counter())[question.answer] += 1
        assert question.choices[LETTERS.index(question.answer)]
        assert len(set(question.choices)) == len(question.choices)
    for letters in families.values():
        assert max(letters.values()) - min(letters.values()) <= 1


@pytest.mark.parametrize("name", ["gqa", "vqav2"])
def test_colors_shapes_and_counts_are_balanced(tasks, name):
    families: dict[str, Counter] = {}
    for question in tasks[name].questions:
        families.setdefault(question.subset, Counter())[question.answer] += 1
    sizes = {"beside color": 10, "beside shape": 12, "beside size": 3, "color": 10, "shape": 12, "count": 4}
    for family, answers in families.items():
        if family in sizes:
            assert max(answers.values()) <= -(-answers.total() // sizes[family])


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_the_same_every_time_and_another_under_another_seed(name):
    first, again, other = (build_task(name, "validation", 12, seed=seed) for seed in (0, 0, 1))
    assert first.questions == again.questions
    assert [q.prompt for q in first.questions] != [q.prompt for q in other.questions]


@pytest.mark.parametrize("name", TASKS)
def test_scenes_are_of_the_split_asked_for_and_of_the_right_kind(tasks, name):
    for question in tasks[name].questions:
        assert question.scene.split == "test"
        if name == "scienceqa":
            assert question.scene.kind == "diagram"
        if name == "textvqa":
            assert question.scene.sign is not None and question.answer == question.scene.sign.text
        if name != "vizwiz":
            assert question.scene.quality == "clear"


def test_mmbench_shows_the_four_rotations_of_its_options(tasks):
    questions = tasks["mmbench"].questions
    for start in range(0, len(questions), 4):
        four = questions[start : start + 4]
        assert sorted(q.answer for q in four) == list(LETTERS)
        first = four[0].choices
        rotations = {first[i:] + first[:i] for i in range(4)}
        assert {q.choices for q in four} == rotations


def test_mmbench_cn_is_mmbench_translated(tasks):
    for english, chinese in zip(tasks["mmbench"].questions, tasks["mmbench_cn"].questions, strict=True):
        assert english.scene == chinese.scene
        assert english.answer == chinese.answer
        assert not re.search(r"[a-z]", chinese.prompt)


def test_a_multiple_choice_prompt_is_short_and_asks_for_the_letter(tasks):
    question = next(q for q in tasks["seed"].questions if q.subset == "color")
    lines = question.prompt.split("\n")
    assert lines[1:] == [
        *(f"{letter}. {choice}" for letter, choice in zip("ABCD", question.choices, strict=True)),
        "Answer with the letter.",
    ]


def test_mme_pairs_ask_a_yes_and_a_no_of_one_picture(tasks):
    questions = tasks["mme"].questions
    for one, other in zip(questions[::2], questions[1::2], strict=True):
        assert one.scene == other.scene
        assert {one.answer, other.answer} == {"yes", "no"}
    assert {q.subset for q in questions} == {"existence", "count", "position", "color", "ocr", "calculation"}
    assert {q.answer for q in questions[::2]} == {"yes", "no"}  # the yes is not always first
    assert tasks["mme"].score([q.answer for q in questions]).raw == pytest.approx(1200)


def test_popes_adversarial_negatives_share_color_or_shape_with_what_is_there(tasks):
    negatives = [q for q in tasks["pope"].questions if q.subset == "adversarial" and q.answer == "no"]
    for question in negatives:
        words = set(re.findall(r"\w+", question.prompt))
        names = [{*name_of(thing)} for thing in question.scene.things]
        assert any(words & name for name in names) and not any(name <= words for name in names)


def name_of(thing) -> tuple[str, str]:
    return COLORS[thing.color], SHAPES[thing.shape]


def test_vizwiz_says_unanswerable_where_nothing_can_be_told(tasks):
    questions = tasks["vizwiz"].questions
    for question in questions:
        cannot = question.subset in ("ruined", "missing", "missing sign")
        assert (question.answer == UNANSWERABLE) == cannot
        assert (question.scene.quality == "ruined") == (question.subset == "ruined")
    assert 0.3 < sum(q.answer == UNANSWERABLE for q in questions) / len(questions) < 0.4


def test_ten_annotators_mostly_agree_with_the_right_answer(tasks):
    for name in ("vqav2", "textvqa", "vizwiz"):
        for question in tasks[name].questions:
            assert len(question.answers) == 10


def test_the_families_of_a_short_task_keep_their_shares():
    families = Counter(q.subset for q in build_task("seed", "test", 20).questions)
    assert families == {"color": 4, "size": 3, "pattern": 3, "place": 4, "identity": 4, "count": 2}
    assert len(build_task("gqa", "test", 1).questions) == 1


def test_an_unknown_task_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"no task 'okvqa': choose one of gqa, mmbench, .*vizwiz\."):
        build_task("okvqa", "test", 10)


def test_an_unknown_split_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"no split 'dev': choose one of train, validation, test\."):
        build_task("gqa", "dev", 10)


def test_a_task_without_questions_is_refused():
    with pytest.raises(ValueError, match="0 questions"):
        build_task("gqa", "test", 0)


def test_outputs_that_do_not_match_the_questions_are_refused(tasks):
    with pytest.raises(ValueError, match=f"1 outputs cannot answer {COUNT} questions"):
        tasks["gqa"].score(["red"])
