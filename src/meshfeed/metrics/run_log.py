"""A small log of a run: a folder with an append-only file for each rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshfeed.errors import MetricsError
from meshfeed.metrics.lines import file_name, line_of, mixture_line
from meshfeed.metrics.sink import RunStart, Sink, StepRecord

_LOOK_BACK = 1 << 16


class RunLog(Sink):
    """Writes the costs of each step, about 150 bytes, for `meshfeed watch`, `meshfeed report`, `read_run`.

    All ranks and all restarts of a job share one folder. Every node must see it, or the files must be
    collected from the nodes afterwards. A killed process loses at most about a second of records. An
    incomplete last line is removed at the next start.

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
        self._fd: int | None = None

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        """See Sink. Raises MetricsError if writing fails."""
        start = self._start
        lines: list[str] = []
        drawn: StepRecord | None = None
        for entry in entries:
            if isinstance(entry, RunStart):
                start = entry
            elif start is not None and start.is_lowest and entry.stats.source_drawn is not None:
                drawn = entry
            lines.append(line_of(entry))
        if drawn is not None:
            lines.append(mixture_line(drawn))
        if start is None:
            raise MetricsError(f"{self._folder}: a log begins with the start of a run")
        path = self._folder / file_name(start.rank)
        try:
            if self._fd is None or os.fstat(self._fd).st_nlink == 0:  # new, or deleted during the run
                self._close_file()
                self._fd = _open(path, make_folder=self._start is None)
                if not os.fstat(self._fd).st_size and self._start is not None:
                    lines.insert(0, line_of(self._start))
            _append(self._fd, "".join(lines).encode())
        except OSError as error:
            self._close_file()
            raise MetricsError(
                f"{path}: cannot be written ({error}); free the disk or log elsewhere"
            ) from error
        self._start = start

    def close(self) -> None:
        """See Sink."""
        self._start = None
        self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)


def _open(path: Path, *, make_folder: bool) -> int:
    """Open the file for appending, after its last complete line."""
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        _truncate_incomplete(fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def _truncate_incomplete(fd: int) -> None:
    """Remove an incomplete last line, left by a killed process."""
    end = os.fstat(fd).st_size
    while end:
        begin = max(end - _LOOK_BACK, 0)
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < os.fstat(fd).st_size:
        os.ftruncate(fd, end)


def _append(fd: int, data: bytes) -> None:
    """Append all of the data, or nothing."""
    before, rest = os.fstat(fd).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        os.ftruncate(fd, before)
        raise
