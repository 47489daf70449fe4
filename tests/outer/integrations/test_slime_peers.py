"""slime's own tests of build_dp_schedule, with meshfeed's in its place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshfeed.integrations import rl
from services.needs import checkout

OTHERS = {
    "test_balance_data_distributes_by_flops": "it pins slime's own assignment; ours is as balanced",
    "test_rejects_when_fewer_rollouts_than_gbs": "it expects an AssertionError; ours is a PlanError",
}


def test_slimes_own_tests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout("slime")
    monkeypatch.syspath_prepend(str(folder))
    schedule = importlib.import_module("slime.utils.dp_schedule")
    monkeypatch.setattr(schedule, "build_dp_schedule", rl.build_dp_schedule)
    monkeypatch.setitem(vars(pytest.mark), "unit", lambda test: test)
    tests = loaded(folder / "tests" / "test_dp_schedule.py")
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert len(names) >= 9 and OTHERS.keys() <= set(names)
    for name in sorted(set(names) - OTHERS.keys()):
        getattr(tests, name)()


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
