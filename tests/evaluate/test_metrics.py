"""The benchmarks' metrics, against values worked out by hand."""

import itertools

import pytest

from diffprune.evaluate import metrics


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Red", "red"),
        ("the red star", "red star"),
        ("A star.", "star"),
        ("two", "2"),
        ("None", "0"),
        ("ten", "10"),
        ("dont", "don't"),
        ("wouldnt've", "wouldn't've"),
        ("1,000", "1000"),
        ("2.5", "2.5"),
        ("stop!", "stop"),
        ("black-white", "black white"),
        ("red, blue", "red blue"),
        ("\tleft\nright ", "left right"),
        ("he's", "he's"),
    ],
)
def test_answers_are_normalised_as_the_vqa_script_does(text, plain):
    assert metrics.normalize(text) == plain


@pytest.mark.parametrize(
    ("text", "vqa", "evalai"),
    [
        ("let's go", "let's go", "let 's go"),
        ("it's", "it's", "it 's"),
        ("1,000-2", "10002", "1000 2"),
        ("red,blue", "red blue", "redblue"),
        ("what?ever", "what ever", "whatever"),
        ("The DOG.", "dog", "dog"),
        ("twas", "'twas", "'twas"),
        ("yall'll", "y'all'll", "y'all'll"),
        ("somebody'd", "somebodyd", "somebodyd"),
    ],
)
def test_the_two_normalisations_differ_where_their_scripts_do(text, vqa, evalai):
    assert metrics.normalize(text) == vqa
    assert metrics.normalize_evalai(text) == evalai
    answers = ["nothing else"] * 7 + [text] * 3
    other = metrics.normalize_evalai(text)  # an answer that only EvalAI's takes for the same, where they differ
    agreed = metrics.vqa_accuracy(other, answers, "evalai")
    assert agreed == pytest.approx(0.9)
    assert (metrics.vqa_accuracy(other, answers) == agreed) == (vqa == evalai)


@pytest.mark.parametrize("matches", range(11))
def test_vqa_accuracy_is_the_mean_over_leaving_each_annotator_out(matches):
    answers = ["red"] * matches + ["blue"] * (10 - matches)
    by_hand = sum(min(1.0, sum(a == "red" for a in rest) / 3) for rest in itertools.combinations(answers, 9)) / 10
    assert metrics.vqa_accuracy("Red.", answers) == pytest.approx(by_hand)


def test_vqa_accuracy_needs_answers():
    with pytest.raises(ValueError, match="annotators"):
        metrics.vqa_accuracy("red", [])


def test_exact_match_forgives_case_space_and_a_final_period_only():
    assert metrics.exact_match(" Red. ", "red") == 1.0
    assert metrics.exact_match("dark red", "red") == 0.0
    assert metrics.exact_match("two", "2") == 0.0


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("B", "B"),
        (" C.", "C"),
        ("(D) blue", "D"),
        ("A. red", "A"),
        ("The answer is B", "B"),
        ("The answer is: (C)", "C"),
        ("Blue", None),
        ("A'", None),
        ("", None),
        ("E", None),
        ("b", None),
    ],
)
def test_the_letter_of_an_output_is_found(output, letter):
    assert metrics.parse_letter(output) == letter


def test_choice_accuracy_counts_right_letters():
    scored = metrics.choice_accuracy(["A", "B.", "red", "D"], ["A", "B", "C", "C"])
    assert scored == (50.0, [100.0, 100.0, 0.0, 0.0])


def test_circular_accuracy_needs_every_rotation_right():
    letters = ["A", "D", "C", "B"] * 2
    outputs = ["A", "D", "C", "B", "A", "D", "C", "C"]
    scored = metrics.circular_accuracy(outputs, letters, [0] * 4 + [1] * 4)
    assert scored == (50.0, [100.0, 0.0])


def test_a_rotation_that_is_wrong_first_or_in_between_counts_too():
    letters = ["A", "D", "C", "B"]
    for wrong in range(4):
        outputs = [("B" if letter == "A" else "A") if n == wrong else letter for n, letter in enumerate(letters)]
        assert metrics.circular_accuracy(outputs, letters, [0] * 4).score == 0.0


def test_a_fifth_option_can_be_right_in_circular_evaluation():
    assert metrics.circular_accuracy(["E", "A"], ["E", "A"], [0, 0], [5, 5]).score == 100.0


