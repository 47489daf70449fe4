"""Runs a module of this package in a process without torch: `python without_torch.py MODULE WORDS...`.

It calls `main(*WORDS)` of the module. Empty packages stand in for meshfeed's own, whose `__init__` would
import torch: encoding has no use for it, and it does not fit under a limit on memory.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def command(module: str, *words: str) -> list[str]:
    """The command line that calls `main(*words)` of a module."""
    return [sys.executable, __file__, module, *words]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are not top-level ones
    root = Path(__file__).resolve().parents[1]
    for name in ("meshfeed", "meshfeed.store", "meshfeed.formats", "meshfeed.prepare"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    importlib.import_module(sys.argv[1]).main(*sys.argv[2:])
