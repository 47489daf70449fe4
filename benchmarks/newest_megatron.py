"""The schedulers of Megatron-LM's dev branch, which no published megatron-core has, out of a checkout.

    git clone --branch dev https://github.com/NVIDIA/Megatron-LM folder/Megatron-LM-dev
    FRAMEWORK_SOURCES=folder python benchmarks/bench_planner.py

The branch imports what runs only beside a GPU. Its schedulers use none of that, so their two files are loaded
alone, and whatever else of Megatron they import is a mock.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


def checkout() -> Path | None:
    """Where the branch is, if it is in FRAMEWORK_SOURCES."""
    folder = Path(os.environ.get("FRAMEWORK_SOURCES", ""), "Megatron-LM-dev").resolve()
    return folder if "FRAMEWORK_SOURCES" in os.environ and folder.is_dir() else None


def schedule_module(folder: Path) -> ModuleType:
    """megatron.core.datasets.data_schedule of a checkout; leaves the installed megatron-core importable."""
    installed = _forget_megatron()
    sys.meta_path.insert(0, mocks := _Mocks())
    try:
        for name in ("data_schedule_utils", "data_schedule"):
            full = f"megatron.core.datasets.{name}"
            spec = importlib.util.spec_from_file_location(full, folder / f"{full.replace('.', '/')}.py")
            assert spec is not None and spec.loader is not None
            module = sys.modules[full] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return module
    finally:
        sys.meta_path.remove(mocks)
        _forget_megatron()
        sys.modules.update(installed)


def _forget_megatron() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    return {name: sys.modules.pop(name) for name in names}


class _Mocks(MetaPathFinder, Loader):
    """Whatever of Megatron is imported."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "megatron" else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: a mock is complete."""
