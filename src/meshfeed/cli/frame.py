"""The current state of a run, computed from its log, for `meshfeed watch`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from meshfeed.metrics import FOLLOWS
from meshfeed.report import MixtureHistory, RunHistory, Start
from meshfeed.report.history.decoding import LIMITS, STAGE, RankDecoding, decoded_in

Does = Literal["waits", "works"]
Floats = npt.NDArray[np.float64]

_SILENT_S, _SILENT_STEPS = 30.0, 5
_LEAST_S, _LEAST_PART = 0.001, 0.05  # by which a straggler must stand out: seconds, part of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of one rank. Means are over its last steps, without the first step; None with too few steps.

    Attributes:
        rank, coord, host: which rank.
        step: the last that it got; None before the first.
        behind: steps that it is behind the foremost rank.
        step_s: seconds from one step to the next.
        wait_s: stage -> seconds per step that the loop waited.
        work_s: stage -> seconds per step that the producer spent.
        tokens_per_s: of the global batch, at this rank's speed.
        queue_depth: steps that are ready, at the last step.
        bytes_per_s: read by this rank.
        padding: share of the padded tokens; None without packing.
        decoded: images, audio and videos that it decoded; None for none.
        quiet_s: seconds since its last entry in the log.
        silent_s: the same if that is long, else None.
    """

    rank: int
    coord: Mapping[str, int]
    host: str
    step: int | None
    behind: int
    step_s: float | None
    wait_s: Mapping[str, float]
    work_s: Mapping[str, float]
    tokens_per_s: float | None
    queue_depth: int
    bytes_per_s: float | None
    padding: float | None
    decoded: RankDecoding | None
    quiet_s: float
    silent_s: float | None

    @property
    def own_wait_s(self) -> float:
        """Seconds per step that it waited for its own work, not for another rank."""
        return sum(seconds for stage, seconds in self.wait_s.items() if stage not in FOLLOWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank and stage that differ most from the others.

    Attributes:
        rank, stage: which.
        does: "waits": its loop waits; "works": its producer is slow, but prefetching hides it so far.
        seconds: per step.
        usual_s: median seconds per step of the other ranks in this stage.
        num_others: other ranks that are as slow in this stage.
    """

    rank: int
    stage: str
    does: Does
    seconds: float
    usual_s: float
    num_others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One source of a mixture: its share of recent sequences, and the share by the recipe."""

    name: str
    realised: float
    asked: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The state of a run.

    Attributes:
        num_starts: of the job; 0 before the first.
        start: the last one; None before the first.
        step: the last that any rank got; None before the first.
        step_s, tokens_per_s: of the median rank.
        stages: those in which some rank waited, in order.
        ranks: of the last start, worst first: silent ones, then by waits for their own work.
        missing: ranks of the last start without an entry in the log.
        straggler: None if no rank differs much.
        decode_limit: the rank that waits longest for decoding, if that limits; see `decode_limit_of`.
        mixture: by source; empty for a single source.
    """

    num_starts: int
    start: Start | None = None
    step: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    stages: tuple[str, ...] = ()
    ranks: tuple[Standing, ...] = ()
    missing: tuple[int, ...] = ()
    straggler: Straggler | None = None
    decode_limit: int | None = None
    mixture: tuple[Share, ...] = ()

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks without a recent entry in the log, ascending."""
        return tuple(sorted(each.rank for each in self.ranks if each.silent_s is not None))


def frame_of(
    history: RunHistory | None, now: float, *, steps: int = 20, silent_s: float | None = None
) -> Frame:
    """The state of a run at unix time `now`.

    history: None before there is a log. steps: number of last steps of each rank to average over. silent_s:
    a rank without an entry for so many seconds is silent; None for 30 s or five of its steps, if longer.
    """
    if history is None or not history.starts:
        return Frame(num_starts=0)
    last, told = history.starts[-1], set(history.starts[-1].ranks)
    ranks = [_standing(history, rank, now, steps, silent_s) for rank in last.ranks]
    step = max((each.step for each in ranks if each.step is not None), default=None)
    first = last.step - 1  # the step of a rank before its first
    if step is not None:
        ranks = [replace(each, behind=step - (first if each.step is None else each.step)) for each in ranks]
    ranks.sort(
        key=lambda each: (-(each.silent_s or 0), -each.own_wait_s, -sum(each.wait_s.values()), each.rank)
    )
    step_s = _median([each.step_s for each in ranks])
    return Frame(
        num_starts=len(history.starts),
        start=last,
        step=step,
        step_s=step_s,
        tokens_per_s=_median([each.tokens_per_s for each in ranks]),
        stages=tuple(name for name in history.stages if any(each.wait_s[name] > 0 for each in ranks)),
        ranks=tuple(ranks),
        missing=tuple(rank for rank in range(last.world_size) if rank not in told),
        straggler=straggler_of(ranks, history.stages, step_s or 0.0),
        decode_limit=decode_limit_of(ranks),
        mixture=shares_of(history.mixture),
    )


def decode_limit_of(ranks: Sequence[Standing]) -> int | None:
    """The rank that waits longest for decoding; None if that is little, or another rank waits longer for
    something of its own."""
    own = [
        (seconds, stage == STAGE and seconds >= LIMITS * each.step_s, each.rank)
        for each in ranks
        if each.step_s
        for stage, seconds in each.wait_s.items()
        if stage not in FOLLOWS
    ]
    _, limits, rank = max(own, default=(0.0, False, 0))
    return rank if limits else None


def straggler_of(ranks: Sequence[Standing], stages: Sequence[str], step_s: float) -> Straggler | None:
    """The rank that differs most from those that do the same: first by waits for its own work, then by waits
    for others, then by its own work alone."""
    ranks = sorted((each for each in ranks if each.step is not None), key=lambda each: each.rank)
    if len(ranks) < 2:
        return None
    own = [name for name in stages if name not in FOLLOWS]
    least = max(_LEAST_S, _LEAST_PART * step_s)
    ways: tuple[tuple[Does, Sequence[str]], ...] = (
        ("waits", own),
        ("waits", sorted(FOLLOWS)),
        ("works", own),
    )
    for does, names in ways:
        found = [_outlier(ranks, name, does, least) for name in names if name in stages]
        worst = max(filter(None, found), key=lambda each: each.seconds - each.usual_s, default=None)
        if worst is not None:
            return worst
    return None


def shares_of(mixture: MixtureHistory | None) -> tuple[Share, ...]:
    """The shares of the sources between the first and the last line about them; of a single line, in all."""
    if mixture is None or not len(mixture.steps):
        return ()
    drawn, asked = (
        each[-1] - each[0] if len(each) > 1 else each[0] for each in (mixture.drawn, mixture.asked)
    )
    total = drawn.sum()
    if total <= 0:
        return ()
    return tuple(
        Share(name=name, realised=float(part), asked=float(wanted))
        for name, part, wanted in zip(mixture.names, drawn / total, asked / total)
    )


def _standing(run: RunHistory, rank: int, now: float, steps: int, silent_s: float | None) -> Standing:
    history = run.ranks[rank]
    late = np.flatnonzero(history.start == len(run.starts) - 1)
    late = late[late.size > 1 :][-steps:]  # the first step of all is always slow
    time = history.time[late]
    span = float(time[-1] - time[0]) if late.size > 1 else 0.0
    step_s = span / (late.size - 1) if span > 0 else None
    padding = history.padding[late]
    limit = max(_SILENT_S, _SILENT_STEPS * (step_s or 0.0)) if silent_s is None else silent_s
    quiet = now - (float(time[-1]) if late.size else run.starts[-1].time)

    def mean(table: Floats) -> dict[str, float]:
        seconds = table[late].mean(axis=0) if late.size else np.zeros(len(run.stages))
        return dict(zip(run.stages, seconds.tolist()))

    def rate(amounts: npt.NDArray[np.int64]) -> float | None:
        return float(amounts[late[1:]].sum()) / span if span > 0 else None

    return Standing(
        rank=history.rank,
        coord=history.coord,
        host=history.host,
        step=int(history.step[late[-1]]) if late.size else None,
        behind=0,
        step_s=step_s,
        wait_s=mean(history.wait),
        work_s=mean(history.work),
        tokens_per_s=rate(history.tokens),
        queue_depth=int(history.queue_depth[late[-1]]) if late.size else 0,
        bytes_per_s=rate(history.bytes_read),
        decoded=decoded_in(history, late[1:], span, run.starts[-1].decode_workers or 0),
        padding=float(np.nanmean(padding)) if late.size and not np.isnan(padding).all() else None,
        quiet_s=max(quiet, 0.0),
        silent_s=quiet if quiet > limit else None,
    )


def _outlier(ranks: Sequence[Standing], stage: str, does: Does, least: float) -> Straggler | None:
    """The rank that differs most in a stage, among the ranks that do it."""
    peers = [each for each in ranks if each.work_s[stage] > 0 or each.wait_s[stage] > 0]
    if not peers or (does == "works" and len(peers) < 2):  # a reader for many works alone
        return None
    seconds = np.array([(each.wait_s if does == "waits" else each.work_s)[stage] for each in peers])
    worst = int(seconds.argmax())
    others = np.delete(seconds, worst)
    usual = float(np.median(others)) if others.size else 0.0
    if seconds[worst] - usual < least:
        return None
    return Straggler(
        rank=peers[worst].rank,
        stage=stage,
        does=does,
        seconds=float(seconds[worst]),
        usual_s=usual,
        num_others=int((others - usual >= least).sum()),
    )


def _median(found: Sequence[float | None]) -> float | None:
    known = [each for each in found if each is not None]
    return float(np.median(known)) if known else None
