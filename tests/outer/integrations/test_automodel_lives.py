"""Lives of NeMo Automodel's recipe: however it ends and under whatever mesh it goes on, each optimizer step is the recipe's."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import world
from services.needs import checkout
from soak import SEED, SOAK, cases

TOGETHER = 5
"""Lives that one world goes on with, one after the other."""


def lived(rank: int, *given: Any) -> None:
    import automodel_lives  # it changes what it imports: for ranks alone

    automodel_lives.lived(*given)


def write(rank: int, *given: Any) -> None:
    import automodel_lives

    automodel_lives.write(*given)


def life_after_life(place: Path, size: int, seeds: list[tuple[int, ...]], kills: bool) -> None:
    """A world goes on with each life."""
    outcomes = world.start(lived, size, place, seeds, kills).join(after_failure_s=120)
    wrong = [each.trace for each in outcomes if each.error and each.error[0] == "AssertionError"]
    assert not wrong, wrong[0]
    if kills and any(each.exitcode == -signal.SIGKILL for each in outcomes):
        return
    failed = [each.trace for each in outcomes if each.error]
    assert not failed, failed[0]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the corpora, and Automodel's checkout where its modules are looked for."""
    monkeypatch.syspath_prepend(str(checkout("Automodel")))
    world.preload("automodel_lives")
    world.run(write, 1, tmp_path, distributed=False)
    return tmp_path


@pytest.mark.timeout(7_000)
def test_each_step_of_a_life_is_the_recipes(place: Path) -> None:
    num, sizes = cases(4, 300), (1, 2, 4, 2) if SOAK else (2, 4)
    for group, first in enumerate(range(0, num, TOGETHER)):
        lives = range(first, min(first + TOGETHER, num))
        worlds = [sizes[(group + at) % len(sizes)] for at in range(3 if SOAK else 2)]
        for at, size in enumerate(worlds):
            rotated = [*lives[at:], *lives[:at]]  # another one is killed each time
            seeds = [(SEED, life, at) for life in rotated]
            life_after_life(place, size, seeds, kills=at + 1 < len(worlds))
    logs = place.glob("life*/*/training.jsonl")  # with a line of each step that was compared
    assert sum(len(log.read_text().splitlines()) for log in logs) > 2 * num
