"""Workers of `prepare` that start at once."""

from __future__ import annotations

import pytest

import quick
from meshfeed.prepare.engines import local
from meshfeed.prepare.without_torch import command


@pytest.fixture(autouse=True)
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, which are processes of their own, call quick.workers themselves."""
    quick.workers(monkeypatch)


@pytest.fixture
def real_workers(monkeypatch: pytest.MonkeyPatch, quick_workers: None) -> None:
    """Workers are children, which have the limits of who began them."""
    monkeypatch.setattr(local, "command", command)
