"""What the ranks of a run decoded, whether the run waits for it, and what to do then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshfeed.metrics import RankHistory, RunHistory
from meshfeed.report.history.loop import seconds_of
from meshfeed.report.history.waits import Waits, Worst, sentence, worst_of
from meshfeed.report.words import counted, duration

STAGE = "decode"
LIMITS = 0.05
"""Decoding limits a run in which a rank waits for it for this share of its time, and no longer for others."""

_BUSY, _OF_A_CORE = 0.8, 0.6


@dataclass(frozen=True, slots=True)
class Decoding:
    """What the ranks that decode did over some of their steps.

    Attributes:
        workers: processes of each rank; 0 for its reading thread.
        ranks: i64[r], ascending.
        seconds: f64[r], duration of the steps.
        parts, num_bytes, busy_s, cpu_s: f64[r]; see `DecodeHistory`.
    """

    workers: int
    ranks: np.ndarray
    seconds: np.ndarray
    parts: np.ndarray
    num_bytes: np.ndarray
    busy_s: np.ndarray
    cpu_s: np.ndarray

    @property
    def busy(self) -> np.ndarray:
        """f64[r]: share of the workers' time in which they decoded, 0 to 1."""
        return np.minimum(self.busy_s / np.maximum(self.seconds * max(self.workers, 1), 1e-9), 1.0)

    @property
    def of_a_core(self) -> np.ndarray:
        """f64[r]: CPU seconds of a second of decoding."""
        return self.cpu_s / np.maximum(self.busy_s, 1e-9)


def decoding_of(history: RunHistory) -> Decoding | None:
    """Over the last workers' number of the run, without first steps of starts and steps that are not over.

    None if nothing was decoded in the other steps.
    """
    workers = [start.decode_workers for start in history.starts]
    if all(number is None for number in workers):
        return None
    last = [number for number in workers if number is not None][-1]
    like_last = np.array([number == last for number in workers])
    lines: list[tuple[float, ...]] = []
    for _, rank in sorted(history.ranks.items()):
        seconds = seconds_of(rank)
        steady = (np.diff(rank.start, prepend=-1) <= 0) & np.isfinite(seconds) & like_last[rank.start]
        if (line := decoded_in(rank, np.flatnonzero(steady))) is not None:
            lines.append((rank.rank, float(seconds[steady].sum()), *line))
    if not lines:
        return None
    ranks, *sums = np.array(lines).T
    return Decoding(last, ranks.astype(np.int64), *sums)


def decoded_in(rank: RankHistory, steps: np.ndarray) -> tuple[float, float, float, float] | None:
    """Parts, bytes, busy_s and cpu_s of some of its steps, by place; None if no part was decoded."""
    done = rank.decoded
    if done is None or not np.nansum(done.parts[steps]):
        return None
    parts, num_bytes, busy_s, cpu_s = (
        float(np.nansum(values[steps])) for values in (done.parts, done.num_bytes, done.busy_s, done.cpu_s)
    )
    return parts, num_bytes, busy_s, cpu_s


def limiting(waits: Waits) -> Worst | None:
    """The rank that waits longest for decoding, if that is what the run waits for."""
    worst = worst_of(waits)
    return worst if worst is not None and worst.stage == STAGE and worst.share >= LIMITS else None


def verdict(waits: Waits, decoding: Decoding | None) -> str:
    """What to look at first, in a few sentences."""
    worst = limiting(waits)
    if worst is None:
        return sentence(waits)
    median = f"; the median rank waits {duration(worst.median_wait_s)} for that" if worst.stands_out else ""
    told = [
        f"Decoding limits: rank {worst.rank} waits {duration(worst.wait_s)} a step for decode, "
        f"{worst.share:.0%} of its time{median}."
    ]
    if worst.others_follow:
        told.append("The ranks that it serves wait with it.")
    if decoding is not None and worst.rank in decoding.ranks:
        row = int(np.searchsorted(decoding.ranks, worst.rank))
        told.append(advice(decoding.workers, float(decoding.busy[row]), float(decoding.of_a_core[row])))
    return " ".join(told)


def advice(workers: int, busy: float, of_a_core: float) -> str:
    """What to do where decoding limits. busy, of_a_core: of the rank; see `Decoding`."""
    if not workers:
        return "Its reading thread decodes: let processes do that ahead, by Multimodal(workers=...)."
    many = f"Its {counted(workers, 'worker')} {'is' if workers == 1 else 'are'} busy {busy:.0%} of the time"
    if busy < _BUSY:
        return (
            f"{many}, so more of them do not help: single parts take long, or the parts of a step are fewer "
            f"than workers. Make parts smaller, or their processor faster."
        )
    if of_a_core < _OF_A_CORE:
        return (
            f"{many} and get {of_a_core:.0%} of a core each: the processor waits for something, or this "
            f"machine has too few cores for its ranks and workers."
        )
    return f"{many}: give it more by Multimodal(workers=...), if cores are free, or make parts smaller."


def figures(decoding: Decoding, waits: Waits) -> dict[str, Any]:
    """For scripts, JSON-able: whether it limits, workers of a rank, and by rank what a second brought."""
    columns = zip(
        decoding.ranks.tolist(),
        (decoding.parts / np.maximum(decoding.seconds, 1e-9)).tolist(),
        (decoding.num_bytes / np.maximum(decoding.seconds, 1e-9)).tolist(),
        decoding.busy.tolist(),
        decoding.of_a_core.tolist(),
    )
    names = ("rank", "parts_per_s", "bytes_per_s", "busy", "of_a_core")
    return {
        "limits": limiting(waits) is not None,
        "workers": decoding.workers,
        "ranks": [dict(zip(names, each)) for each in columns],
    }
