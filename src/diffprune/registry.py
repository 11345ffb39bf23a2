"""One small registry: a file's name is its key, so a new method or backbone is one new file and nothing else."""

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T", bound=type)


class Registry(Generic[T]):
    """Classes by name, found in the files of one package and in folders of the user's own.

    Files are imported when a name is first asked for. A file registers the class under its own name and may add
    variants (`diffprune-scale`) beside it.
    """

    def __init__(self, package: str, kind: str) -> None:
        self.package = package
        self.kind = kind
        self._found: dict[str, T] = {}
        self._imported = False

    def register(self, *names: str) -> Callable[[T], T]:
        """Class decorator: makes the class known under each name."""

        def add(item: T) -> T:
            for name in names:
                known = self._found.get(name)
                if known is not None and (known.__module__, known.__qualname__) != (item.__module__, item.__qualname__):
                    raise ValueError(
                        f"{self.kind} {name!r} is registered twice, by {known.__module__} and by {item.__module__}; "
                        "rename one of them"
                    )
                self._found[name] = item
            return item

        return add

    def add_folder(self, folder: str | Path) -> list[str]:
        """Import every Python file of a folder, so that what it registers is known; returns the new names."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give the folder that holds your {self.kind} files")
        before = set(self._found)
        for path in sorted(folder.glob("*.py")):
            module_name = f"diffprune_{self.kind}_{path.stem}"
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
        return sorted(set(self._found) - before)

    def names(self) -> list[str]:
        """Every known name, sorted."""
        self._import_all()
        return sorted(self._found)

    def get(self, name: str) -> T:
        """The class of that name; a wrong name is answered with the near ones."""
        if name not in self._found:
            self._import_all()
        if name not in self._found:
            near = difflib.get_close_matches(name, self._found, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(self.names())}"
            raise ValueError(f"unknown {self.kind} {name!r}; {hint}")
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        self._import_all()
        return name in self._found

    def _import_all(self) -> None:
        if self._imported:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.startswith("_"):  # shared parts of several
                continue
            importlib.import_module(f"{self.package}.{module.name}")
        self._imported = True


METHODS: Registry[type] = Registry("diffprune.methods", "method")
BACKBONES: Registry[type] = Registry("diffprune.backbones", "backbone")
