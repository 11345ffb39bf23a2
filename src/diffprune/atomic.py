"""Files that are there whole or not at all: written beside their place, then put there in one step."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def require_plain(path: str | Path) -> None:
    """A `ValueError` where writing to `path` would replace what is no plain file: a folder, a device, a link."""
    path = Path(path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"cannot write to {path} ({error.strerror}); name another file") from error
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link"}
    kind = kinds.get(stat.S_IFMT(mode), "a device, pipe or socket")
    raise ValueError(f"{path} is {kind} and is not replaced; name a file")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file to write into, beside `path` and with its ending; at the end of the block it takes the place of `path`.

    A reader sees the old file or the new one, never a part of it. Where the block fails, the old one stays.
    """
    path = Path(path)
    require_plain(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    except OSError as error:  # which names the file beside `path`, and nobody asked for that one
        raise type(error)(f"cannot write to {path} ({error.strerror}); name another file") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` in one step."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk, where the system has that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
