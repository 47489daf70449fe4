"""Who encodes the parts: processes of this machine, or whatever else an Engine has."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshfeed.errors import PrepareError
from meshfeed.files.message import untold

_ENTRY = Path(__file__).with_name("work.py")
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Of each worker: processes share nothing, so many of one thread encode more than few of many."""


class Engine(Protocol):
    """Has parts of a job encoded, somewhere."""

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        """Call `task.encode_part(folder, part)` for each part, anywhere that sees folder and inputs.

        Yields each part, in any order, when it lies in the folder. When the iterator is closed, or raises,
        nothing goes on. Raises what `encode_part` raises, and PrepareError naming the part whose worker died.
        """
        ...


@dataclass(frozen=True, slots=True)
class Local:
    """Processes of this machine. num_workers: how many at most."""

    num_workers: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise PrepareError(f"{self.num_workers} workers; one at least")

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        """See Engine."""
        waiting = deque(parts)
        workers: list[_Worker] = []
        with selectors.DefaultSelector() as ready:
            try:
                for _ in range(min(self.num_workers, len(parts))):
                    worker = _Worker(folder, waiting.popleft())
                    workers.append(worker)
                    ready.register(worker.answers, selectors.EVENT_READ, worker)
                while ready.get_map():
                    for key, _ in ready.select():
                        worker: _Worker = key.data
                        yield worker.answer()
                        if waiting:
                            worker.ask(waiting.popleft())
                        else:
                            ready.unregister(worker.answers)
            finally:
                for worker in workers:
                    worker.end()


class _Worker:
    """A process that encodes one part after the other."""

    def __init__(self, folder: Path, part: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_ENTRY), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ONE_THREAD,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise PrepareError("a worker without pipes; start it anew")
        self._asks, self.answers = self._process.stdin, self._process.stdout
        self.ask(part)

    def ask(self, part: int) -> None:
        """Let it encode a part; it has none."""
        self._part = part
        try:
            self._asks.write(f"{part}\n".encode())
            self._asks.flush()
        except BrokenPipeError:
            raise self._died() from None

    def answer(self) -> int:
        """The part that it has encoded. Raises what `encode_part` raised, PrepareError where it is dead."""
        line = self.answers.readline()
        if not line.endswith(b"\n"):
            raise self._died()
        answer = json.loads(line)
        if "error" in answer:
            raise untold(answer["error"])
        return int(answer["part"])

    def end(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._asks.close() if not self._asks.closed else None
        self.answers.close()

    def _died(self) -> PrepareError:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            how = "was killed, perhaps out of memory; continue with --resume and fewer --workers"
        elif status < 0:
            how = f"died of {signal.Signals(-status).name}; continue with --resume"
        else:
            how = f"ended with status {status}, see above; continue with --resume"
        return PrepareError(f"part {self._part}: the worker that encoded it {how}")
