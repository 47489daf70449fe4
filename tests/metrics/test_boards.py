"""Weights & Biases and TensorBoard show what the stats say. Their packages are large: both tests run where they are
installed, and the one before them with a writer that remembers.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.metrics import Sink, TensorBoard, WandB
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


class Remembers:
    """A SummaryWriter, and a run of Weights & Biases, in memory."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}
        self.defined: list[str] = []

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        self.seen.setdefault(step, {})[name] = value

    def log(self, values: dict[str, float]) -> None:
        self.seen[int(values["meshfeed/step"])] = values

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.defined.append(name)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("kind", [TensorBoard, WandB])
def test_every_step_is_written_once(kind: Any, tmp_path: Path) -> None:
    kept = Remembers()
    for step, told in fed(tmp_path, kind(kept)).items():
        assert {name: kept.seen[step][name] for name in told} == told
    assert set(kept.seen) == set(range(5))
    assert kept.defined == (["meshfeed/step", "meshfeed/*"] if kind is WandB else [])


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

    quiet = wandb.Settings(silent=True)
    with wandb.init(mode="offline", dir=tmp_path, project="meshfeed", settings=quiet) as run:
        told = fed(tmp_path, WandB(run))
        assert run.summary["meshfeed/step"] == 4
        assert run.summary["meshfeed/tokens"] == told[4]["meshfeed/tokens"]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
