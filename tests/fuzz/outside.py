"""What comes from outside: pictures, files and command lines, mutated; a refusal is one sentence, never a crash."""

import contextlib
import io
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from PIL import Image

from diffprune.backbones.processors import open_image
from diffprune.cli.main import _run
from diffprune.config import load_config
from diffprune.results import read_results, write_results
from diffprune.saving import load_pruner
from diffprune.train.checkpointing import load_latest
from tests import tiny
from tests.contracts.vlm import pruned

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
MODES = ("RGB", "L", "RGBA", "P", "1", "CMYK", "I;16", "F", "LA", "I")
ODD = (
    b"\x00",
    b"\xff\xff\xff\xff",
    b"{",
    b"]",
    b'"',
    b"\n",
    b"1e999",
    b"null",
    b"-1",
    b"NaN",
    b"\xed\xa0\x80",
    b"&a *a",
)


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Some bytes flipped, cut, repeated or put in."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(max(1, len(data)))
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place : place + rng.randint(1, 40)]
        elif kind == 2:
            data[place:place] = data[place : place + rng.randint(1, 40)]
        elif kind == 3:
            data[place:place] = rng.choice(ODD)
        else:
            del data[place:]
    return bytes(data)


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


@cache
def samples() -> dict[str, tuple[str, bytes]]:
    """A whole file of each kind that is read, by name."""
    with folder() as disk:
        pruned("llava", "diffprune", keep=4).save_pretrained(disk / "pruner", base_id="some/base")
        rows = [{"method": "full", "keep": 1.0, "seed": 0, "task": "scenes/sign", "score": 50.0, "full_score": 50.0}]
        write_results(disk / "x.json", name="x", rows=rows, seeds=[0], notes="")
        found = {
            "config": ("run.yaml", Path("configs/llava/diffprune_k64.yaml").read_bytes()),
            "results": ("x.json", (disk / "x.json").read_bytes()),
        }
        for path in sorted((disk / "pruner").iterdir()):
            found[f"pruner:{path.name}"] = (path.name, path.read_bytes())
        return found


def files(rng: random.Random) -> None:
    """A config, a results file or a saved pruner, mutated: read, or refused by name."""
    kind = rng.choice(list(samples()))
    name, content = samples()[kind]
    with folder() as disk:
        if kind.startswith("pruner:"):
            for other, (file, whole) in samples().items():
                if other.startswith("pruner:"):
                    (disk / file).write_bytes(whole)
        (disk / name).write_bytes(mutated(rng, content))
        if kind == "config":
            refused_in_words(lambda: load_config(disk / name), naming="")
        elif kind == "results":
            refused_in_words(lambda: read_results(disk / name), naming=name)
        else:
            refused_in_words(lambda: load_pruner(disk), naming="")


def checkpoints(rng: random.Random) -> None:
    """A folder of checkpoints with one mutated state: the older one, or none, and never a crash."""
    with folder() as disk:
        for step in (1, 2):
            path = disk / f"checkpoint-{step:06d}"
            path.mkdir()
            (path / "state.json").write_bytes(
                mutated(rng, json.dumps({"state": {"step": step}, "digests": {}}).encode())
            )
        load_latest(disk)


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


CAMPAIGNS = {"pictures": pictures, "files": files, "checkpoints": checkpoints, "commands": command_lines}
