"""One small registry: a file's name is its key, so a new method or backbone is one new file and nothing else."""

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from diffprune import doors
from diffprune.json_files import short

T = TypeVar("T", bound=type)
_REGISTERED = re.compile(
    r"\bregister\(([^()]*)\)"
)  # the names that a file gives its classes, as they stand in its text

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


class Registry(Generic[T]):
    """Classes by name, found in the files of one package, behind a door for other packages, and in a user's own files.

    One name imports one file: that of its name, else the one whose text declares it. Files whose name starts with an
    underscore, and those named as not holding any class, are no entries.

    Args:
        package: Whose files hold the classes.
        kind: What a class is, for messages.
        door: The entry-point group by which other packages add theirs.
        shared: Files of the package that hold what the others share.
    """

    def __init__(self, package: str, kind: str, *, door: str, shared: frozenset[str] = frozenset()) -> None:
        self.package = package
        self.kind = kind
        self.door = door
        self.shared = shared
        self._found: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Class decorator: makes the class known under each name."""

        def add(item: T) -> T:
            for name in names:
                self._add(name, item)
            return item

        return add

    def _add(self, name: str, item: T) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(item, type):
            raise ValueError(
                f"{short(item)} cannot be registered as {self.kind} {short(name)}; decorate a class, and name it by "
                "letters, digits, _, - and ."
            )
        if not item.__module__.startswith(f"{self.package}.") and name in self._homes:
            self.get(name)  # of the library, whose name nobody else takes, imported before or not
        known = self._found.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (item.__module__, item.__qualname__):
            raise ValueError(
                f"{self.kind} {name!r} is registered twice, by {known.__module__} and by {item.__module__}; "
                "rename one of them"
            )
        self._found[name] = item

    def names(self) -> list[str]:
        """Every known name, sorted."""
        self._import_all()
        return sorted(self._found)

    def get(self, name: str) -> T:
        """The class of that name; a wrong name is answered with the near ones."""
        if not isinstance(name, str):
            raise ValueError(f"{short(name)} is no name of a {self.kind}; give a text")
        if name not in self:
            raise self._unknown(name, self.names())
        return self._found[name]

    def check(self, name: str, also: Iterable[str] = ()) -> None:
        """A `ValueError` for a name that nobody declares, without importing anything (`declared`).

        Args:
            also: Further names that are fine here.
        """
        known = {*self.known(), *also}
        if name not in known:
            raise self._unknown(name, sorted(known))

    def known(self) -> list[str]:
        """Every name that is declared or was registered, sorted; nothing is imported."""
        return sorted({*self._found, *self.declared})

    @cached_property
    def declared(self) -> frozenset[str]:
        """Names that files and entry points declare, read as text; nothing is imported."""
        return frozenset({*doors.entries(self.door), *self._homes})

    @cached_property
    def _homes(self) -> dict[str, str]:
        """The file that declares each name, by its text."""
        homes: dict[str, str] = {}
        for folder in importlib.import_module(self.package).__path__:
            for file in sorted(self._files):
                path = Path(folder, f"{file}.py")
                for given in _REGISTERED.findall(path.read_text(encoding="utf-8")) if path.is_file() else ():
                    homes.update(dict.fromkeys(re.findall(r"[\"']([^\"']+)[\"']", given), file))
        return homes

    def _unknown(self, name: str, known: list[str]) -> ValueError:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        return ValueError(f"unknown {self.kind} {short(name)}; {hint}")

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self._found:
            self._import_one(name)
        if name not in self._found:  # a name that no file declares by its text
            self._import_all()
        return name in self._found

    @cached_property
    def _files(self) -> frozenset[str]:
        folder = importlib.import_module(self.package).__path__
        names = {module.name for module in pkgutil.iter_modules(folder)}
        return frozenset(name for name in names - self.shared if not name.startswith("_"))

    def _import_one(self, name: str) -> None:
        home = name if name in self._files else self._homes.get(name)
        if home is not None:
            importlib.import_module(f"{self.package}.{home}")
        elif name in doors.entries(self.door):
            self._open(name)

    def _open(self, name: str) -> None:
        item = doors.load(self.door, name)
        if item is not None:
            self._add(name, item)

    def _import_all(self) -> None:
        for name in sorted(self._files):
            importlib.import_module(f"{self.package}.{name}")
        for name in doors.entries(self.door):
            self._open(name)


METHODS: Registry[type] = Registry(
    "diffprune.methods", "method", door=doors.METHODS, shared=frozenset({"base", "naming", "options"})
)
BACKBONES: Registry[type] = Registry(
    "diffprune.backbones",
    "backbone",
    door=doors.BACKBONES,
    shared=frozenset({"base", "prompts", "splice", "processors", "tiles"}),
)
register = METHODS.register  # public as `dp.register`: a pruning method of one's own
