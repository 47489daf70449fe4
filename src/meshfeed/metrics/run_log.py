"""A small log of a run: a folder with an append-only file for each rank, or each process.

A file has a JSON object for each start of a run, then a JSON array for each step. A start names the columns
of the arrays that follow it, so readers do not depend on the version. The draws of a mixture are also a JSON
object. Every line ends in a newline; a line without one is incomplete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshfeed.errors import MetricsError
from meshfeed.metrics.recorder import DECODE_COUNTERS
from meshfeed.metrics.sink import RunStart, Sink, StepRecord
from meshfeed.metrics.stages import STAGES

COUNTED = ("queue_depth", "bytes_read", "bytes_fetched", "delivered_bytes", "opens", "collectives")
_OF_TEXT = tuple(stage for stage in STAGES if stage != "decode")
_LOOK_BACK = 1 << 16


def file_name(rank: int, process: str = "") -> str:
    """The file of a rank, inside the folder of its run. process: where ranks come and go."""
    return f"rank-{rank:06d}{process}.jsonl"


class RunLog(Sink):
    """Writes the costs of each step, about 150 bytes, for `meshfeed report` and `read_run`.

    All ranks and all restarts of a job share one folder. Where ranks come and go (`feed.run(generation=)`,
    `feed.at`), each new process has a file of its own, through all ranks that it is. Every node must see the
    folder, or the files must be collected from the nodes afterwards. A killed process loses at most about a
    second of records. An incomplete last line is removed at the next start.

    A full disk or a deleted file never stops training. Records that could not be written are kept and written
    later; for the rest, see `Feed.close`.

    Args:
        path: the folder, created if missing. Only one Feed or Exchange may write to it at a time.

    Raises MetricsError at the start of the first run if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in str(path):
            raise MetricsError(f"{path}: a run log is a folder that this machine sees, not an object store")
        self._folder = Path(path)
        self._start: RunStart | None = None
        self._path = self._folder
        self._fd: int | None = None

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        """See Sink. Raises MetricsError if writing fails."""
        start = next((entry for entry in reversed(entries) if isinstance(entry, RunStart)), self._start)
        if start is None:
            raise MetricsError(f"{self._folder}: a log begins with the start of a run")
        decodes = start.decode_workers is not None  # always or never, in one Feed
        lines = [_start(entry) if isinstance(entry, RunStart) else _step(entry, decodes) for entry in entries]
        drawn = [
            entry for entry in entries if isinstance(entry, StepRecord) and "source_drawn" in entry.stats
        ]
        if drawn and start.is_lowest:
            lines.append(_mixture(drawn[-1], start.sources))
        if self._start is None:
            own = f"-{start.host}-{start.pid}" if start.comes_and_goes else ""
            self._path = self._folder / file_name(start.rank, own)
        try:
            if self._fd is None or os.fstat(self._fd).st_nlink == 0:  # new, or deleted during the run
                self._close_file()
                if self._start is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                _remove_incomplete(self._fd)
                if not os.fstat(self._fd).st_size and self._start is not None:
                    lines.insert(0, _start(self._start))
            _append(self._fd, "".join(map(_line, lines)).encode())
        except OSError as error:
            self._close_file()
            raise MetricsError(
                f"{self._path}: cannot be written ({error}); free the disk or log elsewhere"
            ) from error
        self._start = start

    def close(self) -> None:
        self._start = None
        self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)


def _line(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def _stages(decodes: bool) -> tuple[str, ...]:
    return STAGES if decodes else _OF_TEXT


def _start(start: RunStart) -> dict[str, Any]:
    decodes = start.decode_workers is not None
    header, stages = asdict(start), _stages(decodes)
    if not decodes:
        del header["decode_workers"]
    columns = (
        "step",
        "time",
        *(f"wait_{stage}" for stage in stages),
        *(f"work_{stage}" for stage in stages),
        *COUNTED,
        "tokens",
        "padding",
        "imbalance",
        *(DECODE_COUNTERS if decodes else ()),
    )
    return {"start": header | {"version": 1, "time": start.time_s, "stages": stages, "columns": columns}}


def _step(record: StepRecord, decodes: bool) -> list[float | None]:
    stats, stages = record.stats, _stages(decodes)
    seconds = [*map(stats.exposed_wait_s.get, stages), *map(stats.work_s.get, stages)]
    shares = [stats.padding, stats.max_over_mean]
    if decodes:
        shares += [getattr(stats, name) for name in DECODE_COUNTERS]
    return [
        record.step,
        round(record.time_s, 6),
        *(round(each, 6) if each else 0 for each in seconds),
        *(getattr(stats, name) for name in COUNTED),
        record.tokens,
        *(None if share is None else round(share, 6) for share in shares),
    ]


def _mixture(record: StepRecord, sources: tuple[str, ...]) -> dict[str, Any]:
    """Sequences of each source until the end of a step: drawn, and by the recipe's shares.

    sources: those of the run's start; the names are written if there are others.
    """
    drawn, asked = (record.stats[name].tolist() for name in ("source_drawn", "source_asked"))
    names = record.stats.source_names or sources
    others = {} if names == sources else {"sources": [*names]}
    return {"mixture": {"step": record.step, "drawn": drawn, "asked": asked, **others}}


def _remove_incomplete(fd: int) -> None:
    """Remove an incomplete last line, left by a killed process."""
    size, tail = os.fstat(fd).st_size, b""
    while len(tail) < size and b"\n" not in tail:
        look_back = min(max(16 * len(tail), _LOOK_BACK), size)
        tail = os.pread(fd, look_back, size - look_back)
    os.ftruncate(fd, size - len(tail) + tail.rfind(b"\n") + 1)


def _append(fd: int, data: bytes) -> None:
    """Append all of the data, or nothing."""
    before, rest = os.fstat(fd).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        os.ftruncate(fd, before)
        raise
