"""A trainer of torchtitan's shape owns the loop: killed, and resumed under another mesh."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import loops
import world

STEPS = 7


def trained(
    corpus: str, out: Path, sizes: dict[str, int], *, resume: Path | None = None, kill_after: int = 0
) -> Any:
    """Rows by step, loss by step, validation losses."""
    import torchtitan_loop

    ledger: list[Any] = []
    losses: dict[int, float] = {}

    def watch(step: int, tokens: torch.Tensor, loss: float | None) -> None:
        if loss is not None:
            losses[step] = loss
            return
        ledger.append((step, loops.rows(tokens)))
        if len(ledger) == kill_after:
            world.die_together()

    validated = torchtitan_loop.train(
        corpus, out, sizes, steps=STEPS, vocab=loops.VOCAB, resume=resume, watch=watch
    )
    return ledger, losses, validated


def first(rank: int, corpus: str, out: Path) -> None:
    trained(corpus, out, {"batch": 2, "tp": 2}, kill_after=11)


def second(rank: int, corpus: str, out: Path) -> Any:
    resumed = trained(corpus, out, {"cp": 2}, resume=out / "step-4")
    return resumed, trained(corpus, out.with_name("whole"), {"batch": 2})


def test_killed_and_resumed_under_another_mesh(tmp_path: Path) -> None:
    corpus = loops.write(tmp_path / "text")
    killed = world.start(first, 4, corpus, tmp_path / "out").join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 4, killed
    results = world.run(second, 2, corpus, tmp_path / "out")
    everything: list[Any] = []
    for rank, (resumed, whole) in enumerate(results):
        assert whole[0] == loops.wanted(corpus, range(STEPS), rank, window=32, sequences=8)
        # both cp ranks are given the whole sequences of the one replica
        assert resumed[0] == loops.wanted(corpus, range(4, STEPS), 0, window=32, sequences=8, dp=1)
        assert resumed[1] == pytest.approx({step: whole[1][step] for step in range(4, STEPS)}, rel=1e-12)
        assert resumed[2] == pytest.approx(whole[2][2:], rel=1e-12)
        everything += [(step, row) for step, rows in whole[0] for row in rows]
    again = [(step, row) for step, rows in results[0][0][0] for row in rows]
    assert sorted(again) == sorted(each for each in everything if each[0] >= 4)
