"""The page in a real browser: upload, ask, move the budget, and nothing leaves the host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.browser import Browser, find_browser
from tests.contracts.vlm import pruned
from tests.serve.running import Running, running

LIT = "[...document.querySelectorAll('#cards .lit')].map(r => [r.getAttribute('x'), r.getAttribute('y')].join())"
CONTRAST = """(() => {
  const rgb = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = (c) => c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (node) => { for (; node; node = node.parentElement) {
    const c = rgb(getComputedStyle(node).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  return [...document.querySelectorAll('body *')].filter(node => node.checkVisibility() && !node.disabled
      && [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())).map(node => {
    const style = getComputedStyle(node), [a, b] = [light(rgb(style.color)), light(behind(node))].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24;
    return [(a + .05) / (b + .05), large ? 3 : 4.5, node.textContent.trim().slice(0, 40)];
  }).filter(([found, wanted]) => found < wanted);
})()"""
NAMED = {"button", "textbox", "slider", "combobox", "listbox", "spinbutton", "link", "image", "img"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(pruned("llava", "divprune", keep=5)) as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed: the page was not opened (apt-get install chromium)")
    with Browser(executable, tmp_path_factory.mktemp("browser") / "profile") as made:
        yield made


def focus(browser: Browser, wanted: str) -> None:
    """Go on with the Tab key until the element of that id has the focus."""
    for _ in range(40):
        if browser.evaluate("document.activeElement.id") == wanted:
            return
        browser.press("Tab")
    raise AssertionError(f"the Tab key does not reach {wanted}")


def test_a_picture_is_uploaded_asked_about_and_pruned_by_the_keyboard_alone(
    server: Running, browser: Browser, tmp_path: Path, root: Path
) -> None:
    tiny.picture(7, (120, 80)).save(tmp_path / "own.png")
    browser.open(f"{server.url}/")
    assert len(browser.wait(f"{LIT}.length === 5 && {LIT}")) == 5  # the server's own budget, on the picture that ships
    before = browser.evaluate("document.querySelector('#cards img').src")

    focus(browser, "file")
    browser.choose_file("#file", tmp_path / "own.png")  # what the system's own dialogue gives
    browser.wait(f"document.querySelector('#cards img').src !== {before!r} && {LIT}.length === 5")
    uploaded = browser.evaluate(LIT)

    focus(browser, "question")
    browser.call("Input.insertText", text="what is it?")
    focus(browser, "keep")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    more = browser.wait(f"{LIT}.length === 7 && {LIT}")
    assert more != uploaded and browser.evaluate("document.getElementById('kept').textContent") == "7 of 16"
    vlm = pruned("llava", "divprune", keep=7)
    (kept,) = vlm.select([tiny.picture(7, (120, 80))])
    wanted = {tuple(round(float(value), 3) for value in kept.boxes[index][:2]) for index in kept.keep.tolist()}
    assert {tuple(round(float(value), 3) for value in place.split(",")) for place in more} == wanted

    focus(browser, "second")
    browser.press("ArrowDown")
    while browser.evaluate("document.getElementById('second').value") != "feature_norm":
        browser.press("ArrowDown")
    browser.wait("document.querySelectorAll('#cards .card').length === 2")
    focus(browser, "ask")
    browser.press("Enter", text="\r")
    browser.wait("document.getElementById('status').textContent === 'answered'")
    said = browser.evaluate("[...document.querySelectorAll('.card')].map(c => c.querySelector('.answer').textContent)")
    asked = browser.evaluate("document.getElementById('question').value")
    assert asked.endswith("what is it?") and len(said) == 3
    answers = {
        method: pruned("llava", method, **({} if method == "full" else {"keep": 7})).generate(
            [tiny.picture(7, (120, 80))], asked, max_new_tokens=64, do_sample=False
        )
        for method in ("full", "divprune", "feature_norm")
    }
    shown = [text.replace("\r", "") for text in said]
    assert shown == [text.replace("\r", "") for text in answers.values()]
    rows = browser.evaluate("[...document.querySelectorAll('#numbers tbody tr')].map(r => r.children[1].textContent)")
    assert rows == ["16 of 16", "7 of 16", "7 of 16"]

    link = browser.evaluate("location.href")
    browser.open("about:blank")
    browser.open(link)
    assert browser.wait(f"{LIT}.length === 14 && {LIT}")[:7] == more  # the view is back, the uploaded picture too
    browser.evaluate("document.querySelector('[data-view=heat]').click()")
    assert browser.wait("document.querySelectorAll('#cards .heat').length") == 16  # divprune ranks nothing
    kept_folder = root / "out" / "test-artefacts"  # to be looked at
    kept_folder.mkdir(parents=True, exist_ok=True)
    (kept_folder / "page.png").write_bytes(browser.picture())
    assert browser.errors == []
    asked_for = [url for url in browser.requests if not url.startswith(("data:", "about:", "blob:"))]
    assert asked_for and all(url.startswith(f"{server.url}/") for url in asked_for)


def test_a_file_that_is_no_picture_is_told_and_not_shown(server: Running, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"nothing")
    browser.open(f"{server.url}/")
    browser.wait(f"{LIT}.length === 5")
    browser.choose_file("#file", tmp_path / "bad.png")
    browser.wait("document.getElementById('status').textContent.startsWith('the data URL of the image')")
    assert browser.evaluate("document.querySelectorAll('.card').length") == 0
    browser.evaluate("document.querySelector('#examples button').click()")
    browser.wait(f"{LIT}.length === 5")
    assert browser.evaluate("document.getElementById('file').value") == ""  # so that the same file can be chosen again
    assert browser.evaluate("document.getElementById('status').textContent") == ""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_names_contrast_and_width(server: Running, browser: Browser, width: int, scheme: str) -> None:
    browser.errors.clear()
    browser.open("about:blank")
    size: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(f"{server.url}/")
    browser.wait(f"{LIT}.length === 5")
    browser.evaluate("document.getElementById('ask').click()")
    browser.wait("document.getElementById('status').textContent === 'answered'")
    assert browser.evaluate(CONTRAST) == []
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [
        (node["role"]["value"].lower(), node.get("name", {}).get("value", ""))
        for node in nodes
        if not node.get("ignored")
    ]
    assert {role for role, _ in roles} >= {"button", "slider", "combobox", "textbox"}
    assert [role for role, name in roles if role in NAMED and not name] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.errors == []


@pytest.mark.slow
def test_a_token_is_asked_for_on_the_page(browser: Browser) -> None:
    with running(pruned("llava", "divprune", keep=5), token="secret") as server:
        browser.open(f"{server.url}/")
        browser.wait("!document.getElementById('gate').hidden")
        focus(browser, "token")
        browser.call("Input.insertText", text="secret")
        browser.press("Tab")
        browser.wait(f"{LIT}.length === 5")