def test_a_constant_letter_gets_nothing_in_circular_evaluation():
    assert metrics.circular_accuracy(["A"] * 4, ["A", "B", "C", "D"], [7] * 4).score == 0.0


@pytest.mark.parametrize(
    ("output", "said"),
    [("Yes", "yes"), ("No, there is not.", "no"), ("There is not one. Yes.", "no"), ("nothing", "yes"), ("", "yes")],
)
def test_presence_is_read_as_popes_script_reads_it(output, said):
    assert metrics.parse_presence(output) == said


def test_pope_is_the_mean_of_the_subsets_f1():
    answers = ["yes", "yes", "no", "no"] * 2
    outputs = ["yes", "no", "yes", "no", "yes", "yes", "yes", "no"]
    subsets = ["random"] * 4 + ["popular"] * 4
    scored = metrics.pope_f1(outputs, answers, subsets)
    assert scored.score == pytest.approx(100 * (2 / 4 + 4 / 5) / 2)  # 2TP / (2TP + FP + FN)
    assert len(scored.units) == 8


def test_popes_subsets_weigh_the_same_whatever_their_size():
    answers = ["yes", "no"] + ["yes", "no"] * 3
    outputs = ["no", "no"] + ["yes", "no"] * 3
    assert metrics.pope_f1(outputs, answers, ["random"] * 2 + ["popular"] * 6).score == pytest.approx(50.0)


def test_no_score_is_above_100_by_rounding():
    """Subsets and subtasks of unlike sizes have weights that are no round numbers."""
    for sizes in itertools.product((1, 2, 3, 6, 7), repeat=2):
        groups = [place for place, size in enumerate(sizes) for _ in range(2 * size)]
        pairs = [number // 2 for number in range(len(groups))]
        scored = (
            metrics.pope_f1(["yes"] * len(groups), ["yes"] * len(groups), groups),
            metrics.pair_score([True] * len(groups), pairs, list(map(str, groups))),
        )
        assert all(99.999 < one.score <= 100.0 for one in scored)


def test_popes_units_follow_f1_to_first_order():
    answers = ["yes", "no"] * 200
    outputs = [a if i % 5 else "yes" for i, a in enumerate(answers)]
    subsets = ["random"] * 400
    scored = metrics.pope_f1(outputs, answers, subsets)
    for left_out in (0, 1, 5):  # right yes, right no, wrong yes
        rest = [i for i in range(400) if i != left_out]
        exact = metrics.pope_f1([outputs[i] for i in rest], [answers[i] for i in rest], subsets[1:]).score
        linear = (400 * scored.score - scored.units[left_out]) / 399
        assert linear == pytest.approx(exact, abs=2e-3)


def test_saying_no_to_everything_scores_nothing_on_pope():
    assert metrics.pope_f1(["no", "no"], ["yes", "no"], ["random"] * 2).score == 0.0
    assert metrics.pope_f1(["no"], ["no"], ["random"]).score == 0.0


def test_mme_adds_accuracy_and_accuracy_plus_for_each_subtask():
    answers = ["yes", "no"] * 3
    outputs = ["Yes.", "no", "yes", "yes", "maybe", "No"]
    pairs = [0, 0, 1, 1, 2, 2]
    scored = metrics.mme_score(outputs, answers, pairs, ["count"] * 4 + ["color"] * 2)
    count, color = 75 + 50, 50 + 0  # of 200 each
    assert scored.score == pytest.approx(100 * (count + color) / 400)
    assert sum(scored.units) / 3 == pytest.approx(scored.score)


@pytest.mark.parametrize(("output", "said"), [("yes", "yes"), (" No.", "no"), ("not", "no"), ("red", None), ("", None)])
def test_mme_reads_the_start_of_an_output(output, said):
    assert metrics.parse_yes_no(output) == said


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.choice_accuracy(["A"], ["A", "B"]),
        lambda: metrics.circular_accuracy(["A"], ["A"], [0, 1]),
        lambda: metrics.pope_f1(["yes"], [], ["random"]),
        lambda: metrics.mme_score(["yes"], ["yes"], [0], []),
    ],
)
def test_answers_and_questions_of_different_number_are_refused(call):
    with pytest.raises(ValueError, match="1 outputs cannot answer"):
        call()


def test_nothing_cannot_be_scored():
    with pytest.raises(ValueError, match="no answers to score"):
        metrics.choice_accuracy([], [])
