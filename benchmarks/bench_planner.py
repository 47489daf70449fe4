"""The planner beside its peers: quality, microbatches, time and failures, all in one run.

Peers: Megatron-core's BalancedCPScheduler, out of the installed megatron-core; the rule of its
DpBalancedScheduler, which no published version has yet (0.16.1 has not; written here from its description:
next-fit in stream order, then packs split from the tail); and a Karmarkar-Karp partition, at the smallest
fixed cp that holds the longest sequence. With a checkout of Megatron-LM's dev branch, its schedulers too: see
newest_megatron.py.

E = (sum of work / ranks) / sum over microbatches of the largest load of a rank, with work = 25,100 s + s^2,
split evenly over a cp group. A peer fails where it raises, loses a sequence or puts more tokens on a rank
than the cap. Mean cp is weighed by tokens: E counts no communication, so of two plans with equal E the one
with the smaller mean cp is better. Beside the dev branch, step times also count keys and values that pass
between nodes.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import measure
import newest_megatron
import numpy as np
import numpy.typing as npt
from measure import Row

from least_microbatches import microbatch_bound
from meshfeed.plan import CostModel, Packing, plan_step
from meshfeed.plan.packing import room_of

Lengths = npt.NDArray[np.int64]
CAPACITY = 16_384
COST = CostModel(alpha=25_100)
SIZES = ((8, 256), (32, 1024), (256, 4096))
NO_POWERS = ((3, 96), (5, 160), (6, 200), (7, 224), (12, 384), (24, 768), (56, 1500))
OTHER_SIZES = ((8, 200), (10, 300), (64, 1500), (1024, 16_384))
TRACES = Path(__file__).parent / "data"
BALANCED, DP_BALANCED = "Megatron-core's BalancedCPScheduler", "the rule of DpBalancedScheduler"
NEWEST, NEWEST_IN_ORDER = (
    f"Megatron-LM dev's {name}" for name in ("DefaultDynamicCPScheduler", "DpBalancedScheduler")
)
ACROSS_NODES = CostModel(alpha=25_100, ring_tokens=6_000)


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

    @property
    def count(self) -> int:
        """Microbatches; 0 where it gave none."""
        return 0 if self.work is None else len(self.work)

    def efficiency(self) -> float:
        return (
            math.nan
            if self.work is None
            else float(self.work.sum() / self.work.shape[1] / self.work.max(axis=1).sum())
        )


def placed(
    lengths: Lengths, groups: list[list[list[int]]], ranks: int, cost: CostModel
) -> tuple[npt.NDArray, npt.NDArray, float, str]:
    """Work and tokens per rank from the sequence ids that each microbatch gives to each rank, and what is
    wrong."""
    work, tokens = np.zeros((len(groups), ranks)), np.zeros((len(groups), ranks))
    loads: dict[int, npt.NDArray[np.float64]] = {}
    seen = np.zeros(lengths.size, bool)
    token_ranks = 0
    for m, of_rank in enumerate(groups):
        spread: dict[int, int] = {}
        for ids in of_rank:
            for i in ids:
                spread[i] = spread.get(i, 0) + 1
        for rank, ids in enumerate(of_rank):
            for i in ids:
                size = spread[i]
                if size not in loads:
                    loads[size] = cost.load(lengths, size)
                work[m, rank] += loads[size][i]
                tokens[m, rank] += lengths[i] / size
        for i, ranks_of_it in spread.items():
            seen[i] = True
            token_ranks += int(lengths[i]) * ranks_of_it
    wrong = "" if seen.all() else f"{(~seen).sum()} sequences lost"
    if tokens.max() > CAPACITY:
        wrong = f"{tokens.max() / CAPACITY:.2f} x the token cap"
    return work, tokens, token_ranks / lengths.sum(), wrong


def timed(
    name: str,
    lengths: Lengths,
    ranks: int,
    schedule: Callable[[], list[list[list[int]]]],
    cost: CostModel = COST,
) -> Outcome:
    """Run a scheduler that returns sequence ids per microbatch and rank."""
    start = time.perf_counter()
    try:
        groups = schedule()
    except Exception as error:  # a peer may fail in any way
        return Outcome(
            name, (time.perf_counter() - start) * 1e3, failure=f"{type(error).__name__}: {error}"[:60]
        )
    spent = (time.perf_counter() - start) * 1e3
    work, tokens, mean_cp, wrong = placed(lengths, groups, ranks, cost)
    return Outcome(name, spent, work, tokens, mean_cp, wrong)


# -- ours ----------------------------------------------------------------------------------------------


def ours(name: str, lengths: Lengths, ranks: int, policy: str, **choices: Any) -> Outcome:
    """A plan of meshfeed; the best time of three."""
    cp = 1 if policy == "dynamic_cp" else fixed_cp(lengths, ranks)
    packing = Packing(**{"capacity": CAPACITY, "policy": policy, "cost": COST, **choices})
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
    work, tokens, mean_cp, wrong = placed(lengths, groups, ranks, packing.cost)
    return Outcome(name, best, work, tokens, mean_cp, wrong)


def fixed_cp(lengths: Lengths, ranks: int) -> int:
    """The smallest power-of-two cp whose group holds the longest sequence; all ranks where none does."""
    cp = 1
    while cp * CAPACITY < lengths.max() and cp < ranks:
        cp *= 2
    return cp


# -- peers ---------------------------------------------------------------------------------------------


def megatron_balanced_cp(lengths: Lengths, ranks: int) -> list[list[list[int]]]:
    """Sequence ids per microbatch and rank, by the installed megatron-core."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Group:  # all that it asks of a process group
        def size(self) -> int:
            return ranks

    scheduler = BalancedCPScheduler(CAPACITY, Group())
    return scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)[1]


