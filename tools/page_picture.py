"""Writes docs/img/page.png: the page of `diffprune app` on the embedded model, as a browser shows it.

    python -m tools.page_picture

Needs the lab and a Chromium. The table of times is left out: times are of the machine that draws this.
"""

import io
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import Browser, find_browser

OUT = Path(__file__).resolve().parent.parent / "docs" / "img" / "page.png"
VIEW = "#method=diffprune&second=divprune&keep=32&question=Which+word+does+the+sign+show%3F"
COMMAND = "diffprune_lab app --no-open --port 0 --pruner scenes-llava-diffprune --keep 32"


def main() -> None:
    executable = find_browser()
    if executable is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    server = subprocess.Popen([sys.executable, "-m", *COMMAND.split()], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next(found[1] for line in server.stderr if (found := re.search(r"served at (http://\S+)/v1", line)))
    with tempfile.TemporaryDirectory() as profile, Browser(executable, Path(profile)) as browser:
        size = {"width": 1120, "height": 840, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **size)
        browser.open(f"{url}/{VIEW}")
        browser.wait("document.querySelectorAll('#cards .lit').length === 64")
        browser.evaluate("document.getElementById('ask').click()")
        browser.wait("document.getElementById('status').textContent === 'answered'")
        browser.evaluate("document.querySelectorAll('footer, #numbers').forEach(node => { node.hidden = true; })")
        shown = Image.open(io.BytesIO(browser.picture())).convert("RGB").quantize(128)
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    shown.save(OUT, optimize=True)
    print(f"wrote {OUT}, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
