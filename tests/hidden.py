"""Importing an oracle without the clients of every cloud that it would bring."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (Exception,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, unused: frozenset[str]) -> None:
        self.unused = unused

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.unused:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


@contextlib.contextmanager
def hidden(packages: Iterable[str]) -> Iterator[None]:
    """While entered, these packages are empty for whoever imports them first."""
    before = set(sys.modules)
    finder = _Finder(frozenset(packages))
    found = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in finder.unused
    }
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in finder.unused:
                del sys.modules[name]
        sys.modules.update(found)
