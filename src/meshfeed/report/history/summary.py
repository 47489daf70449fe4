"""Text and figures of a run's page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from meshfeed.report.history.decoding import RankDecoding, decoded_of, figures, limiting, verdict
from meshfeed.report.history.grid import Grid
from meshfeed.report.history.loop import longest_outside
from meshfeed.report.history.starvation import Starvation, starvation_of, starvation_words
from meshfeed.report.history.waits import Waits, longest_of, worst_of
from meshfeed.report.reader import RunHistory
from meshfeed.report.words import counted, duration, short

_NOTICEABLE = 0.01  # share of the ranks' time above which waiting counts as bad


def summary_of(history: RunHistory, waits: Waits) -> dict[str, Any]:
    """The figures for scripts, JSON-able; durations in seconds, omitting the first step of each start.

    worst: rank and stage to look at first, see `waits.Worst`. longest: the longest wait of a single step.
    outside: see `loop.Outside`. starved: waits that come back, see `starvation.Starvation`. decoding: see
    `decoding.figures`; only if something was decoded.
    """
    decoded = decoded_of(history)
    worst = worst_of(waits)
    longest, outside = longest_of(waits), longest_outside(history)
    starved = starvation_of(history)
    return {
        "says": " ".join(says(waits, decoded, starved)),
        "steps": num_steps(history),
        "starts": [{"step": start.step, "layout": start.layout} for start in history.starts],
        "wait_share": waits.share,
        "worst": None if worst is None else asdict(worst),
        "longest": None if longest is None else asdict(longest),
        "outside": None if outside is None else asdict(outside),
        "starved": None if starved is None else asdict(starved),
        "ranks": [
            {"rank": int(rank), "wait_s": dict(zip(waits.stages, per_step.tolist()))}
            for rank, per_step in zip(waits.ranks, waits.per_step)
        ],
    } | ({"decoding": figures(waits, decoded)} if decoded else {})


def says(waits: Waits, decoded: Mapping[int, RankDecoding], starved: Starvation | None) -> list[str]:
    """What to look at first, and what waits come back; a paragraph each."""
    return [verdict(waits, decoded)] + ([] if starved is None else [starvation_words(starved)])


def num_steps(history: RunHistory) -> int:
    """Steps that some rank was given, each once: not those that an amendment has skipped."""
    steps = np.zeros(0, np.int64)
    for rank in history.ranks.values():
        if not np.array_equal(rank.step, steps):  # most ranks have the same
            steps = np.union1d(steps, rank.step)
    return steps.size


def mood(waits: Waits) -> str:
    """good, even or bad: the style of the first sentence."""
    worst = worst_of(waits)
    if worst is None or worst.share < _NOTICEABLE:
        return "good"
    return "bad" if worst.stands_out or limiting(waits) is not None else "even"


def when(history: RunHistory, waits: Waits) -> str:
    """Begin, end and duration of the run, and its number of ranks."""
    times = [float(rank.time[at]) for rank in history.ranks.values() if rank.time.size for at in (0, -1)]
    if not times:
        return "no step yet"
    first, last = (datetime.fromtimestamp(at, UTC) for at in (min(times), max(times)))
    long = timedelta(seconds=round(max(times) - min(times)))
    until = f"{last:%H:%M:%S}" if last.date() == first.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    return f"{first:%Y-%m-%d %H:%M:%S} to {until} UTC, {long}, {counted(len(waits.ranks), 'rank')}"


def kpis(history: RunHistory, waits: Waits) -> list[tuple[str, str]]:
    """(what, value) of the figures at the top."""
    found = [("steps", f"{num_steps(history):,}")]
    if history.ranks:
        tokens = max(int(rank.tokens.sum()) for rank in history.ranks.values())
        found.append(("tokens", short(tokens, "")))
    found.append(("of the ranks' time is exposed wait", f"{waits.share:.{0 if waits.share > 0.1 else 2}%}"))
    longest = longest_of(waits)
    if longest is not None:
        found.append((f"longest wait: {longest}", duration(longest.wait_s)))
    outside = longest_outside(history)
    if outside is not None:
        found.append((f"longest outside the loader: step {outside.step:,}", duration(outside.busy_s)))
    layouts = list(dict.fromkeys(start.layout for start in history.starts if start.layout))
    if layouts:
        found.append(("layout" if len(layouts) == 1 else "last of the layouts", layouts[-1]))
    found.append(("starts", f"{len(history.starts):,}"))
    return found


def traffic(history: RunHistory) -> str:
    """Bytes read and fetched, in a sentence."""
    read, fetched = (
        sum(int(getattr(rank, name).sum()) for rank in history.ranks.values())
        for name in ("bytes_read", "bytes_fetched")
    )
    text = f"All ranks together read {short(read)}"
    if fetched:
        times = fetched / max(read, 1)
        return f"{text} and fetched {short(fetched)} from remote storage: {times:.3f} times that."
    return f"{text}, none of it from remote storage."


def resumes(history: RunHistory) -> str:
    """The number of starts, and the ranks without a log, in a sentence or two."""
    num, layouts = len(history.starts), len({start.layout for start in history.starts})
    text = "The run was started once."
    if num > 1:
        text = (
            f"The run was started {num} times, under {'one layout' if layouts == 1 else f'{layouts} layouts'}"
            f". Steps after the last checkpoint were discarded on resume; they are not shown."
        )
    found: list[str] = []
    for number, start in enumerate(history.starts, 1):
        if silent := sorted(set(range(start.world_size)) - set(start.ranks)):
            names = ", ".join(map(str, silent[:8]))
            more = f" and {len(silent) - 8:,} more" if len(silent) > 8 else ""
            found.append(f"rank{'s' * (len(silent) > 1)} {names}{more} of start {number}")
    if not found:
        return text
    return f"{text} The log lacks {'; '.join(found)}: their steps are not on this page."


def resolution(grid: Grid) -> str:
    """What a column and a row of the map show."""
    steps = int((grid.stop - grid.first).max(initial=1))
    ranks = int((grid.row_stop - grid.rows).max(initial=1))
    columns = "A column is a step." if steps == 1 else f"A column is {steps:,} steps."
    rows = "A row is a rank." if ranks == 1 else f"A row is {ranks:,} ranks."
    cells = "" if steps == ranks == 1 else " A cell shows the longest wait of any of them."
    return f"{columns} {rows}{cells}"
