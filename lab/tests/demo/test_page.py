"""The page: what it says without a browser, and what it does in one."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diffprune_lab.demo import page, words
from diffprune_lab.demo.story import BUDGETS
from tests.browser import Browser, find_browser


class Structure(HTMLParser):
    """Ids, addresses of anything that is fetched, and whether every element is closed."""

    VOID = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        self.fetched += [value for key in ("src", "href", "srcset") if (value := found.get(key))]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass  # closed by itself

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(demo) -> None:
    text = (demo.folder / "index.html").read_text(encoding="utf-8")
    structure = Structure(text)
    assert structure.open == [] and "{{" not in text
    assert {"pictures", "quality", "training", "cost", "next", "cards"} <= structure.ids
    assert all(address.startswith("data:") for address in structure.fetched)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None and "url(" not in style[1] and "@import" not in style[1]


def test_the_numbers_on_the_page_are_those_of_the_rows(demo) -> None:
    text = (demo.folder / "index.html").read_text(encoding="utf-8")
    table = re.search(r'<table class="data" id="retention">.*?</table>', text, re.DOTALL)
    assert table is not None
    for row in demo.story.rows:
        if "retention" in row and row["method"] != "full":
            low, high = row["ci95"]
            assert f"{row['retention']:.1f}<small>{low:.1f} to {high:.1f}</small>" in table[0]
    assert text.count("<tr") >= 7 * (1 + len(BUDGETS))


def test_what_the_script_is_given_cannot_end_the_script(demo) -> None:
    text = page.render_page(demo.story, Path("</script><b>"))
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    assert json.loads(block[1])["budgets"] == list(BUDGETS)
    assert "<b>" not in text


def test_the_section_of_the_larger_model_is_there_only_with_its_pictures(demo) -> None:
    import dataclasses

    without = dataclasses.replace(demo.story, larger=[])
    assert 'id="larger"' not in page.render_page(without, Path("out"))
    kept = {"diffprune": demo.story.examples[0].kept["diffprune"]}
    said = {"diffprune": demo.story.examples[0].said["diffprune"]}
    larger = [dataclasses.replace(demo.story.examples[0], kept=kept, said=said)]
    text = page.render_page(dataclasses.replace(demo.story, larger=larger), Path("out"))
    assert 'id="larger"' in text and len(Structure(text).open) == 0


def test_the_page_works_in_a_browser(demo, tmp_path: Path) -> None:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed: the page was not opened (apt-get install chromium)")
    address = (demo.folder / "index.html").as_uri()
    kept = {
        (method, keep): [list(example.kept[method][keep]) for example in demo.story.examples]
        for method in demo.story.examples[0].kept
        for keep in BUDGETS
    }
    with Browser(executable, tmp_path / "profile") as browser:
        browser.open(address)
        assert browser.evaluate("document.querySelectorAll('#cards .card').length") == len(demo.story.examples)
        for method, keep in (("diffprune", 16), ("random", 16), ("random", 8), ("oracle", 32)):  # 16 is the start
            for value in (method, str(keep)):
                browser.evaluate(f"document.querySelector('.switch [data-value=\"{value}\"]').click()")
            assert lit(browser) == kept[method, keep]
            assert pressed(browser) == [str(keep), method]
            assert f"{keep} of" in browser.evaluate("document.getElementById('readout').textContent")
            shown = browser.evaluate("[...document.querySelectorAll('[data-budget]')].filter(n => !n.hidden).length")
            assert shown == 1
        browser.evaluate("document.querySelector('.switch [data-value=full]').click()")
        assert all(len(tokens) == demo.story.num_visual for tokens in lit(browser))
        browser.evaluate("document.querySelector('.answers tr[data-method=gumbel_ste]').click()")
        assert pressed(browser)[1] == "gumbel_ste"
        marks = "[...document.querySelectorAll('.answers span')].map(n => n.className)"
        assert set(browser.evaluate(marks)) == {"right", "wrong"}
        pictures = "Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))"
        assert browser.evaluate(pictures) == [192] * len(demo.story.examples)
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.evaluate(wide)

        browser.open("about:blank")
        browser.open(f"{address}#budget=8&method=oracle")
        assert pressed(browser) == ["8", "oracle"] and lit(browser) == kept["oracle", 8]
        browser.open("about:blank")
        browser.open(f"{address}#budget=999&method=nothing")
        assert pressed(browser) == ["16", "diffprune"]
        assert browser.errors == []
        asked = [url for url in browser.requests if not url.startswith(("data:", "about:"))]
        assert {url.split("#")[0] for url in asked} == {address}


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_page_is_readable_on_a_desk_and_on_a_phone(
    width: int, height: int, demo, tmp_path: Path, root: Path
) -> None:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed: the page was not opened (apt-get install chromium)")
    with Browser(executable, tmp_path / "profile") as browser:
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        browser.open((demo.folder / "index.html").as_uri())
        kept = root / "out" / "test-artefacts"  # to be looked at
        kept.mkdir(parents=True, exist_ok=True)
        (kept / f"demo-{width}.png").write_bytes(browser.picture())
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        scrolled = """[...document.querySelectorAll('figure, .scroll, pre')].filter(node => node.checkVisibility()
            && node.scrollWidth > node.clientWidth).map(node => node.innerText.slice(0, 60))"""
        assert browser.evaluate(scrolled) == []  # plots, tables and commands are seen whole
        smallest = """Math.min(...[...document.querySelectorAll('body *')].filter(node => node.checkVisibility()
            && [...node.childNodes].some(child => child.nodeType == 3 && child.textContent.trim())).map(node =>
            parseFloat(getComputedStyle(node).fontSize) * (node.getScreenCTM ? node.getScreenCTM().a : 1)))"""
        assert browser.evaluate(smallest) >= 10  # pixels, also of the text inside plots
        assert browser.errors == []


def test_the_headline_is_what_the_tile_below_it_says(demo) -> None:
    rows = [
        {"method": name, "keep": keep, "retention": value, "ci95": [value - 1, value + 1], "unchanged": 0.9}
        for name, values in (("diffprune", (99.62, 99.1, 97.0)), ("gots", (99.9, 99.8, 98.96)))
        for keep, value in zip(BUDGETS, values, strict=True)
    ]
    story = replace(demo.story, rows=[{"method": "full", "keep": 1.0, "retention": 100.0}, *rows])
    assert "16 of" in words.headline(story) and "keep 99.1 % of the score" in words.headline(story)
    assert "99.1 % <small>" in words.facts(story) and "99.6 % <small>" in words.facts(story)  # 99.6 is not 100
    assert "GOTS, which learns nothing, keeps 99.8 %" in words.lead(story)
    weak = [row | {"retention": 80.0} for row in story.rows]
    assert "16 of" in words.headline(replace(story, rows=weak)) and "80.0 %" in words.headline(
        replace(story, rows=weak)
    )


def test_the_page_says_how_to_go_on_from_a_shell_that_does_not_know_diffprune(demo, monkeypatch) -> None:
    monkeypatch.setattr(words.shutil, "which", lambda name: None)
    monkeypatch.setattr(words.sys, "executable", str(Path.cwd() / ".venv" / "bin" / "python"))
    assert words.ask_command(demo.story, Path("out")).startswith(".venv/bin/diffprune ask --pruner out/pruner --image")
    monkeypatch.setattr(words.shutil, "which", lambda name: "/usr/bin/diffprune")
    assert words.ask_command(demo.story, Path("out")).startswith("diffprune ask ")


def pressed(browser: Browser) -> list[str]:
    return browser.evaluate("[...document.querySelectorAll('[aria-pressed=true]')].map(b => b.dataset.value)")


def lit(browser: Browser) -> list[list[int]]:
    """The tokens of each picture that no rectangle covers, found by asking the browser what is painted there."""
    return browser.evaluate(
        """[...document.querySelectorAll('#cards .picture svg')].map(svg => {
            const {width, height} = svg.viewBox.baseVal, path = svg.querySelector('path'), lit = [];
            for (let row = 0; row < height; row++) for (let column = 0; column < width; column++)
                if (!path.isPointInFill(new DOMPoint(column + .5, row + .5))) lit.push(row * width + column);
            return lit;
        })"""
    )
