"""What comes from outside: pictures, files and command lines, mutated; a refusal is one sentence, never a crash."""

import contextlib
import io
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from diffprune.backbones.processors import open_image
from diffprune.cli.main import _run
from tests import tiny
from tests.fuzz.odd_files import KINDS, mutated, try_one

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
MODES = ("RGB", "L", "RGBA", "P", "1", "CMYK", "I;16", "F", "LA", "I")


@contextlib.contextmanager
def folder():
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def refused_in_words(call: Callable[[], object], *, naming: str) -> None:
    """The call works, or ends in an error that names what it is about in one sentence."""
    try:
        call()
    except (ValueError, OSError) as error:
        text = str(error)
        assert naming in text, f"{type(error).__name__} does not name {naming}: {text[:200]!r}"
        assert len(text) < 1000 and "\n" not in text.strip(), f"no sentence: {text[:200]!r}"


def pictures(rng: random.Random) -> None:
    """A picture of any format, mutated: opened as RGB, or refused by name."""
    mode, kind = rng.choice(MODES), rng.choice(FORMATS)
    image = tiny.picture(rng.randrange(1 << 30), (rng.randint(1, 60), rng.randint(1, 60)))
    buffer = io.BytesIO()
    with contextlib.suppress(OSError, ValueError, KeyError):  # a format that has no such mode
        image.convert("RGB" if mode in ("I;16", "LA") else mode).save(buffer, kind)
    if not buffer.getvalue():
        image.save(buffer, kind)
    content = buffer.getvalue() if rng.random() < 0.1 else mutated(rng, buffer.getvalue())
    with folder() as disk:
        path = disk / f"picture.{kind.lower()}"
        path.write_bytes(content)

        def opened() -> None:
            found = open_image(path)
            assert isinstance(found, Image.Image) and found.mode == "RGB" and min(found.size) >= 1

        refused_in_words(opened, naming=path.name)


def files(rng: random.Random) -> None:
    """A file of any kind that is read, mutated: used, or refused by name."""
    with folder() as disk:
        try_one(rng.choice(list(KINDS)), rng, disk)


WORDS = (
    *("--keep", "0", "-3", "1.5", "nan", "1e400", "64,0.1", "", "--method", "no_such", "divprune", "fastv[layer=x]"),
    *("--image", "/dev/null", "/no/such.png", ".", "--pruner", "/no/such", "none", "--model", "--json", "--out", "/"),
    *("--backbone", "llava-1.5-7b", "--gpu", "h200", "x", "--image=1x1", "--batch", "99999999999999999999", "\ud800"),
    *("--results", "results", "--config", "pyproject.toml", "--help", "\x00", "é" * 300, "--tasks", "--seed", "-1"),
)
COMMANDS = (
    "ask",
    "show",
    "plan",
    "methods",
    "backbones",
    "report",
    "eval",
    "train",
    "profile",
    "doctor",
    "",
    "nothing",
)


def command_lines(rng: random.Random) -> None:
    """A command with odd arguments: any exit code, but nothing unexpected."""
    command = rng.choice(COMMANDS)
    if command in ("profile", "doctor", "train", "eval", "report") and rng.random() < 0.7:
        command = rng.choice(("plan", "ask", "show"))
    words = [rng.choice(WORDS) for _ in range(rng.randint(0, 6))]
    if command in ("profile", "doctor", "train", "eval", "report"):  # never a whole one
        words.append("--no-such-option")
    out, err = io.StringIO(), io.StringIO()
    with folder() as disk, contextlib.chdir(disk), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _run([command, *words])
        assert code in (0, 1, 2), f"exit code {code} of {command} {words}"
        assert "diffprune: unexpected " not in err.getvalue(), f"{command} {words}: {err.getvalue()[:300]}"
        assert "Traceback" not in err.getvalue(), f"{command} {words}: {err.getvalue()[:300]}"


CAMPAIGNS = {"pictures": pictures, "files": files, "commands": command_lines}
