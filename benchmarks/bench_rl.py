"""Rollouts in packs: the functions of meshfeed.integrations.rl beside the rules of verl and slime.

The rules are written here from their description. verl: largest differencing deals the rows to the ranks, as
many to each, then each rank's to as few microbatches as its tokens ask for; the heaviest run at the same
time. slime: first fit in the order of the rows, the largest pack split until they divide among the ranks,
dealt out in turn; by FLOPs, largest differencing into as few packs as the tokens ask for, and of packs to
ranks.

A step takes as long as the busiest rank of each microbatch, with work = 25,100 s + s^2; the ideal is equal
work on all ranks. Rollouts are cut to 8,192 tokens, half of what a pack can hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import measure
import numpy as np
from bench_planner import COST, TRACES, Lengths, largest_differencing
from measure import Row

from meshfeed.integrations import rl
from meshfeed.plan import Packing

CAP, LONGEST = 16_384, 8192
SIZES = ((8, 256), (16, 512), (32, 1024))
Step = list[list[int]]
"""The rows of each pack: of all ranks in the first microbatch, then in the next."""


def of_slime(lengths: Lengths, ranks: int) -> Step:
    """By meshfeed's build_dp_schedule."""
    partitions, microbatches, (count,), _ = rl.build_dp_schedule(
        SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=CAP),
        {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1},
        lengths.tolist(),
        global_batch_size=lengths.size,
        rollout_indices=range(lengths.size),
    )
    return [
        [partitions[rank][at] for at in microbatches[rank][m]] for m in range(count) for rank in range(ranks)
    ]


def of_nemo_rl(lengths: Lengths, ranks: int) -> Step:
    """By meshfeed's get_packer."""
    return rl.get_packer("", CAP, min_bin_count=ranks, bin_count_multiple=ranks).pack(lengths.tolist())


def of_verl(lengths: Lengths, ranks: int) -> Step:
    """By meshfeed's get_seqlen_balanced_partitions, then as its rearrange_micro_batches packs each rank."""
    work = COST.work(lengths)
    packing = Packing(capacity=CAP, cost=COST)
    parts = rl.get_seqlen_balanced_partitions(work.astype(int).tolist(), ranks, equal_size=True)
    packs = [rl.packs_of_ranks(lengths[part], packing) for part in parts]
    most = max(map(len, packs))
    for rank, part in enumerate(parts):
        if len(packs[rank]) < most:
            packs[rank] = rl.packs_of_ranks(lengths[part], packing, at_least=most, more=0)
    return together(parts, packs, work)


def rule_of_verl(lengths: Lengths, ranks: int) -> Step:
    """A balanced deal to the ranks, and each rank's rows in packs."""
    work = COST.work(lengths)
    parts = largest_differencing(work.tolist(), ranks, equal_size=True)
    count = max(math.ceil(lengths[part].sum() / CAP) for part in parts)
    return together(parts, [largest_differencing(work[part].tolist(), count) for part in parts], work)


def together(parts: Step, packs: list[Step], work: np.ndarray) -> Step:
    """A step of packs that each rank has by itself: the heaviest of all ranks run at the same time."""
    by_rank = [
        sorted(([part[at] for at in pack] for pack in own), key=lambda rows: -work[rows].sum())
        for part, own in zip(parts, packs, strict=True)
    ]
    return [pack for at_once in zip(*by_rank, strict=True) for pack in at_once]


def rule_of_slime(lengths: Lengths, ranks: int) -> Step:
    """First fit, in turn."""
    packs: Step = []
    free: list[int] = []
    for row, length in enumerate(lengths.tolist()):
        at = next((at for at, left in enumerate(free) if left >= length), None)
        if at is None:
            packs.append([])
            free.append(CAP)
            at = -1
        packs[at].append(row)
        free[at] -= length
    return split_until_even(packs, lengths, ranks)


def rule_of_slime_by_flops(lengths: Lengths, ranks: int) -> Step:
    """Packs of equal work, and ranks of equal work."""
    work = COST.work(lengths)
    packs = largest_differencing(work.tolist(), math.ceil(lengths.sum() / CAP))
    packs = split_until_even(packs, lengths, ranks)
    dealt = largest_differencing([work[pack].sum() for pack in packs], ranks, equal_size=True)
    return [packs[sorted(own)[m]] for m in range(len(packs) // ranks) for own in dealt]


def split_until_even(packs: Step, lengths: Lengths, ranks: int) -> Step:
    """Halve the pack with the most tokens until their number divides among the ranks."""
    while len(packs) % ranks:
        largest = max((pack for pack in packs if len(pack) > 1), key=lambda pack: lengths[pack].sum())
        halves: Step = [[], []]
        for row in sorted(largest, key=lambda row: -lengths[row]):
            min(halves, key=lambda half: lengths[half].sum()).append(row)
        packs[packs.index(largest)] = halves[0]
        packs.append(halves[1])
    return packs


PLANNED = "meshfeed, as in slime and NeMo-RL"
RULES = {
    PLANNED: of_slime,
    "meshfeed, as in verl": of_verl,
    "the rule of verl": rule_of_verl,
    "the rule of slime": rule_of_slime,
    "the rule of slime, by FLOPs": rule_of_slime_by_flops,
}


def measured(short: bool) -> Iterator[Row]:
    """The longest step of each rule over three sizes, and how often it puts too many tokens into a pack."""
    sizes = SIZES[:1] if short else SIZES
    for trace in ("longtail", "mixed", "short"):
        lengths = np.minimum(np.loadtxt(TRACES / f"{trace}.txt", dtype=np.int64), LONGEST)
        for name, rule in RULES.items():
            steps, over = [], 0
            for ranks, n in sizes:
                packs = rule(lengths[:n], ranks)
                assert sorted(row for pack in packs for row in pack) == list(range(n))
                assert rule is not of_slime or packs == of_nemo_rl(lengths[:n], ranks)
                work = COST.work(lengths[:n])
                busy = np.array([work[pack].sum() for pack in packs]).reshape(-1, ranks)
                steps.append(busy.max(axis=1).sum() / (work.sum() / ranks))
                over += max(int(lengths[pack].sum()) for pack in packs) > CAP
            aim = 1.011 if name == PLANNED else None
            yield Row(
                name=f"step, {name}, {trace}",
                against="equal work",
                value=float(max(steps)),
                aim=aim,
            )
            ours = name.startswith("meshfeed")
            yield Row(
                name=f"steps with a pack over the cap, {name}, {trace}",
                value=100 * over / len(sizes),
                unit="%",
                aim=0 if ours else None,
            )


if __name__ == "__main__":
    measure.main(__doc__, measured)
