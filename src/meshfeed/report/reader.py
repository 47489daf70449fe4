"""Reads a run log: the costs of every rank's steps, through all restarts. `metrics.RunLog` writes it."""

from __future__ import annotations

import functools
import heapq
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Floats, Longs
from meshfeed.errors import MetricsError
from meshfeed.metrics.run_log import COUNTED, file_name

_LINE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError)  # raised by invalid lines
_OF_A_RANK = ("rank", "coord", "host", "pid")
OF_THE_JOB = ("step", "layout", "world_size", "delivery", "fingerprint")
"""Fields of a header that are equal on all ranks of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start of the job: the first, or a resume.

    Attributes:
        time: unix time in seconds, of the first rank.
        step: the first step.
        layout: see `RunStart`.
        world_size: ranks of the job.
        delivery, fingerprint: see `RunStart`.
        meshfeed: version of the package; None if it was not installed.
        decode_workers, edges: see `RunStart`.
        ranks: those that logged this start, ascending.
        hosts: of these ranks, ascending.
    """

    time: float
    step: int
    layout: str | None
    world_size: int
    delivery: str
    fingerprint: str | None
    meshfeed: str | None
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    decode_workers: int | None = None
    edges: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, eq=False)
class DecodeHistory:
    """What one rank decoded for each of its steps; NaN while it decoded nothing.

    Attributes:
        parts, num_bytes, busy_s, cpu_s, bad: `parts_decoded` and so on of `StepStats`; float64 [n].
    """

    parts: Floats
    num_bytes: Floats
    busy_s: Floats
    cpu_s: Floats
    bad: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankHistory:
    """The steps of one rank, ascending, each once, as handed out last.

    Attributes:
        rank, coord, host, pid: of the rank, from its last start.
        start: index in `RunHistory.starts` of each step's start; int64 [n].
        step: int64 [n].
        time: unix time at which the loop asked for it, seconds; float64 [n].
        seconds: from then until the loop asked for the next step; NaN for the last of a start; float64 [n].
        wait: seconds that the loop waited; float64 [n, stages].
        work: seconds that the producer worked; float64 [n, stages].
        queue_depth, bytes_read, bytes_fetched, delivered_bytes, opens, collectives: see `StepStats`; int64
            [n].
        tokens: of the global batch, without padding; int64 [n].
        padding: share of padding in the global batch; NaN without packing; float64 [n].
        imbalance: work of the busiest rank over the mean; NaN without packing; float64 [n].
        decoded: images, audio and videos that it decoded; None if none.
    """

    rank: int
    coord: Mapping[str, int]
    host: str
    pid: int
    start: Longs
    step: Longs
    time: Floats
    seconds: Floats
    wait: Floats
    work: Floats
    queue_depth: Longs
    bytes_read: Longs
    bytes_fetched: Longs
    delivered_bytes: Longs
    opens: Longs
    collectives: Longs
    tokens: Longs
    padding: Floats
    imbalance: Floats
    decoded: DecodeHistory | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureHistory:
    """Draws of each source of a mixture, at some steps.

    Attributes:
        names: of the sources.
        steps: int64 [m].
        drawn: sequences of each source up to and including the step; int64 [m, sources].
        asked: the same by the recipe's shares, with fractions; float64 [m, sources].
    """

    names: tuple[str, ...]
    steps: Longs
    drawn: Longs
    asked: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunHistory:
    """A whole run log.

    Attributes:
        stages: names of the columns of `wait` and `work`.
        starts: of the job, in order of time. Steps after the last checkpoint were discarded on resume and are
            omitted.
        ranks: rank -> its steps, in order of ranks.
        mixture: None for a single source, or if none was logged.
    """

    stages: tuple[str, ...]
    starts: tuple[Start, ...]
    ranks: Mapping[int, RankHistory]
    mixture: MixtureHistory | None


def read_run(path: str | os.PathLike[str]) -> RunHistory:
    """Read a whole run log, of a finished or a current run.

    Raises MetricsError if the folder is not a run log, or a line is damaged.
    """
    folder = Path(path)
    if not folder.is_dir() or not (paths := sorted(folder.glob("rank-*.jsonl"))):
        raise MetricsError(
            f"{folder}: no run log: not a folder with {file_name(0)} or the file of another rank; give the "
            f"folder that RunLog was given"
        )
    by_rank: dict[int, list[RankStart]] = {}
    # one after the other in each file, whatever the clocks of its hosts
    for start in heapq.merge(*map(_starts_in, paths), key=lambda start: start.header["time"]):
        by_rank.setdefault(start.header["rank"], []).append(start)
    return _history([*by_rank.values()])


def _history(ranks: Sequence[Sequence[RankStart]]) -> RunHistory:
    """Combine the starts of several ranks."""
    together = _together([start for starts in ranks for start in starts])
    starts = tuple(map(_start_of, together))
    place = {id(start): place for place, several in enumerate(together) for start in several}
    # from this step on, a later start repeated
    undone = np.minimum.accumulate([np.inf, *(start.step for start in reversed(starts))])[::-1][1:]
    stages = tuple(dict.fromkeys(name for several in together for name in several[0].header["stages"]))
    histories = [
        _rank_history(several, [place[id(start)] for start in several], undone, stages) for several in ranks
    ]
    return RunHistory(
        stages=stages,
        starts=starts,
        ranks={each.rank: each for each in sorted(histories, key=lambda each: each.rank)},
        mixture=_mixture(together, undone),
    )


