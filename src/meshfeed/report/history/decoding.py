"""What the ranks of a run decoded, whether decoding is the bottleneck, and what to do if it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshfeed.report.history.loop import seconds_of
from meshfeed.report.history.waits import Waits, Worst, sentence, worst_of
from meshfeed.report.reader import RankHistory, RunHistory
from meshfeed.report.words import counted, duration

STAGE = "decode"
LIMITS = 0.05
"""Decoding is the bottleneck if a rank waits for it this share of its time, and not longer for others."""

_BUSY, _OF_A_CORE = 0.8, 0.6


@dataclass(frozen=True, slots=True)
class RankDecoding:
    """What one rank decoded in some time.

    Attributes:
        workers: its processes; 0 for its reading thread.
        parts: images, audio and videos.
        parts_per_s, bytes_per_s: rates; bytes before decoding.
        busy: share of the time in which a worker decoded, mean of all workers, 0 to 1.
        of_a_core: CPU seconds of a second of decoding.
    """

    workers: int
    parts: int
    parts_per_s: float
    bytes_per_s: float
    busy: float
    of_a_core: float


def decoded_in(rank: RankHistory, steps: np.ndarray, seconds: float, workers: int) -> RankDecoding | None:
    """What a rank decoded in the steps at some indices, which took `seconds`; None for nothing."""
    done = rank.decoded
    if done is None or not seconds > 0 or not np.nansum(done.parts[steps]):
        return None
    parts, num_bytes, busy_s, cpu_s = (
        float(np.nansum(values[steps])) for values in (done.parts, done.num_bytes, done.busy_s, done.cpu_s)
    )
    return RankDecoding(
        workers=workers,
        parts=int(parts),
        parts_per_s=parts / seconds,
        bytes_per_s=num_bytes / seconds,
        busy=min(busy_s / (seconds * max(workers, 1)), 1.0),
        of_a_core=cpu_s / busy_s if busy_s > 0 else 1.0,
    )


def decoded_of(history: RunHistory) -> dict[int, RankDecoding]:
    """What each rank decoded, with the workers of the last start; empty for a run that decodes nothing.

    Omits the first step of each start, and unfinished steps.
    """
    workers = [start.decode_workers for start in history.starts]
    last = next((number for number in reversed(workers) if number is not None), None)
    if last is None:
        return {}
    like_last = np.array([number == last for number in workers])
    found: dict[int, RankDecoding] = {}
    for number, rank in sorted(history.ranks.items()):
        seconds = seconds_of(rank)
        steady = (np.diff(rank.start, prepend=-1) <= 0) & np.isfinite(seconds) & like_last[rank.start]
        if done := decoded_in(rank, np.flatnonzero(steady), float(seconds[steady].sum()), last):
            found[number] = done
    return found


def limiting(waits: Waits) -> Worst | None:
    """The rank that waits longest for decoding, if decoding is the bottleneck."""
    worst = worst_of(waits)
    return worst if worst is not None and worst.stage == STAGE and worst.share >= LIMITS else None


def verdict(waits: Waits, decoded: Mapping[int, RankDecoding]) -> str:
    """What to look at first, in a few sentences."""
    worst = limiting(waits)
    if worst is None:
        return sentence(waits)
    text = (
        f"Decoding is the bottleneck: rank {worst.rank} waits {duration(worst.wait_s)} a step for decode, "
        f"{worst.share:.0%} of its time."
    )
    if worst.others_follow:
        text += " The ranks that it serves wait with it."
    return f"{text} {advice(decoded[worst.rank])}" if worst.rank in decoded else text


def advice(decoded: RankDecoding) -> str:
    """What to do on a rank where decoding is the bottleneck."""
    if not decoded.workers:
        return "Its reading thread decodes: let processes do that ahead, by mf.Machine(workers=...)."
    are = "is" if decoded.workers == 1 else "are"
    many = f"Its {counted(decoded.workers, 'worker')} {are} busy {decoded.busy:.0%} of the time"
    if decoded.busy < _BUSY:
        return (
            f"{many}, so more of them do not help: single parts take long, or the parts of a step are fewer "
            f"than workers. Make parts smaller, or their processor faster."
        )
    if decoded.of_a_core < _OF_A_CORE:
        return (
            f"{many}, with {decoded.of_a_core:.0%} of a core: this machine has too few cores for its ranks "
            f"and workers, or the processor waits for something."
        )
    return f"{many}: give it more by mf.Machine(workers=...), if cores are free, or make parts smaller."


def figures(waits: Waits, decoded: Mapping[int, RankDecoding]) -> dict[str, Any]:
    """Whether decoding is the bottleneck, and what each rank decoded; JSON-able."""
    ranks = [{"rank": rank} | asdict(done) for rank, done in decoded.items()]
    return {"limits": limiting(waits) is not None, "ranks": ranks}
