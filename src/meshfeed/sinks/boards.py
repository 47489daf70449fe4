"""Metrics beside the losses: Weights & Biases, and TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshfeed.errors import OptionError
from meshfeed.metrics.sink import RunStart, Sink, StepRecord


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a step by name: tokens of the global batch, seconds by stage, and single figures."""
    stats = record.stats
    named: dict[str, Any] = {"tokens": record.tokens}
    named |= {f"wait_s/{stage}": seconds for stage, seconds in stats.exposed_wait_s.items()}
    named |= {f"work_s/{stage}": seconds for stage, seconds in stats.work_s.items()}
    named |= {name: value for name, value in stats.items() if isinstance(value, int | float)}
    if (slow := stats.slowest) is not None:
        named |= {"slowest/rank": slow.rank, "slowest/wait_s": slow.wait_s}
    return {f"meshfeed/{name}": float(value) for name, value in named.items()}


class WandB(Sink):
    """Adds the newest step, about once a second, to what the trainer logs next to a Weights & Biases run.

    Nothing is committed here: each commit advances the run's step, and wandb drops what a trainer then logs
    for an earlier one. So steps between two points are left out; `RunLog` keeps all of them. The numbers have
    an x-axis of their own, `meshfeed/step`.

    Args:
        run: what `wandb.init` returned; on the ranks that have one.

    Raises OptionError for anything else.
    """

    def __init__(self, run: Any) -> None:
        if not callable(getattr(run, "define_metric", None)):
            raise OptionError(f"WandB({run!r}): give the run that wandb.init() returns")
        self._run = run

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        if any(isinstance(entry, RunStart) for entry in entries):
            self._run.define_metric("meshfeed/step")
            self._run.define_metric("meshfeed/*", step_metric="meshfeed/step")
        if records := [entry for entry in entries if isinstance(entry, StepRecord)]:
            newest = records[-1]
            self._run.log({"meshfeed/step": newest.step, **scalars(newest)}, commit=False)


class TensorBoard(Sink):
    """Writes every step as scalars to a TensorBoard log.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`; flushed about once a second, and not closed.

    Raises OptionError for anything else, such as a path: only some ranks should write to one folder.
    """

    def __init__(self, writer: Any) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise OptionError(
                f"TensorBoard({writer!r}): give a torch.utils.tensorboard.SummaryWriter, on the ranks that "
                f"write; TensorBoard(SummaryWriter('runs/1'))"
            )
        self._writer = writer
        self._start: RunStart | None = None
        self._last_step: dict[str, int] = {}  # by scalar, of this run: after an error, the rest is written

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        for entry in entries:
            if isinstance(entry, StepRecord):
                for name, value in scalars(entry).items():
                    if entry.step > self._last_step.get(name, -1):
                        self._writer.add_scalar(name, value, entry.step, walltime=entry.time_s)
                        self._last_step[name] = entry.step
            elif entry != self._start:
                self._start, self._last_step = entry, {}
        self._writer.flush()
