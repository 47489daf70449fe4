"""Runs of the example trainer: real processes under torchrun, watched by what they write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from demo.corpus import Corpus
from meshfeed.errors import MeshfeedError
from meshfeed.layout import Layout

CHECKPOINT_EVERY = 5
_LOOK_EVERY_S = 0.05
_TAIL = 3000
_TRAINER = Path(__file__).parents[1] / "train_gpt.py"


class Trainer:
    """Starts the trainer under a layout and follows it to its end, or to the step at which it is killed."""

    def __init__(self, out: Path, corpus: Corpus, steps: int, delivery: str, console: Console) -> None:
        self._out, self._corpus, self._steps = out.resolve(), corpus, steps
        self._delivery, self._console = delivery, console

    def train(
        self,
        name: str,
        layout: str,
        told: str,
        *,
        kill_at: int | None = None,
        resume: Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """One run. kill_at: SIGKILL to every rank once this step is done. options: the trainer's own.

        Raises MeshfeedError with the end of the run's output where it fails.
        """
        log = self._out / f"log-{name}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                self._command(name, layout, resume, options or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )
        try:
            self._follow(process, name, told, int((options or {}).get("steps", self._steps)), kill_at)
        except BaseException:
            self._kill(process, name)
            raise
        if kill_at is not None:
            self._kill(process, name)
        elif process.wait() != 0:
            raise MeshfeedError(f"the run {name!r} failed; the end of {log}:\n{log.read_text()[-_TAIL:]}")

    def _command(self, name: str, layout: str, resume: Path | None, further: Mapping[str, Any]) -> list[str]:
        ranks = Layout.parse(layout).world_size
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        options: dict[str, Any] = {
            "layout": layout,
            "corpus": self._corpus.prefix,
            "vocab": self._corpus.vocab,
            "out": self._out,
            "name": name,
            "steps": self._steps,
            "delivery": self._delivery,
            "checkpoint-every": CHECKPOINT_EVERY if name != "reference" else self._steps + 1,
        }
        if resume is not None:
            options["resume"] = resume
        options |= further
        flat = [
            part
            for option, value in options.items()
            for part in ([f"--{option}"] if value is True else [f"--{option}", str(value)])
        ]
        return [*launcher, f"--nproc-per-node={ranks}", str(_TRAINER), *flat]

    def _follow(
        self, process: subprocess.Popen[bytes], name: str, told: str, steps: int, kill_at: int | None
    ) -> None:
        """Show the run's steps until it ends, or has done `kill_at`."""
        losses = self._out / f"losses-{name}.jsonl"
        columns = (SpinnerColumn(), TextColumn(told), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(told, total=steps)
            while process.poll() is None:
                done = _last_step(losses) + 1
                progress.update(task, completed=done)
                if kill_at is not None and done > kill_at:
                    return
                time.sleep(_LOOK_EVERY_S)  # how often the bar moves; nothing waits for it
            progress.update(task, completed=_last_step(losses) + 1)
        if kill_at is not None:
            log = self._out / f"log-{name}.txt"
            raise MeshfeedError(
                f"the run {name!r} ended before step {kill_at}; the end of {log}:\n{log.read_text()[-_TAIL:]}"
            )

    def _kill(self, process: subprocess.Popen[bytes], name: str) -> None:
        """SIGKILL to every rank and to their launcher."""
        ranks = [int(path.read_text()) for path in self._out.glob(f"pid-{name}-rank*")]
        for pid in [*ranks, process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def latest_checkpoint(out: Path) -> tuple[Path | None, int]:
    """The newest whole checkpoint and the step at which it goes on; (None, 0) where there is none."""
    found = sorted(out.glob("checkpoint-*"))
    return (found[-1].resolve(), int(found[-1].name.split("-")[1])) if found else (None, 0)


def _last_step(losses: Path) -> int:
    """The last step that a run has written whole; -1 before the first."""
    written = losses.read_text().splitlines(keepends=True) if losses.exists() else []
    whole = [line for line in written if line.endswith("\n")]
    return json.loads(whole[-1])["step"] if whole else -1
