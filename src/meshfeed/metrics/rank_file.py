"""One rank's file of a run log, read as it grows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshfeed.errors import MetricsError

Floats = npt.NDArray[np.float64]

_AT_ONCE_BYTES = 1 << 24
_LINE_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
)  # raised by invalid lines
_NEEDED = ("time", "host", "pid", "rank", "world_size", "layout", "coord", "delivery", "fingerprint", "step")


class Drawn(NamedTuple):
    """Draws of each source until the end of a step, and the recipe's shares in that step."""

    step: int
    drawn: list[int]
    asked: list[float]


class RankStart:
    """A start of one rank and its steps.

    Attributes:
        told: the start's line, as written.
        drawn: the lines about the mixture.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        missing = {*_NEEDED, "sources", "stages", "columns"} - told.keys()
        if missing:
            raise ValueError(f"a start without {', '.join(sorted(missing))}")
        if not all(isinstance(told[name], int | float) for name in ("time", "step", "rank")):
            raise ValueError("a start without numbers")
        if not {"step", "time"} <= set(told["columns"]):
            raise ValueError("a start without columns")
        self.told = told
        self.drawn: list[Drawn] = []
        self._tables = [np.zeros((0, len(told["columns"])))]

    def add(self, rows: Sequence[Sequence[float | None]]) -> None:
        """Add steps. Raises ValueError if they do not match the start's columns."""
        table = np.array(rows, np.float64)
        if table.shape != (len(rows), len(self.told["columns"])):
            raise ValueError(f"not the {len(self.told['columns'])} numbers that the start has named")
        self._tables.append(table)

    @property
    def table(self) -> Floats:
        """One row for each step; float64 [n, columns]."""
        if len(self._tables) > 1:
            self._tables = [np.concatenate(self._tables)]
        return self._tables[0]

    def keep(self, count: int) -> None:
        """Keep only the last `count` steps, and the mixture from there on."""
        self._tables = [self.table[max(len(self.table) - count, 0) :]]
        first = self.table[0, 0] if len(self.table) else np.inf
        self.drawn = [told for told in self.drawn if told.step >= first]


class RankFile:
    """The file of a rank, read incrementally.

    Attributes:
        starts: in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        self.starts: list[RankStart] = []
        self._path, self._offset, self._num_lines = path, 0, 0

    def read_new(self) -> None:
        """Read the lines written since the last call, except an unfinished one.

        Raises MetricsError naming file and line of a damaged line.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    raise MetricsError(f"{self._path}: was truncated or replaced; read it again")
                file.seek(self._offset)
                while (data := file.read(_AT_ONCE_BYTES)) and (end := data.rfind(b"\n") + 1):
                    self._take(data[: end - 1].split(b"\n"))
                    self._offset += end
                    file.seek(self._offset)
        except MetricsError:
            raise
        except OSError as error:
            raise MetricsError(f"{self._path}: cannot be read: {error}") from error

    def keep(self, count: int) -> None:
        """Keep only the last `count` steps."""
        for start in reversed(self.starts):
            start.keep(count)
            count -= len(start.table)

    def _take(self, lines: list[bytes]) -> None:
        for is_steps, group in groupby(lines, lambda line: line.startswith(b"[")):
            some = list(group)
            try:
                if not is_steps:
                    raise ValueError
                self._take_steps(some)  # one call of the parser for thousands of lines
                self._num_lines += len(some)
            except _LINE_ERRORS:
                self._take_singly(some)

    def _take_singly(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._num_lines += 1
            try:
                if line.startswith(b"["):
                    self._take_steps([line])
                else:
                    self._take_object(json.loads(line))
            except _LINE_ERRORS as error:
                where = f"{self._path}:{self._num_lines}"
                raise MetricsError(f"{where}: a damaged line ({error!r}); fix it in a copy") from error

    def _take_steps(self, lines: list[bytes]) -> None:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if len(rows) != len(lines) or not self.starts:
            raise ValueError("two steps in one line, or none had a start")
        self.starts[-1].add(rows)

    def _take_object(self, told: dict[str, Any]) -> None:
        if "start" in told:
            self.starts.append(RankStart(told["start"]))
        elif "mixture" in told:
            some = told["mixture"]
            self.starts[-1].drawn.append(Drawn(some["step"], some["drawn"], some["asked"]))
