"""Runs a module of this package in a process without torch: `python without_torch.py MODULE WORDS...`.

It calls `main(*WORDS)` of the module. Empty packages stand in for meshfeed's own, whose `__init__` would
import torch: encoding has no use for it, and it does not fit under a limit on memory. A tokenizer of another
package may ask one of them for more than its modules; then it becomes the real one.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


def command(module: str, *words: str) -> list[str]:
    """The command line that calls `main(*words)` of a module."""
    return [sys.executable, __file__, module, *words]


class _Package(ModuleType):
    """A package without its `__init__`, which runs when something of it is missing."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.__path__, self._is_whole = [str(folder)], False

    def __getattr__(self, name: str) -> Any:
        if self._is_whole or name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        self._is_whole = True
        SourceFileLoader(self.__name__, str(Path(self.__path__[0], "__init__.py"))).exec_module(self)
        return getattr(self, name)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are not top-level ones
    root = Path(__file__).resolve().parents[1]
    for name in ("meshfeed", "meshfeed.store", "meshfeed.formats", "meshfeed.prepare"):
        sys.modules[name] = _Package(name, root.joinpath(*name.split(".")[1:]))
    importlib.import_module(sys.argv[1]).main(*sys.argv[2:])
