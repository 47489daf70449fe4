"""Lives of Megatron-LM's own `pretrain`: however it ends and under whatever layout it goes on, each optimizer step is the
recipe's, and each evaluation goes on where the last one ended.

From a checkout alone, as test_megatron_pretrain_peers.py.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from megatron_world import write_documents

import world
from loops import VOCAB
from services.needs import checkout
from soak import SEED, SOAK, cases


def lived(rank: int, *given: Any) -> list[Any]:
    import pretrain_lives  # it changes what it imports: for ranks alone

    return pretrain_lives.lived(*given)


def life_after_life(
    corpus: str, folder: Path, size: int, seeds: list[tuple[int, ...]], kill: bool
) -> tuple[int, int]:
    """A world goes on with each life. Returns how many optimizer steps and evaluations it compared, 0 if it was killed."""
    outcomes = world.start(lived, size, corpus, folder, seeds, kill).join(after_failure_s=120)
    wrong = [each.trace for each in outcomes if each.error and each.error[0] == "AssertionError"]
    assert not wrong, wrong[0]
    if kill and any(each.exitcode == -signal.SIGKILL for each in outcomes):
        return 0, 0
    failed = [each.trace for each in outcomes if each.error]
    assert not failed, "\n".join(failed)
    return sum(each[2] for each in outcomes[0].result), sum(each[3] for each in outcomes[0].result)


@pytest.mark.timeout(7_000)
def test_each_step_of_a_life_is_the_recipes(tmp_path: Path) -> None:
    checkout("Megatron-LM")
    world.preload("pretrain_world")
    corpus, steps, evaluations = str(write_documents(tmp_path / "text", count=400, vocab=VOCAB)), 0, 0
    for first in range(0, cases(4, 300), 10):
        folder, lives = tmp_path / str(first), range(first, min(first + 10, cases(4, 300)))
        folder.mkdir()
        for at, size in enumerate((4, 2, 1, 2, 4) if SOAK else (4, 2)):
            seeds = [(SEED, life, at) for life in lives]
            compared = life_after_life(corpus, folder, size, seeds, kill=bool(at % 2))
            steps, evaluations = steps + compared[0], evaluations + compared[1]
    assert steps and evaluations
