"""One rank's file of a run log, read as it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import MetricsError

Floats = npt.NDArray[np.float64]

_LINE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError)  # raised by invalid lines
_OF_A_RANK = ("rank", "coord", "host", "pid")
OF_THE_JOB = ("step", "layout", "world_size", "delivery", "fingerprint")
"""Fields of a header that are equal on all ranks of a job."""


class RankStart:
    """A start of one rank and its steps.

    Attributes:
        header: the line of the start, as written.
        drawn: the lines about the mixture, as written: draws of each source until the end of a step.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        missing = {"time", "sources", "stages", "columns", *_OF_A_RANK, *OF_THE_JOB} - header.keys()
        if missing or not {"step", "time"} <= set(header["columns"]):
            raise ValueError(f"a start without {', '.join(sorted(missing)) or 'columns'}")
        if not all(isinstance(header[name], (int, float)) for name in ("time", "rank", "step")):
            raise ValueError("a start whose time, rank or step is not a number")
        self.header = header
        self.drawn: list[dict[str, Any]] = []
        self._table = np.zeros((0, len(header["columns"])))
        self._new: list[Floats] = []

    def add(self, numbers: list[float | None]) -> None:
        """Add a step. Raises ValueError if it does not match the start's columns."""
        row = np.array(numbers, np.float64)
        if row.shape != (self._table.shape[1],):
            raise ValueError(f"not the {self._table.shape[1]} numbers that the start names")
        self._new.append(row)

    @property
    def table(self) -> Floats:
        """One row for each step; float64 [n, columns]."""
        if self._new:
            self._table, self._new = np.concatenate([self._table, np.stack(self._new)]), []
        return self._table

    def keep(self, count: int) -> None:
        """Keep only the last `count` steps, and the mixture from there on."""
        self._table = self.table[max(len(self.table) - count, 0) :]
        first = self._table[0, 0] if len(self._table) else np.inf
        self.drawn = [each for each in self.drawn if each["step"] >= first]


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
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._num_lines += 1
                    self._take(json.loads(line))
        except OSError as error:
            raise MetricsError(f"{self._path}: cannot be read: {error}") from error
        except _LINE_ERRORS as error:
            where = f"{self._path}:{self._num_lines}"
            raise MetricsError(f"{where}: a damaged line ({error!r}); fix it in a copy") from error

    def keep(self, count: int) -> None:
        """Keep only the last `count` steps."""
        for start in reversed(self.starts):
            start.keep(count)
            count = max(count - len(start.table), 0)

    def _take(self, line: Any) -> None:
        if isinstance(line, list):
            self.starts[-1].add(line)
        elif "start" in line:
            self.starts.append(RankStart(line["start"]))
        elif "mixture" in line:
            start, drawn = self.starts[-1], {"sources": self.starts[-1].header["sources"], **line["mixture"]}
            start.drawn.append({name: drawn[name] for name in ("step", "drawn", "asked", "sources")})
