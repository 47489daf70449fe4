"""The planner beside its peers: quality, microbatches, time and failures, all in one run.

    python benchmarks/bench_planner.py --traces DIR

Peers: Megatron-core's BalancedCPScheduler, out of the installed megatron-core; the rule of its
DpBalancedScheduler, which no published version has yet (written here from its description: next-fit in
stream order, then packs split from the tail); and a Karmarkar-Karp partition at the smallest fixed cp that
holds the longest sequence.

E = (sum of work / ranks) / sum over microbatches of the largest load of a rank, with work = 25,100 s + s^2, split
evenly over a cp group. A peer fails where it raises, loses a sequence or puts more tokens on a rank than fit.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshfeed.plan import CostModel, Packing, plan_step

Lengths = npt.NDArray[np.int64]
CAPACITY = 16_384
COST = CostModel(alpha=25_100)
SIZES = ((8, 256), (32, 1024), (256, 4096))
DEFAULT_TRACES = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "lengths"


@dataclass
class Outcome:
    """One scheduler on one trace. loads: work and tokens of every rank, float64 [num_microbatches, ranks]
    each."""

    name: str
    time_ms: float
    work: npt.NDArray[np.float64] | None = None
    tokens: npt.NDArray[np.float64] | None = None
    mean_cp: float = math.nan
    failure: str = ""

    def efficiency(self) -> float:
        return (
            math.nan
            if self.work is None
            else float(self.work.sum() / self.work.shape[1] / self.work.max(axis=1).sum())
        )


def placed(
    lengths: Lengths, groups: list[list[list[int]]], ranks: int
) -> tuple[npt.NDArray, npt.NDArray, float, str]:
    """Work and tokens per rank from the sequence ids that each microbatch gives to each rank, and what is
    wrong."""
    work, tokens = np.zeros((len(groups), ranks)), np.zeros((len(groups), ranks))
    each = COST.work(lengths)
    seen = np.zeros(lengths.size, bool)
    token_ranks = 0
    for m, of_rank in enumerate(groups):
        spread: dict[int, int] = {}
        for ids in of_rank:
            for i in ids:
                spread[i] = spread.get(i, 0) + 1
        for rank, ids in enumerate(of_rank):
            for i in ids:
                work[m, rank] += each[i] / spread[i]
                tokens[m, rank] += lengths[i] / spread[i]
        for i, ranks_of_it in spread.items():
            seen[i] = True
            token_ranks += int(lengths[i]) * ranks_of_it
    wrong = "" if seen.all() else f"{(~seen).sum()} sequences lost"
    if tokens.max() > CAPACITY:
        wrong = f"{tokens.max() / CAPACITY:.2f} x the token cap"
    return work, tokens, token_ranks / lengths.sum(), wrong


def timed(name: str, lengths: Lengths, ranks: int, schedule: Callable[[], list[list[list[int]]]]) -> Outcome:
    """Run a scheduler that returns sequence ids per microbatch and rank."""
    start = time.perf_counter()
    try:
        groups = schedule()
    except Exception as error:  # a peer may fail in any way
        return Outcome(
            name, (time.perf_counter() - start) * 1e3, failure=f"{type(error).__name__}: {error}"[:60]
        )
    spent = (time.perf_counter() - start) * 1e3
    work, tokens, mean_cp, wrong = placed(lengths, groups, ranks)
    return Outcome(name, spent, work, tokens, mean_cp, wrong)


# -- ours ----------------------------------------------------------------------------------------------


def ours(name: str, lengths: Lengths, ranks: int, policy: str, microbatches: int | None = None) -> Outcome:
    cp = 1 if policy == "dynamic_cp" else fixed_cp(lengths, ranks)
    packing = Packing(capacity=CAPACITY, policy=policy, cost=COST, microbatches=microbatches)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        plan = plan_step(lengths, packing, dp=ranks // cp, cp=cp)
        best = min(best, (time.perf_counter() - start) * 1e3)
    groups: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(plan.num_microbatches)]
    for i, (m, first, size) in enumerate(
        zip(plan.microbatch.tolist(), plan.first_rank.tolist(), plan.cp_size.tolist())
    ):
        for rank in range(first, first + size):
            groups[m][rank].append(i)
    work, tokens, mean_cp, wrong = placed(lengths, groups, ranks)
    return Outcome(name, best, work, tokens, mean_cp, wrong)


def fixed_cp(lengths: Lengths, ranks: int) -> int:
    """The smallest power-of-two cp whose group holds the longest sequence; all ranks where none does."""
    cp = 1
    while cp * CAPACITY < lengths.max() and cp < ranks:
        cp *= 2
    return cp


# -- peers ---------------------------------------------------------------------------------------------


def megatron_balanced_cp(lengths: Lengths, ranks: int) -> list[list[list[int]]]:
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Group:  # all that it asks of a process group
        def size(self) -> int:
            return ranks

    scheduler = BalancedCPScheduler(CAPACITY, Group())
    return scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)[1]


def megatron_dp_balanced(lengths: Lengths, ranks: int) -> list[list[list[int]]]:
    cp = fixed_cp(lengths, ranks)
    dp = ranks // cp
    packs: list[list[int]] = [[]]
    for i, length in enumerate(lengths.tolist()):
        if sum(lengths[packs[-1]]) + length > CAPACITY * cp:
            packs.append([])
        packs[-1].append(i)
    from_tail = len(packs) - 1
    while len(packs) % dp:
        if from_tail < 0:
            raise ValueError("too few sequences to split")
        if len(packs[from_tail]) > 1:
            packs.append([packs[from_tail].pop()])
        else:
            from_tail -= 1
    return [[packs[m + rank // cp] for rank in range(ranks)] for m in range(0, len(packs), dp)]


def karmarkar_karp(lengths: Lengths, ranks: int, extra: int) -> list[list[list[int]]]:
    """Largest differencing into dp x microbatches parts, sorted by work, dp of them to a microbatch."""
    cp = fixed_cp(lengths, ranks)
    dp = ranks // cp
    parts = dp * (math.ceil(lengths.sum() / (ranks * CAPACITY)) + extra)
    # a state: (minus its spread, tie, [(work, ids)] by descending work)
    states = [
        (-work, i, [(work, (i,))] + [(0.0, ())] * (parts - 1))
        for i, work in enumerate(COST.work(lengths).tolist())
    ]
    heapq.heapify(states)
    tie = len(states)
    while len(states) > 1:
        _, _, first = heapq.heappop(states)
        _, _, second = heapq.heappop(states)
        merged = sorted(
            ((a + b, ids + others) for (a, ids), (b, others) in zip(first, reversed(second))),
            key=lambda part: -part[0],
        )
        tie += 1
        heapq.heappush(states, (merged[-1][0] - merged[0][0], tie, merged))
    chosen = [list(ids) for _, ids in states[0][2]]
    return [[chosen[m + rank // cp] for rank in range(ranks)] for m in range(0, parts, dp)]


# -- runs ----------------------------------------------------------------------------------------------


def schedulers(lengths: Lengths, ranks: int) -> Iterator[Outcome]:
    least = ours("dynamic_cp", lengths, ranks, "dynamic_cp")
    yield least
    count = len(least.work) if least.work is not None else 0
    yield ours("dynamic_cp + 2", lengths, ranks, "dynamic_cp", count + 2)
    yield ours("balanced", lengths, ranks, "balanced")
    yield ours("in_order", lengths, ranks, "in_order")
    yield timed("mcore BalancedCP", lengths, ranks, lambda: megatron_balanced_cp(lengths, ranks))
    yield timed("mcore dp_balanced", lengths, ranks, lambda: megatron_dp_balanced(lengths, ranks))
    yield timed("Karmarkar-Karp", lengths, ranks, lambda: karmarkar_karp(lengths, ranks, 0))
    yield timed("Karmarkar-Karp + 2", lengths, ranks, lambda: karmarkar_karp(lengths, ranks, 2))


def compare(traces: dict[str, Lengths]) -> None:
    """Print every scheduler on every trace, then means and totals."""
    print(
        f"{'trace':<14}{'ranks':>6}{'seqs':>6}  {'scheduler':<20}{'mb':>4}{'E':>9}{'mean cp':>9}{'ms':>11}  failure"
    )
    means: dict[str, list[Outcome]] = {}
    worse: list[str] = []
    for name, trace in traces.items():
        for ranks, n in SIZES:
            if trace.size < n:
                continue
            outcomes = list(schedulers(trace[:n], ranks))
            for out in outcomes:
                means.setdefault(out.name, []).append(out)
                count = "-" if out.work is None else str(len(out.work))
                print(
                    f"{name:<14}{ranks:>6}{n:>6}  {out.name:<20}{count:>4}{out.efficiency():>9.4f}"
                    f"{out.mean_cp:>9.1f}{out.time_ms:>11.1f}  {out.failure}"
                )
            best = max(out.efficiency() for out in outcomes[:2])
            worse += [
                f"{name} R={ranks}: {out.name} {out.efficiency():.4f} > {best:.4f}"
                for out in outcomes[4:]
                if not out.failure and out.efficiency() > best
            ]
    print()
    for name, outcomes in means.items():
        sound = [out.efficiency() for out in outcomes if not out.failure]
        mean = np.mean(sound) if sound else math.nan
        print(f"mean of {name:<20} E {mean:.4f} over {len(sound)} sound of {len(outcomes)}")
    print("beaten by a sound peer:", "; ".join(worse) or "never")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of lengths, one per line")
    options = parser.parse_args()
    files = sorted(options.traces.glob("*.txt"))
    if not files:
        parser.error(f"no *.txt in {options.traces}; pass --traces DIR")
    compare({file.stem: np.loadtxt(file, dtype=np.int64) for file in files})


if __name__ == "__main__":
    main()
