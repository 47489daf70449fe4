"""Workers of `prepare` that start at once."""

from __future__ import annotations

import os

import pytest

import quick
from meshfeed.prepare.engines import local
from meshfeed.prepare.without_torch import command


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks, where several processes run the tests: they take less time to start than a Python does."""
    if quick.SHARED in os.environ:
        monkeypatch.setattr(local, "command", lambda *words: [quick.python(), *command(*words)[1:]])
