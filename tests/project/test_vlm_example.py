"""examples/train_vlm.py: killed, and gone on under another layout, it learns as one process that nobody disturbed."""

from __future__ import annotations

import json
import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

import meshfeed as mf
import world

STEPS, KILLED = 9, 5
dist: Any = torch.distributed


def train(rank: int, out: str, *more: str, killed: bool = False) -> None:
    from train_vlm import arguments
    from train_vlm import train as train_vlm

    def after(step: mf.Step) -> None:
        if killed and step.index == KILLED:
            dist.FileStore(f"{out}/events", -1).set(f"at{rank}", "1")
            dist.FileStore(f"{out}/never", -1).wait(["killed"], timedelta(seconds=600))

    multiprocessing.current_process().daemon = False  # so that it may have workers
    paths = ["--shapes", f"{out}/shapes", "--out", out, "--checkpoint-every", "4", "--steps", str(STEPS)]
    train_vlm(arguments([*paths, *more]), after)


def losses(out: Path, name: str) -> list[float]:
    lines = (out / f"losses-{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def decoded(out: Path, name: str) -> np.ndarray:
    """Images that all ranks together decoded for each step."""
    ranks = mf.report.read_run(out / f"run-{name}").ranks.values()
    return np.nansum([rank.decoded.parts for rank in ranks if rank.decoded is not None], axis=0)


def test_killed_and_resumed_under_another_layout_it_has_equal_losses(tmp_path: Path) -> None:
    out = str(tmp_path)
    alone = ["--layout", "dp1", "--name", "alone", "--workers", "0"]
    world.run(train, 1, out, *alone)
    job = world.start(
        train,
        8,
        out,
        "--layout",
        "tp2-dp2-pp2",
        "--name",
        "first",
        "--workers",
        "1",
        "--encoder",
        "balanced",
        killed=True,
    )
    dist.FileStore(f"{out}/events", -1).wait([f"at{rank}" for rank in range(8)], timedelta(seconds=600))
    job.kill(range(8))
    assert {outcome.exitcode for outcome in job.join()} == {-9}
    resumed = [
        "--resume",
        f"{out}/checkpoint-000004",
        "--layout",
        "cp2-dp2",
        "--name",
        "second",
        "--workers",
        "0",
    ]
    world.run(train, 4, out, *resumed)
    expected = losses(tmp_path, "alone")
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5, "it learns"
    assert losses(tmp_path, "first") == pytest.approx(expected[: KILLED + 1], rel=1e-9)
    assert losses(tmp_path, "second") == pytest.approx(expected[4:], rel=1e-9)
    once = decoded(tmp_path, "alone")
    assert once.min() > 0
    np.testing.assert_array_equal(decoded(tmp_path, "second"), once[4:])
