"""The study of choices: what it lists, and what it calls the best."""

import pytest

from diffprune.methods.options import parse_method
from diffprune.registry import METHODS
from diffprune_lab.studies import choice


def test_every_setting_and_every_rival_is_a_method_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    choice.main(["--list", "grid"])
    settings = capsys.readouterr().out.split()
    assert settings[0] == "diffprune" and len(set(settings)) == len(settings) > 8
    assert {parse_method(setting).name for setting in settings[1:]} == {"diffprune-diverse"}
    choice.main(["--list", "rivals"])
    rivals = capsys.readouterr().out.split()
    assert {"gots", "divprune", "mmtok", "random"} <= set(rivals) and "full" not in rivals
    assert not any(METHODS.get(name).trained or METHODS.get(name).is_inside for name in rivals)


def test_the_best_choice_is_ours_with_the_highest_mean_over_budgets() -> None:
    scores = {"gots": (99, 99), "diffprune": (98, 80), "diffprune-diverse[beta=1]": (97, 95), "full": (100, 100)}
    rows = [
        {"method": name, "keep": keep, "retention": float(value)}
        for name, values in scores.items()
        for keep, value in zip((16, 8), values, strict=True)
    ]
    assert choice.best_choice(rows) == "diffprune-diverse[beta=1]"
    with pytest.raises(ValueError, match="no choice was measured"):
        choice.best_choice(rows[:2])


def test_a_run_without_a_file_to_write_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        choice.main(["--methods", "gots"])
    assert "--out: name the results file to write" in capsys.readouterr().err
