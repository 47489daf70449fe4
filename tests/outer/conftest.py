"""Workers of `prepare` that start at once."""

from __future__ import annotations

import os

import pytest

import quick
from meshfeed.prepare.engines import local
from meshfeed.prepare.without_torch import command


@pytest.fixture(autouse=True)
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks, where several processes run the tests: a Python of their own takes a second of a core to start."""
    if quick.SHARED in os.environ:
        monkeypatch.setattr(local, "command", lambda *words: [quick.python(), *command(*words)[1:]])


@pytest.fixture
def real_workers(monkeypatch: pytest.MonkeyPatch, quick_workers: None) -> None:
    """Workers are children, which have the limits of who began them."""
    monkeypatch.setattr(local, "command", command)
