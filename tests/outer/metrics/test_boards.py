"""Weights & Biases and TensorBoard show what the stats say. Their packages are large: both tests run where they are
installed, and the ones before them with a writer and a run in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.metrics import RunStart, Sink, StepRecord
from meshfeed.sinks import TensorBoard, WandB
from services import needs


def fed(tmp_path: Path, sink: Sink) -> dict[int, dict[str, float]]:
    """What five steps with this sink say of themselves, by step."""
    write_corpus(tmp_path / "text", num_tokens=20_000)
    with mf.Feed(recipe_of(str(tmp_path / "text")), metrics=sink) as feed:
        steps = [(step, list(step.microbatches)) for step in itertools.islice(feed, 5)]
    told = {}
    for step, _ in steps:
        wait = {f"meshfeed/wait_s/{stage}": s for stage, s in step.stats.exposed_wait_s.items()}
        read = {"meshfeed/tokens": step.tokens, "meshfeed/bytes_read": step.stats.bytes_read}
        told[step.index] = wait | read
    assert sum(each["meshfeed/bytes_read"] for each in told.values()) > 0
    return told


class Keeps(Sink):
    """Every entry."""

    def __init__(self) -> None:
        self.entries: list[RunStart | StepRecord] = []

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        self.entries += entries


class Writer:
    """A SummaryWriter in memory, which fails once."""

    def __init__(self, fails_at: int) -> None:
        self.seen: list[tuple[int, str, float]] = []
        self.fails_at = fails_at

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        if len(self.seen) == self.fails_at:
            self.fails_at = -1
            raise OSError("disk full")
        self.seen.append((step, name, value))

    def flush(self) -> None:
        pass


class Run:
    """A run of Weights & Biases in memory: what is logged for an earlier step than the current one is dropped."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.defined: list[str] = []
        self.step = 0

    def log(self, values: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.step:
            return
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(values)
        if commit or (commit is None and step is None):
            self.step += 1

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.defined.append(name)


def test_every_step_is_written_once_whatever_fails(tmp_path: Path) -> None:
    kept = Keeps()
    told = fed(tmp_path, kept)
    writer = Writer(fails_at=40)  # within a step
    sink = TensorBoard(writer)
    with pytest.raises(OSError, match="disk full"):
        sink.take(kept.entries[:5])
    sink.take(kept.entries)
    assert len({(step, name) for step, name, _ in writer.seen}) == len(writer.seen) > 40
    by_step: dict[int, dict[str, float]] = {}
    for step, name, value in writer.seen:
        by_step.setdefault(step, {})[name] = value
    assert {step: {name: by_step[step][name] for name in told[step]} for step in by_step} == told
    sink.take([replace(kept.entries[0], time_s=0.0), kept.entries[1]])  # another run begins at the first step
    assert [step for step, *_ in writer.seen].count(0) == 2 * len(by_step[0])


def test_what_is_no_board_is_refused_by_name() -> None:
    for path in ("runs/1", Path("runs/1")):
        with pytest.raises(mf.errors.OptionError, match=r"^TensorBoard\(.*runs/1.*SummaryWriter"):
            TensorBoard(path)
    for run in ("project", None):
        with pytest.raises(mf.errors.OptionError, match=r"^WandB\(.*wandb\.init\(\)"):
            WandB(run)


def log_both(run: Any, entries: Sequence[RunStart | StepRecord]) -> None:
    """A trainer's loss at each of six steps, and the sink's numbers after the second step and the fifth."""
    sink = WandB(run)
    for step in range(6):
        run.log({f"loss/{step}": 10.0 + step}, step=step)
        if step in (1, 4):
            sink.take(entries[:3] if step == 1 else entries[3:])


LOSSES = {f"loss/{step}": 10.0 + step for step in range(6)}


def test_a_run_keeps_the_trainers_losses(tmp_path: Path) -> None:
    kept, run = Keeps(), Run()
    told = fed(tmp_path, kept)
    log_both(run, kept.entries)
    assert run.defined == ["meshfeed/step", "meshfeed/*"]
    assert {name: run.rows[step].get(name) for step, name in enumerate(LOSSES)} == LOSSES
    points = {step: row for step, row in run.rows.items() if "meshfeed/step" in row}
    assert [(step, row["meshfeed/step"]) for step, row in points.items()] == [(1, 1), (4, 4)]
    assert all({name: row[name] for name in told[step]} == told[step] for step, row in points.items())


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    needs.package("tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    told = fed(tmp_path, TensorBoard(SummaryWriter(tmp_path / "board")))
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("meshfeed/tokens", "meshfeed/bytes_read"):
        assert {each.step: each.value for each in board.Scalars(name)} == {s: told[s][name] for s in told}


def test_wandb_keeps_what_was_logged(tmp_path: Path) -> None:
    needs.package("wandb", "wandb")
    import wandb

    kept = Keeps()
    told = fed(tmp_path, kept)
    quiet = wandb.Settings(silent=True)
    with wandb.init(mode="offline", dir=tmp_path, project="meshfeed", settings=quiet) as run:
        log_both(run, kept.entries)
        run.log({}, step=6)
        assert {name: run.summary.get(name) for name in LOSSES} == LOSSES
        assert run.summary["meshfeed/step"] == 4
        assert run.summary["meshfeed/tokens"] == told[4]["meshfeed/tokens"]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
