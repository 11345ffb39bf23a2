"""The pages of both packages together: what the code says of itself, and every command they show."""

from diffprune.cli.main import subcommands
from tools import check_docs, make_catalogue, make_screens


def test_the_catalogue_is_what_the_code_says():
    for path, text in make_catalogue.pages().items():
        assert path.read_text() == text, "run make docs"


def test_a_new_method_s_page_is_linked_in_the_run_that_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(make_catalogue, "DOCS", tmp_path)
    (tmp_path / "methods").mkdir()
    for name in ("divprune", "diffprune-diverse"):
        page = make_catalogue.page_of(name)
        assert not page.exists() and make_catalogue.linked_name(name) == f"[`{name}`](methods/{page.name})"


def test_the_screen_of_a_plan_is_what_plan_prints():
    plan = make_screens.SCREENS[0]  # of the screens the one whose numbers are no measurement
    assert make_screens.screen(plan, "no folder") in make_screens.PAGE.read_text(), "run python tools/make_screens.py"


def test_every_command_of_a_page_is_there():
    for page in check_docs.documents():
        assert check_docs.find_unknown_commands(page, subcommands()) == []