def _together(starts: Iterable[RankStart]) -> list[list[RankStart]]:
    """Group the starts of ranks by start of the job, in order of time."""
    jobs: list[dict[int, RankStart]] = []  # each by rank
    for start in sorted(starts, key=lambda start: start.header["time"]):
        rank, of_the_job = start.header["rank"], [start.header[name] for name in OF_THE_JOB]
        # The latest matching start without this rank: clocks differ, and some ranks may never have started.
        for job in reversed(jobs):
            first = next(iter(job.values())).header
            if rank not in job and of_the_job == [first[name] for name in OF_THE_JOB]:
                job[rank] = start
                break
        else:
            jobs.append({rank: start})
    return [list(job.values()) for job in jobs]


def _start_of(ranks: Sequence[RankStart]) -> Start:
    header = ranks[0].header
    return Start(
        time=header["time"],
        meshfeed=header.get("meshfeed"),
        ranks=tuple(sorted(each.header["rank"] for each in ranks)),
        hosts=tuple(sorted({each.header["host"] for each in ranks})),
        decode_workers=header.get("decode_workers"),
        edges=header.get("edges", {}),
        **{name: header[name] for name in OF_THE_JOB},
    )


def _rank_history(
    starts: Sequence[RankStart], places: Sequence[int], undone: Floats, stages: Sequence[str]
) -> RankHistory:
    start = np.repeat(np.array(places, np.int64), [len(each.table) for each in starts])
    steps = np.concatenate([each.table[:, 0] for each in starts])
    kept = np.flatnonzero(steps < undone[start])
    start = start[kept]

    def column(name: str) -> Floats:
        return np.concatenate([_column(each, name) for each in starts])[kept]

    def seconds_of(kind: str) -> Floats:
        return np.nan_to_num(np.stack([column(f"{kind}_{stage}") for stage in stages], axis=1))

    time = column("time")
    seconds = np.full(time.size, np.nan)
    seconds[:-1] = np.where(np.diff(start) == 0, np.diff(time), np.nan)
    header = starts[-1].header
    decoded = DecodeHistory(
        parts=column("parts_decoded"),
        num_bytes=column("bytes_decoded"),
        busy_s=column("decode_busy_s"),
        cpu_s=column("decode_cpu_s"),
        bad=column("parts_bad"),
    )
    return RankHistory(
        rank=header["rank"],
        coord=header["coord"],
        host=header["host"],
        pid=header["pid"],
        start=start,
        time=time,
        seconds=seconds,
        wait=seconds_of("wait"),
        work=seconds_of("work"),
        **{name: np.nan_to_num(column(name)).astype(np.int64) for name in ("step", *COUNTED, "tokens")},
        padding=column("padding"),
        imbalance=column("imbalance"),
        decoded=decoded if np.nansum(decoded.parts) else None,
    )


def _column(start: RankStart, name: str) -> Floats:
    """One column of a start; NaN if it is absent."""
    columns, table = start.header["columns"], start.table
    return table[:, columns.index(name)] if name in columns else np.full(len(table), np.nan)


def _mixture(jobs: Sequence[Sequence[RankStart]], undone: Floats) -> MixtureHistory | None:
    drawn_lines = [
        each
        for several, end in zip(jobs, undone)
        for start in several
        for each in start.drawn
        if each["step"] < end
    ]
    if not drawn_lines:
        return None
    # a recipe may gain sources
    names = tuple(dict.fromkeys(name for each in drawn_lines for name in each["sources"]))
    shape = len(drawn_lines), len(names)
    drawn, asked = np.zeros(shape, np.int64), np.zeros(shape)
    for row, each in enumerate(drawn_lines):
        at = [names.index(name) for name in each["sources"]]
        drawn[row, at], asked[row, at] = each["drawn"], each["asked"]
    steps = np.array([each["step"] for each in drawn_lines], np.int64)
    return MixtureHistory(names=names, steps=steps, drawn=drawn, asked=asked)


# -- one rank's file -------------------------------------------------------------------------------------


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
        self._rows: list[Floats] = []

    def add(self, numbers: list[float | None]) -> None:
        """Add a step. Raises ValueError if it does not match the start's columns."""
        row, num_columns = np.array(numbers, np.float64), len(self.header["columns"])
        if row.shape != (num_columns,):
            raise ValueError(f"not the {num_columns} numbers that the start names")
        self._rows.append(row)

    @functools.cached_property
    def table(self) -> Floats:
        """One row for each step, when all are added; float64 [n, columns]."""
        return np.array(self._rows, np.float64).reshape(-1, len(self.header["columns"]))


def _starts_in(path: Path) -> list[RankStart]:
    """The starts in a rank's file, in order; an unfinished last line is left out.

    Raises MetricsError naming file and line of a damaged line.
    """
    starts, number = list[RankStart](), 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if line.endswith(b"\n"):
                    _take(json.loads(line), starts)
    except OSError as error:
        raise MetricsError(f"{path}: cannot be read: {error}") from error
    except _LINE_ERRORS as error:
        raise MetricsError(f"{path}:{number}: a damaged line ({error!r}); fix it in a copy") from error
    return starts


def _take(line: Any, starts: list[RankStart]) -> None:
    if isinstance(line, list):
        starts[-1].add(cast(list[float | None], line))
    elif "start" in line:
        starts.append(RankStart(line["start"]))
    elif "mixture" in line:
        start, drawn = starts[-1], {"sources": starts[-1].header["sources"], **line["mixture"]}
        start.drawn.append({name: drawn[name] for name in ("step", "drawn", "asked", "sources")})
