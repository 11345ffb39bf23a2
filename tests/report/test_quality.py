"""Summary tables: recipes and choices, marks of the best, leads that hold, equal averages, one row for one rule."""

from typing import Any

import pytest

from diffprune.report import render_tables
from diffprune.report.quality import trained_by


def row(method: str, keep: int = 64, retention: float = 90.0, **more: Any) -> dict[str, Any]:
    return {"method": method, "keep": keep, "retention": retention, **more}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (row("diffprune"), "bridge, top-k"),  # of before recipes were recorded
        (row("diffprune-paper"), "paper, top-k"),
        (row("diffprune-paper-throttled"), "paper, none dropped"),
        (row("diffprune", recipe="paper", choice="diverse"), "paper, diverse"),
        (row("diffprune[tau.start=0.25]"), "bridge, top-k"),
        (row("visionselector"), "own"),
        (row("mine", recipe="default", choice="top-k"), "own"),  # a label of a user's own
        (row("divprune"), "-"),
        (row("holov-paper"), "-"),
    ],
)
def test_a_row_says_its_recipe_and_choice(given: dict[str, Any], said: str) -> None:
    assert trained_by(given) == said


def test_the_column_is_there_where_something_was_trained() -> None:
    page = render_tables([row("diffprune", recipe="bridge", choice="top-k"), row("divprune")])
    assert "| method | recipe, choice | keep 64 |" in page and "| diffprune | bridge, top-k | 90.0 |" in page
    assert "| divprune | - | 90.0 |" in page and "by label" not in page
    assert "recipe" not in render_tables([row("divprune"), row("random")])
    assert "Recipe and choice by label" in render_tables([row("diffprune")])


def test_best_and_second_are_marked_where_the_rows_say_so() -> None:
    page = render_tables([row("a", retention=99.0, rank=1), row("b", retention=98.0, rank=2), row("c", retention=97.0)])
    assert "| a | **99.0** |" in page and "| b | _98.0_ |" in page and "| c | 97.0 |" in page


def test_only_leads_that_hold_are_claimed_of_whom_over_whom() -> None:
    lead = {"versus": "diffprune", "lead_ci95": [0.0, 1.0], "ci95": [1.0, 2.0], "ci_over": "questions"}
    page = render_tables(
        [
            row("diffprune"),
            row("far", lead=4.04, lead_p=0.01, lead_holds=True, **lead),
            row("near", lead=0.5, lead_p=0.3, lead_holds=False, **lead),
            row("over", lead=-1.0, lead_p=0.02, lead_holds=True, **lead),
            row("far", 32, lead=9.0, lead_p=0.01, lead_holds=True, **lead),
        ]
    )
    assert "Leads that hold (95 % interval without 0, Holm's correction over 4): " in page
    assert "diffprune is ahead of: at 64 far (4.0); at 32 far (9.0). diffprune is behind: at 64 over (1.0)." in page
    assert "near (" not in page


def test_a_lead_over_one_training_is_said_to_be_of_that_training() -> None:
    lead = {"versus": "diffprune", "lead": 4.0, "lead_ci95": [1.0, 9.0], "lead_p": 0.01, "lead_holds": True}
    ours = row("diffprune", n_seeds=5, ci_over="seeds and questions")
    alone = row("visionselector", n_seeds=1, ci_over="questions", **lead)
    several = row("dynamicvit", n_seeds=3, ci_over="seeds and questions", **lead)
    free = row("divprune", n_seeds=1, ci_over="questions", **lead)
    word = "Of one training alone, so that leads over it or of it say nothing of other seeds: "
    assert f"{word}visionselector." in render_tables([ours, alone, several, free])
    assert word not in render_tables([ours, several, free])
    shipped = [{**ours, "n_seeds": 1, "ci_over": "questions"}, several]
    assert f"{word}diffprune." in render_tables(shipped)
    assert word not in render_tables([shipped[0], row("divprune")])  # no lead is told


def test_intervals_of_before_are_named_and_claim_nothing() -> None:
    old = [row("diffprune", ci95=[89.0, 91.0]), row("far", ci95=[1.0, 2.0], versus="diffprune", lead=9.0)]
    page = render_tables(old)
    assert "Intervals are over questions alone, seeds averaged: no lead is claimed from them." in page
    assert "Leads that hold" not in page
    assert "over questions alone" not in render_tables([row("far", ci95=[1.0, 2.0], ci_over="seeds and questions")])


def test_the_scatter_of_repetitions_and_how_settings_were_found_are_said() -> None:
    rows = [
        row("diffprune", recipe="bridge", tuned="chosen on validation", repeat_std=1.26, repeat_of="2 runs of seed 42"),
        row("visionselector", recipe="default", tuned="one setting of its own"),
    ]
    page = render_tables(rows)
    assert "lie apart (deviation): diffprune at 64 by 1.3 (2 runs of seed 42)." in page
    assert "trained methods: diffprune: chosen on validation; visionselector: one setting of its own." in page
    assert "is not recorded in this file" in render_tables([row("diffprune"), row("visionselector")])
    assert "Settings" not in render_tables([row("diffprune"), row("divprune")])  # no rival was trained


