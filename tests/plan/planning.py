"""What every plan must satisfy, whatever made it, and small brute-force oracles."""

import functools
import itertools

import numpy as np

from meshfeed.plan import Packing, StepPlan, account_of, packs_of


def check_plan(plan: StepPlan, lengths, packing: Packing, *, dp: int, cp: int, quantum: int = 1) -> None:
    """The laws of the planner; lengths are all short enough to be kept."""
    lengths = np.asarray(lengths, np.int64)
    ranks = dp * cp
    assert plan.num_ranks == ranks
    assert plan.num_microbatches % quantum == 0
    np.testing.assert_array_equal(plan.lengths, lengths)
    # each sequence with a token exactly once, the others nowhere
    np.testing.assert_array_equal(plan.microbatch >= 0, lengths > 0)
    assert (plan.microbatch < plan.num_microbatches).all()
    # groups are aligned blocks of a chain of divisors
    assert (ranks % plan.cp_size == 0).all() and (plan.first_rank % plan.cp_size == 0).all()
    sizes = np.unique(plan.cp_size)
    assert (sizes[1:] % sizes[:-1] == 0).all()
    if packing.policy != "dynamic_cp":
        assert set(plan.cp_size.tolist()) <= {cp}
    # no rank is in two groups of a microbatch
    placed = plan.microbatch >= 0
    groups = np.unique(np.stack((plan.microbatch, plan.first_rank, plan.cp_size))[:, placed], axis=1).astype(
        np.int64
    )
    start = groups[0] * ranks + groups[1]
    assert (start[1:] >= start[:-1] + groups[2][:-1]).all()
    account = account_of(plan, packing)
    assert account.rank_tokens.shape == (plan.num_microbatches, ranks)
    assert account.rank_tokens.max(initial=0) <= packing.capacity
    assert account.tokens == int(lengths.sum())
    assert account.objective >= account.bound * (1 - 1e-9)


def check_packs(plan: StepPlan) -> None:
    """Every rank's packs name every row once per rank of its group."""
    seen = np.zeros(plan.lengths.size, np.int64)
    for m, rank in itertools.product(range(plan.num_microbatches), range(plan.num_ranks)):
        pack = packs_of(plan, rank)[m]
        seen[pack.sequences] += 1
        assert pack.cu_seqlens_padded[-1] % plan.align.pack_multiple(pack.cp_size) == 0
        assert 0 <= pack.cp_rank < pack.cp_size
    np.testing.assert_array_equal(seen, np.where(plan.microbatch >= 0, plan.cp_size, 0))


def submasks(mask: int):
    part = mask
    while True:
        yield part
        if part == 0:
            return
        part = (part - 1) & mask


def least_objective(lengths, packing: Packing, *, ranks: int, sizes, num_microbatches: int) -> float:
    """The optimum of sum over microbatches of the largest load, over all groups and assignments."""
    lengths = np.asarray(lengths, np.int64)
    full = (1 << lengths.size) - 1

    @functools.cache
    def load(part: int, size: int) -> float:
        held = lengths[[i for i in range(lengths.size) if part >> i & 1]]
        if packing.align.padded(held, size).sum() > packing.capacity * size:
            return np.inf
        return float(packing.cost.load(held, size).sum())

    def shapes(free: int, widest: int):
        yield ()
        for size in sizes:
            if size <= min(free, widest):
                for rest in shapes(free - size, size):
                    yield (size, *rest)

    @functools.cache
    def blocks(part: int, shape: tuple[int, ...]) -> float:
        if not shape:
            return 0.0 if part == 0 else np.inf
        return min(max(load(own, shape[0]), blocks(part ^ own, shape[1:])) for own in submasks(part))

    full_shapes = [shape for shape in shapes(ranks, ranks) if sum(shape) == ranks]

    @functools.cache
    def microbatch(part: int) -> float:
        return min(blocks(part, shape) for shape in full_shapes)

    @functools.cache
    def step(part: int, left: int) -> float:
        if left == 0:
            return 0.0 if part == 0 else np.inf
        return min(microbatch(own) + step(part ^ own, left - 1) for own in submasks(part))

    return step(full, num_microbatches)