def megatron_dp_balanced(
    lengths: Lengths, ranks: int, max_sequences: int | None = None
) -> list[list[list[int]]]:
    """The rule of DpBalancedScheduler, which no published megatron-core has."""
    cp = fixed_cp(lengths, ranks)
    dp = ranks // cp
    packs: list[list[int]] = [[]]
    for i, length in enumerate(lengths.tolist()):
        if sum(lengths[packs[-1]]) + length > CAPACITY * cp or len(packs[-1]) == max_sequences:
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
    chosen = largest_differencing(COST.work(lengths).tolist(), parts)
    return [[chosen[m + rank // cp] for rank in range(ranks)] for m in range(0, parts, dp)]


def largest_differencing(work: list[float], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """The ids of each part, by descending work.

    equal_size: each part has as many ids; parts divides their number.
    """
    # a state: (minus its spread, tie, [(work, ids)] by descending work)
    order = sorted(range(len(work)), key=lambda i: work[i]) if equal_size else list(range(len(work)))
    at_once = parts if equal_size else 1
    states = []
    for tie, first in enumerate(range(0, len(work), at_once)):
        some = [(work[i], (i,)) for i in reversed(order[first : first + at_once])]
        some += [(0.0, ())] * (parts - at_once)
        states.append((some[-1][0] - some[0][0], tie, some))
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
    return [list(ids) for _, ids in states[0][2]]


# -- runs ----------------------------------------------------------------------------------------------


def schedulers(lengths: Lengths, ranks: int) -> Iterator[Outcome]:
    """Every scheduler on one trace, ours first."""
    yield ours("dynamic_cp", lengths, ranks, "dynamic_cp")
    least = ours("dynamic_cp, fewest", lengths, ranks, "dynamic_cp", microbatches="fewest")
    yield least
    count = len(least.work) if least.work is not None else 0
    yield ours("dynamic_cp + 2", lengths, ranks, "dynamic_cp", microbatches=count + 2)
    yield ours("balanced", lengths, ranks, "balanced")
    yield ours("in_order", lengths, ranks, "in_order")
    yield timed(BALANCED, lengths, ranks, lambda: megatron_balanced_cp(lengths, ranks))
    yield timed(DP_BALANCED, lengths, ranks, lambda: megatron_dp_balanced(lengths, ranks))
    yield timed("Karmarkar-Karp", lengths, ranks, lambda: karmarkar_karp(lengths, ranks, 0))
    yield timed("Karmarkar-Karp + 2", lengths, ranks, lambda: karmarkar_karp(lengths, ranks, 2))


def compare(traces: dict[str, Lengths], sizes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """Every scheduler on every trace: balance, failures, and at 256 ranks the time."""
    by_name: dict[str, list[Outcome]] = {}
    planning: list[float] = []
    ahead = 0
    for name, trace in traces.items():
        for ranks, n in sizes:
            if trace.size < n:
                continue
            outcomes = list(schedulers(trace[:n], ranks))
            planning.append(planning_ratio(trace[:n], ranks))
            for out in outcomes:
                by_name.setdefault(out.name, []).append(out)
                print(
                    f"{name:<13}{ranks:>5} ranks{n:>6} sequences  {out.name:<28}{out.count:>3} microbatches, "
                    f"E {out.efficiency():.4f}, mean cp {out.mean_cp:.1f}, {out.time_ms:.1f} ms "
                    f"{out.failure}"
                )
            own = max(out.efficiency() for out in outcomes[:5] if not out.failure)
            sound = [out.efficiency() for out in outcomes[6:] if not out.failure]
            ahead += sum(found > own * (1 + 1e-9) for found in sound)
            what = f"{ranks} ranks, {n:,} sequences, {name}"
            yield Row(name=f"E of dynamic_cp, {what}", value=outcomes[0].efficiency(), unit="")
            if sound:
                yield Row(name=f"E of the best peer whose plan is sound, {what}", value=max(sound), unit="")
            if ranks == 256:
                yield from speed_of(name, {out.name: out for out in outcomes})
    yield from chosen_beside_fewest(by_name["dynamic_cp"], by_name["dynamic_cp, fewest"], planning)
    aims = {"dynamic_cp": 0.99, "dynamic_cp, fewest": 0.97}
    for name, outcomes in by_name.items():
        sound = [out.efficiency() for out in outcomes if not out.failure]
        if sound:
            yield Row(
                name=f"mean E, {name}",
                value=float(np.mean(sound)),
                unit="",
                aim=aims.get(name),
                at_least=True,
            )
        yield Row(name=f"plans that fail, {name}", value=100 * (1 - len(sound) / len(outcomes)), unit="%")
    yield Row(name="traces on which a sound peer has a higher E", value=ahead, unit="", aim=0)


def step_time(outcome: Outcome) -> float:
    """Of a step without a pipeline, in units of work."""
    assert outcome.work is not None
    return float(outcome.work.max(axis=1).sum()) + len(outcome.work) * COST.microbatch_overhead


def planning_ratio(lengths: Lengths, ranks: int) -> float:
    """CPU time of planning the chosen number of microbatches over that of the fewest; best of seven."""
    best = {None: math.inf, "fewest": math.inf}
    for _ in range(7):
        for asked in best:
            packing = Packing(capacity=CAPACITY, policy="dynamic_cp", cost=COST, microbatches=asked)
            start = time.process_time()
            plan_step(lengths, packing, dp=ranks)
            best[asked] = min(best[asked], time.process_time() - start)
    return best[None] / best["fewest"]


def chosen_beside_fewest(
    chosen: list[Outcome], fewest: list[Outcome], planning: list[float]
) -> Iterator[Row]:
    """What it gains that a plan chooses the number of microbatches, and what it costs."""
    against = "the fewest microbatches"
    steps = [step_time(own) / step_time(least) for own, least in zip(chosen, fewest)]
    for name, values in (("step time", steps), ("CPU time", planning)):
        yield Row(name=f"{name} of dynamic_cp, the worst", against=against, value=max(values))
        yield Row(name=f"{name} of dynamic_cp, mean", against=against, value=float(np.mean(values)), aim=1.0)


def speed_of(trace: str, outcomes: dict[str, Outcome]) -> Iterator[Row]:
    """How much faster 4,096 sequences are planned than by Megatron-core."""
    for own in ("dynamic_cp", "dynamic_cp, fewest", "dynamic_cp + 2"):
        yield Row(
            name=f"speed of {own}, 256 ranks, 4,096 sequences, {trace}",
            against=BALANCED,
            value=outcomes[BALANCED].time_ms / outcomes[own].time_ms,
            aim=50.0,
            at_least=True,
        )


def other_lengths(rng: np.random.Generator, n: int) -> dict[str, Lengths]:
    """Distributions that nothing here was tuned to."""
    drawn = {
        "lognormal": rng.lognormal(8, 1.3, n),
        "uniform": rng.uniform(1, 60_000, n),
        "bimodal": np.where(rng.random(n) < 0.1, rng.uniform(5e4, 1e5, n), rng.uniform(100, 900, n)),
        "all 10,000": np.full(n, 10_000),
        "9,000 or 700": np.where(rng.random(n) < 0.5, 9000, 700),
        "exponential": rng.exponential(6000, n) + 1,
        "pareto": rng.pareto(1.1, n) * 500 + 10,
        "7,800-8,200": rng.uniform(7800, 8200, n),
    }
    return {name: np.clip(lengths, 1, 131_072).astype(np.int64) for name, lengths in drawn.items()}


def elsewhere(sizes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """Other distributions, other rank counts, and the largest size: the worst of each."""
    for ranks, n in sizes:
        least, more, spent, over = 1.0, 1.0, 0.0, 0
        for name, lengths in other_lengths(np.random.default_rng(ranks), n).items():
            out = ours(name, lengths, ranks, "dynamic_cp", microbatches="fewest")
            assert out.work is not None and not out.failure, out.failure
            chosen = ours(name, lengths, ranks, "dynamic_cp")
            packing = Packing(capacity=CAPACITY, policy="dynamic_cp")
            bound = microbatch_bound(lengths, packing, room_of(packing, dp=ranks, cp=1))
            least, more = min(least, out.efficiency()), min(more, chosen.efficiency())
            spent, over = max(spent, chosen.time_ms), max(over, len(out.work) - bound)
        what = f"the worst of eight other distributions, {ranks:,} ranks, {n:,} sequences"
        yield Row(name=f"E of dynamic_cp, {what}", value=more, unit="", aim=0.99, at_least=True)
        yield Row(name=f"E of dynamic_cp, fewest, {what}", value=least, unit="")
        yield Row(name=f"microbatches beyond the lower bound, {what}", value=over, unit="")
        yield Row(name=f"time of dynamic_cp, {what}", value=spent, unit="ms")


# -- packs of one shape --------------------------------------------------------------------------------


def constant_shapes(traces: dict[str, Lengths], ranks: int, n: int) -> Iterator[Row]:
    """Packs of the same capacity and at most 32 sequences: balance, and what is left for padding."""
    caps: dict[str, Any] = {"fixed_shapes": True, "max_sequences": 32}
    for name, trace in traces.items():
        lengths = trace[:n]
        peer = timed(DP_BALANCED, lengths, ranks, lambda: megatron_dp_balanced(lengths, ranks, 32))  # noqa: B023
        for out in (peer, *(ours(p, lengths, ranks, p, **caps) for p in ("balanced", "dynamic_cp"))):
            what = f"{out.name}, 32 sequences a pack, {SIZES[1][0]} ranks, {name}"
            if out.work is None:
                continue
            yield Row(name=f"E of constant shapes, {what}", value=out.efficiency(), unit="")
            held = len(out.work) * ranks * CAPACITY
            padding = 100 * float(1 - lengths.sum() / held)
            yield Row(name=f"padding of constant shapes, {what}", value=padding, unit="%")


# -- Megatron-LM's dev branch --------------------------------------------------------------------------


def beside_newest(traces: dict[str, Lengths], *, short: bool) -> Iterator[Row]:
    """Ours beside the branch's schedulers: any number of ranks, virtual stages, few sequences a pack.

    Sequences are cut to what all ranks hold.
    """
    folder = newest_megatron.checkout()
    if folder is None:
        print("no Megatron-LM-dev in FRAMEWORK_SOURCES: its rows are left out", file=sys.stderr)
        return
    module = newest_megatron.schedule_module(folder)

    def cut(trace: str, ranks: int, n: int) -> Lengths:
        return np.minimum(traces[trace][:n], ranks * CAPACITY)

    @cache  # its time counts where it is called first
    def dynamic(trace: str, ranks: int, n: int, quantum: int | None = None) -> list[list[list[int]]]:
        scheduler = module.DefaultDynamicCPScheduler(CAPACITY, 1, ranks, quantum)
        return scheduler.get_groups_and_subsamples(list(enumerate(cut(trace, ranks, n).tolist())))

    def in_order(trace: str, ranks: int, n: int) -> list[list[list[int]]]:
        lengths = cut(trace, ranks, n)
        cp = fixed_cp(lengths, ranks)
        scheduler = module.DpBalancedScheduler(CAPACITY, cp, ranks // cp, None, max_num_seqs=31)
        return scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())))

    def compared(
        sizes: tuple[tuple[int, int], ...],
        schedule: Callable[..., list[list[list[int]]]],
        own: Callable[[Lengths, int], Outcome],
        cost: CostModel = COST,
    ) -> Iterator[tuple[str, int, Outcome, Outcome]]:
        peer = NEWEST_IN_ORDER if schedule is in_order else NEWEST
        for trace, (ranks, n) in product(traces, sizes):
            if traces[trace].size >= n:
                lengths = cut(trace, ranks, n)
                theirs = timed(peer, lengths, ranks, partial(schedule, trace, ranks, n), cost)
                yield trace, ranks, own(lengths, ranks), theirs

    def dynamic_cp(lengths: Lengths, ranks: int, **choices: Any) -> Outcome:
        return ours("dynamic_cp", lengths, ranks, "dynamic_cp", **choices)

    powers, others = (SIZES[:1], NO_POWERS[:3]) if short else (SIZES, NO_POWERS)
    for sizes, what in ((powers, "8, 32 and 256 ranks"), (others, "3, 5, 6, 7, 12, 24 and 56 ranks")):
        found = list(compared(sizes, dynamic, dynamic_cp))
        yield from ratios(found, what)
        for trace, ranks, own, peer in found:
            if ranks == 256:
                name = f"speed of dynamic_cp, 256 ranks, 4,096 sequences, {trace}"
                speed = peer.time_ms / own.time_ms
                yield Row(name=name, against=NEWEST, value=speed, aim=50.0, at_least=True)
        found = list(compared(sizes, dynamic, partial(dynamic_cp, cost=ACROSS_NODES), ACROSS_NODES))
        yield from ratios(found, f"{what}, keys and values across nodes", steps_only=True)
    found = list(compared(powers[:2], partial(dynamic, quantum=4), partial(dynamic_cp, quantum=4)))
    yield from ratios(found, "8 and 32 ranks, microbatches by four")
    for trace, (ranks, n) in product(traces, powers[:2]):
        rule = megatron_dp_balanced(cut(trace, ranks, n), ranks, 31)
        assert in_order(trace, ranks, n) == rule, "its rule is not what is written here"
    few = {"max_sequences": 31, "fixed_shapes": True}
    found = list(compared(powers[:2], in_order, lambda *of: ours("balanced", *of, "balanced", **few)))
    yield from ratios(found, "8 and 32 ranks, 31 sequences and a dummy")


def ratios(
    found: list[tuple[str, int, Outcome, Outcome]], what: str, *, steps_only: bool = False
) -> Iterator[Row]:
    """Ours over the peer's, where both gave a plan; and how often each failed.

    found: trace, ranks, our outcome and the peer's.
    """
    for trace, ranks, *both in found:
        for out in both:
            print(
                f"{trace}, {ranks} ranks: {what:<60}{out.name:<44}{out.count:>3} microbatches, "
                f"E {out.efficiency():.4f}, mean cp {out.mean_cp:.1f}, {out.time_ms:.1f} ms {out.failure}"
            )
    own, peer = found[0][2].name, found[0][3].name
    pairs = [(ours, theirs) for _, _, ours, theirs in found]
    sound = [(ours, theirs) for ours, theirs in pairs if not theirs.failure]
    steps = [step_time(ours) / step_time(theirs) for ours, theirs in sound]
    yield Row(name=f"step time of {own}, the worst, {what}", against=peer, value=max(steps), aim=1.01)
    yield Row(name=f"step time of {own}, mean, {what}", against=peer, value=float(np.mean(steps)), aim=1.0)
    if steps_only:
        return
    for name, quotients in (
        ("microbatches", [ours.count / theirs.count for ours, theirs in sound]),
        ("mean cp", [ours.mean_cp / theirs.mean_cp for ours, theirs in sound]),
    ):
        yield Row(name=f"{name} of {own}, mean, {what}", against=peer, value=float(np.mean(quotients)))
    for at, name in enumerate((own, peer)):
        efficient = [both[at].efficiency() for both in pairs if not both[at].failure]
        failed = 100 * (1 - len(efficient) / len(pairs))
        yield Row(name=f"mean E, {name}, {what}", value=float(np.mean(efficient)), unit="")
        yield Row(name=f"plans that fail, {name}, {what}", value=failed, unit="%", aim=None if at else 0)


def measured(short: bool) -> Iterator[Row]:
    """All of it."""
    names = ("longtail", "short") if short else ("equal", "longtail", "mixed", "short", "source_files")
    traces = {name: np.loadtxt(TRACES / f"{name}.txt", dtype=np.int64) for name in names}
    yield from compare(traces, SIZES[:1] if short else SIZES)
    yield from elsewhere(OTHER_SIZES[:1] if short else OTHER_SIZES)
    yield from constant_shapes(traces, *SIZES[0 if short else 1])
    yield from beside_newest(traces, short=short)


if __name__ == "__main__":
    measure.main(__doc__, measured)