def test_methods_inside_the_model_stand_beside_a_budget_no_larger_than_their_average() -> None:
    ours = [row("diffprune", keep, retention) for keep, retention in ((256, 99.0), (128, 98.0), (64, 97.0))]
    page = render_tables([*ours, row("fastv", 64, 90.0, average=200.0), row("p_mod", 64, 30.0, average=64.0)])
    assert "| fastv | - | - | 90.0 [200.0] |" in page.replace("| - | - | - | 90.0", "| - | - | 90.0")
    assert "| fastv | 90.0 with 200.0, 98.0 with 128 |" in page and "| p_mod | 30.0 with 64.0, 97.0 with 64 |" in page
    assert "At equal average" not in render_tables([row("fastv", average=200.0)])  # nothing to stand beside


def test_two_names_of_one_rule_are_one_row_and_variants_have_names() -> None:
    page = render_tables([row("cls_attention"), row("fastervlm"), row("holov[variant=paper]"), row("holov")])
    assert page.count("fastervlm") == 1 and "cls_attention" not in page
    assert "| holov-paper | 90.0 |" in page and "| holov | 90.0 |" in page
    assert "| fastervlm | 90.0 |" in render_tables([row("cls_attention")])


def test_of_a_lead_over_nearly_all_the_exceptions_are_named() -> None:
    lead = {"versus": "ours", "lead_ci95": [0.0, 1.0], "ci95": [1.0, 2.0], "ci_over": "questions", "lead_p": 0.01}
    far = [row(f"m{place}", lead=float(place), lead_holds=True, **lead) for place in range(1, 9)]
    page = render_tables([row("ours"), *far])
    assert "ours is ahead of: at 64 all 8 others (1.0 to 8.0). ours is behind: none." in page
    near = [row(name, lead=0.1, lead_holds=False, **lead) for name in ("near", "level")]
    assert "ahead of: at 64 all 10 others but near, level (1.0 to 8.0)." in render_tables([row("ours"), *far, *near])
    assert "at 64 m1 (1.0), m2 (2.0)." in render_tables([row("ours"), *far[:2], *near])  # a short list is told


def test_whether_the_smaller_picture_wins_is_said_above_the_table_with_its_tokens_below() -> None:
    lead = {"versus": "downscale", "lead_ci95": [-9.0, -1.0], "lead_p": 0.01, "lead_holds": True, "backbone": "a"}
    rows = [
        row("downscale", 8, 60.0, num_kept=6.25, backbone="a"),
        row("random", 8, 65.0, lead=-5.0, num_kept=8, **lead),
        row("random", 8, 40.0, num_hard=60, backbone="a", tasks="hard"),
    ]
    page = render_tables(rows)
    said = "downscale is ahead of: none. downscale is behind: at 8 random (5.0)."
    assert page.count(said) == 1 and page.index(said) < page.index("| method |")
    assert "Tokens of a smaller picture of a: 6.2 at 8 (others 8.0)." in page
    assert "Hard questions of a: 60 at 8." in page and page.count("Hard questions") == 1


def test_both_rules_of_positions_are_rows_of_a_method_the_full_model_packed_among_them() -> None:
    lead = {"versus": "original", "lead": 20.0, "lead_ci95": [18.0, 22.0], "lead_p": 0.01, "lead_holds": True}
    page = render_tables(
        [
            row("full", 1.0, 100.0, positions="original"),
            row("full", 1.0, 80.0, positions="packed", **lead),
            row("random", 64, 90.0, positions="original"),
            row("random", 64, 70.0, positions="packed", **lead),
        ]
    )
    assert "| method | positions | keep 1.0 | keep 64 |" in page and "| full | packed | 80.0 | - |" in page
    assert "| random | original | - | 90.0 |" in page and "| full | original" not in page
    assert (
        "Holm's correction over the budgets of each method): original positions are ahead of: at 1.0 full (20.0)"
        in page
    )


def test_both_precisions_are_rows_of_a_method_and_what_they_do_to_the_first_token_is_said() -> None:
    lead = {"versus": "model", "lead": 0.2, "lead_ci95": [0.1, 0.3], "lead_p": 0.01, "lead_holds": True}
    page = render_tables(
        [
            row("full", 1.0, 100.0, precision="model", first_token_kl=0.0),
            row("full", 1.0, 99.8, precision="fp8", first_token_kl=0.0012, **lead),
            row("random", 64, 90.0, precision="model", first_token_kl=0.5),
            row("random", 64, 89.8, precision="fp8", first_token_kl=0.51, **lead),
        ]
    )
    assert "| method | precision | keep 1.0 | keep 64 |" in page and "| random | fp8 | - | 89.8 |" in page
    assert "the model's own precision is ahead of: at 1.0 full (0.2); at 64 random (0.2)." in page
    assert "own precision: full at 1.0 fp8 0.0012; random at 64 model 0.5, fp8 0.51." in page


def test_leads_of_several_models_are_told_model_by_model() -> None:
    lead = {"versus": "ours", "lead_ci95": [1.0, 9.0], "lead_p": 0.01, "lead_holds": True}
    rows = [row("ours", backbone=name) for name in "ab"] + [row("m", lead=5.0, backbone=name, **lead) for name in "ab"]
    page = render_tables(rows)
    assert "a: Leads that hold" in page and "b: Leads that hold" in page
