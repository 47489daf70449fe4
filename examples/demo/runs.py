"""Runs of the example trainer: a process for each rank, watched by what they write."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
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
WINDOW = 64
_LOOK_EVERY_S = 0.05
_TAIL = 3000
_EXAMPLES = Path(__file__).parents[1]


def begin_server() -> None:
    """Begin the server that ranks are forked from; it imports torch and the trainer meanwhile."""
    # a fork server of Python 3.11 looks for what to preload in PYTHONPATH alone
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_EXAMPLES), os.environ.get("PYTHONPATH", "")])
    forkserver.set_forkserver_preload(["train_gpt", "torch._dynamo"])  # an optimizer imports the latter
    forkserver.ensure_running()


class Trainer:
    """Starts the trainer under a layout and follows it to its end, or to the step at which it is killed.

    It starts ranks as torchrun does, but forks them from the server of `begin_server`.
    """

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
        options: dict[str, Any] | None = None,
    ) -> None:
        """One run. kill_at: SIGKILL to every rank once this step is done. options: the trainer's own;
        "-RANK" in one is the rank's.

        Raises MeshfeedError with the end of the run's output where it fails.
        """
        log = self._out / f"log-{name}.txt"
        log.touch()
        ranks = Layout.parse(layout).world_size
        # where the ranks meet: served here, as by torchrun
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        arguments = self._arguments(name, layout, resume, options or {})
        processes = [self._start(log, rank, ranks, store.port, arguments) for rank in range(ranks)]
        try:
            steps = int((options or {}).get("steps", self._steps))
            succeeded = self._follow(processes, name, told, steps, kill_at)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if not succeeded:
            raise MeshfeedError(f"the run {name!r} failed; the end of {log}:\n{log.read_text()[-_TAIL:]}")

    def _start(self, log: Path, rank: int, ranks: int, port: int, arguments: Sequence[str]) -> BaseProcess:
        environment = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        arguments = [each.replace("-RANK", f"-{rank}") for each in arguments]
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_train, args=(log, environment, arguments), daemon=True)
        process.start()
        return process

    def _arguments(self, name: str, layout: str, resume: Path | None, further: dict[str, Any]) -> list[str]:
        options: dict[str, Any] = {
            "layout": layout,
            "corpus": self._corpus.prefix,
            "vocab": self._corpus.vocab,
            "out": self._out,
            "name": name,
            "steps": self._steps,
            "window": WINDOW,
            "micro-batch-size": 4,
            "delivery": self._delivery,
            "checkpoint-every": CHECKPOINT_EVERY if name != "reference" else self._steps + 1,
        }
        if resume is not None:
            options["resume"] = resume
        return [part for option, value in (options | further).items() for part in (f"--{option}", str(value))]

    def _follow(
        self, processes: Sequence[BaseProcess], name: str, told: str, steps: int, kill_at: int | None
    ) -> bool:
        """Show the run's steps until it has done `kill_at` or ended; returns whether it did."""
        losses = self._out / f"losses-{name}.jsonl"
        columns = (SpinnerColumn(), TextColumn(told), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(told, total=steps)
            while True:
                statuses = [process.exitcode for process in processes]
                done = _last_step(losses) + 1
                progress.update(task, completed=done)
                if kill_at is not None and done > kill_at:
                    return True
                if any(statuses):
                    return False
                if None not in statuses:
                    return kill_at is None
                time.sleep(_LOOK_EVERY_S)  # how often the bar moves; nothing waits for it


def _train(log: Path, environment: Mapping[str, object], arguments: Sequence[str]) -> None:
    """A rank's process: the trainer's own main, with arguments and the environment that torchrun sets."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {name: str(value) for name, value in environment.items()}
    sys.argv = ["train_gpt.py", *arguments]
    import train_gpt

    train_gpt.main()


def latest_checkpoint(out: Path) -> tuple[Path | None, int]:
    """The newest whole checkpoint and the step at which it goes on; (None, 0) where there is none."""
    found = sorted(out.glob("checkpoint-*"))
    return (found[-1].resolve(), int(found[-1].name.split("-")[1])) if found else (None, 0)


def _last_step(losses: Path) -> int:
    """The last step that a run has written whole; -1 before the first."""
    written = losses.read_text().splitlines(keepends=True) if losses.exists() else []
    whole = [line for line in written if line.endswith("\n")]
    return json.loads(whole[-1])["step"] if whole else -1
