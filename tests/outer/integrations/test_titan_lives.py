"""Lives of torchtitan's own Trainer: however it ends and under whatever mesh it goes on, each optimizer step is the recipe's.

Of releases alone: the main branch trains lines of tokens, see test_torchtitan_trainer.py.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import loops
import world
from soak import SEED, SOAK, cases

LIVES = 10
"""Of one world: each leaves some twenty threads of the trainer's process groups behind."""


def lived(rank: int, *given: Any) -> list[Any]:
    import titan_lives  # it changes what it imports: for ranks alone

    return titan_lives.lived(*given)


def life_after_life(corpus: str, folder: Path, size: int, seeds: list[tuple[int, ...]], kill: bool) -> int:
    """A world goes on with each life. Returns how many optimizer steps it compared, 0 if it was killed."""
    outcomes = world.start(lived, size, corpus, folder, seeds, kill).join(after_failure_s=120)
    wrong = [each.trace for each in outcomes if each.error and each.error[0] == "AssertionError"]
    assert not wrong, wrong[0]
    if kill and any(each.exitcode == -signal.SIGKILL for each in outcomes):
        return 0
    failed = [each.trace for each in outcomes if each.error]
    assert not failed, "\n".join(failed)
    return sum(steps for _, _, steps in outcomes[0].result)


@pytest.mark.timeout(7_000)
def test_each_step_of_a_life_is_the_recipes(tmp_path: Path) -> None:
    corpus, compared = loops.write(tmp_path / "text"), 0
    for first in range(0, cases(3, 300), LIVES):
        folder, lives = tmp_path / str(first), range(first, min(first + LIVES, cases(3, 300)))
        for at, size in enumerate((4, 1, 2, 4, 2) if SOAK else (2,)):
            seeds = [(SEED, life, at) for life in lives]
            compared += life_after_life(corpus, folder, size, seeds, kill=bool(at % 2))
    assert compared
