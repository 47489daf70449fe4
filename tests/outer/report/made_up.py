"""Histories of runs that never were: any number of ranks, steps and starts, with waits where a test wants them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshfeed.report import MixtureHistory, RankHistory, RunHistory, Start

STAGES = ("start", "plan", "read", "exchange", "deliver", "build", "copy", "verify", "other")


def history(
    num_ranks: int = 8,
    spans: Sequence[tuple[int, int]] = ((0, 40),),
    *,
    slow: dict[int, float] | None = None,
    spikes: dict[tuple[int, int], float] | None = None,
    mixture: bool = True,
    seed: int = 0,
) -> RunHistory:
    """A run. spans: (first step, step after the last) of each start. slow: rank -> seconds that it waits for read
    in every step. spikes: (rank, step) -> seconds."""
    rng = np.random.default_rng(seed)
    step = np.concatenate([np.arange(low, high) for low, high in spans] or [np.zeros(0, np.int64)])
    start = np.repeat(np.arange(len(spans)), [high - low for low, high in spans])
    n = len(step)
    first = np.diff(start, prepend=-1) > 0
    begin = 1.7e9 + np.arange(n) * 1.2 + start * 90.0
    ranks: dict[int, RankHistory] = {}
    for rank in range(num_ranks):
        wait = np.zeros((n, len(STAGES)))
        wait[:, 2] = rng.exponential(2e-4, n) * (rng.random(n) < 0.3)
        wait[:, 4] = rng.exponential(1e-4, n)
        wait[first, 0] = 0.08 + 0.02 * rng.random(int(first.sum()))
        wait[first, 1] = 0.03
        wait[:, 2] += (slow or {}).get(rank, 0.0)
        for (whose, when), seconds in (spikes or {}).items():
            if whose == rank:
                wait[step == when, 2] += seconds
        work = np.zeros_like(wait)
        work[:, 1], work[:, 2], work[:, 4] = 0.004, rng.gamma(4, 0.01, n) + wait[:, 2], 0.002
        work[:, 5], work[:, 6] = rng.gamma(4, 0.002, n), 0.001
        seconds = 1.0 + rng.gamma(2, 0.02, n) + wait.sum(axis=1)
        seconds[np.append(np.diff(start) > 0, True)[:n]] = np.nan
        ranks[rank] = RankHistory(
            rank=rank,
            coord={"tp": rank % 2, "cp": 0, "dp": rank // 2, "pp": 0},
            host=f"node{rank // 8:04d}",
            pid=1000 + rank,
            start=start,
            step=step,
            time=begin + rng.random(n) * 0.02,
            seconds=seconds,
            wait=wait,
            work=work,
            queue_depth=rng.integers(0, 3, n),
            bytes_read=rng.integers(10 << 20, 12 << 20, n),
            bytes_fetched=rng.integers(10 << 20, 12 << 20, n) * (rank % 8 == 0) * 8,
            delivered_bytes=rng.integers(1 << 20, 2 << 20, n),
            opens=np.zeros(n, np.int64),
            collectives=np.ones(n, np.int64),
            tokens=np.full(n, 1 << 20),
            padding=rng.beta(2, 60, n),
            imbalance=1 + rng.beta(2, 50, n),
        )
    starts = tuple(
        Start(
            time=float(begin[start == number][0]) - 1 if (start == number).any() else 1.7e9,
            step=low,
            layout=f"tp2-dp{num_ranks // 2}" if number % 2 == 0 else f"cp2-dp{num_ranks // 2}",
            world_size=num_ranks,
            delivery="share",
            fingerprint="3f9a1c0be57d",
            hosts=tuple(sorted({each.host for each in ranks.values()})),
            meshfeed="0.1.0",
            ranks=tuple(ranks),
        )
        for number, (low, _) in enumerate(spans)
    )
    return RunHistory(starts=starts, ranks=ranks, stages=STAGES, mixture=mixed(step) if mixture else None)


def mixed(step: np.ndarray) -> MixtureHistory:
    """Three sources of fixed shares, a batch of 64."""
    steps = np.unique(step)
    asked = np.arange(1, len(steps) + 1)[:, None] * 64 * np.array([0.6, 0.3, 0.1])
    drawn = np.floor(asked).astype(np.int64)
    drawn[:, 0] += np.arange(1, len(steps) + 1) * 64 - drawn.sum(axis=1)
    return MixtureHistory(names=("web", "code", "math"), steps=steps, drawn=drawn, asked=asked)
