"""The pages of both packages together: what the code says of itself, and every command they show."""

from diffprune.cli.main import subcommands
from tools import check_docs, make_catalogue


def test_the_catalogue_is_what_the_code_says():
    for path, text in make_catalogue.pages().items():
        assert path.read_text() == text, "run make docs"


def test_every_command_of_a_page_is_there():
    for page in check_docs.documents():
        assert check_docs.find_unknown_commands(page, subcommands()) == []
