"""The docs say what the code does: generated tables are up to date, names and links exist, code compiles."""

import json
import re

from diffprune.registry import BACKBONES, METHODS
from diffprune.report import read_folder, refresh_tables, render_page
from tools import check_docs, try_families


def test_the_results_page_and_the_readme_tables_are_what_report_makes(root):
    results = read_folder(root / "results")  # read once: it takes seconds
    assert (root / "docs/results.md").read_text() == render_page(results), "run make docs"
    text = (root / "README.md").read_text()
    assert text == refresh_tables(text, results), "run make docs"


def test_every_public_name_is_in_the_docs():
    pages = [path.read_text() for path in check_docs.documents() if path.parent != check_docs.ROOT]
    assert check_docs.find_unnamed(check_docs.code_in(pages)) == []


def test_every_link_of_a_page_leads_somewhere():
    for page in check_docs.documents():
        assert check_docs.find_dead_links(page) == []


def test_every_method_has_a_page_and_every_page_a_method():
    assert check_docs.find_methods_without_page(check_docs.ROOT / "docs/methods", METHODS.names()) == []


def test_a_method_without_page_and_a_page_without_method_are_found(tmp_path):
    (tmp_path / "diffprune.md").write_text("All methods: [methods.md](../methods.md).\n")
    (tmp_path / "fastervlm.md").write_text("# FasterVLM\n")
    (tmp_path / "gone.md").write_text("All methods: [methods.md](../methods.md).\n")
    found = check_docs.find_methods_without_page(tmp_path, ["diffprune", "diffprune-scale", "cls_attention", "random"])
    assert [line.split(";")[0] for line in found] == [
        "method 'random' has no page",
        f"{tmp_path.name}/fastervlm.md does not link back to ../methods.md",
        f"{tmp_path.name}/gone.md is the page of no method",
    ]


def test_no_file_holds_a_path_of_one_machine():
    assert list(check_docs.find_machine_paths(check_docs.ROOT)) == []


def test_the_python_of_every_page_compiles():
    blocks = [
        (page.name, block)
        for page in check_docs.documents()
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert len(blocks) >= 3
    for name, block in blocks:
        compile(block, name, "exec")


def test_a_name_counts_only_where_it_stands_alone_in_code():
    code = check_docs.code_in(["keep `hard_topk` and `diffprune-scale`", "```\nvlm.select(x)\n```", "soft_topk"])
    assert check_docs.is_named("hard_topk", code) and check_docs.is_named("select", code)
    assert not check_docs.is_named("soft_topk", code) and not check_docs.is_named("diffprune", code)


def test_a_bad_page_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Run `diffprune fly`, see [this](gone.md), and look into " + "/" + "home/somebody/x.\n")
    assert "diffprune fly" in check_docs.find_unknown_commands(page, ["doctor"])[0]
    assert "gone.md" in check_docs.find_dead_links(page)[0]
    assert "page.md:1" in next(check_docs.find_machine_paths(tmp_path))


def test_the_table_of_families_has_every_family_and_every_test_it_names(root):
    shown = json.loads(try_families.OUT.read_text())
    assert sorted(shown) == sorted(name for name in BACKBONES.names() if name != "deit"), "run tools/try_families.py"
    for found in shown.values():
        assert all(found.values()) and set(try_families.COLUMNS) - set(found) <= {"fast path"}
    for place in try_families.COLUMNS.values():
        file, test = place.split("::")
        assert f"def {test}(" in (root / file).read_text(), place
