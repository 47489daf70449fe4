"""What every plan must satisfy, whatever made it, and small brute-force oracles."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshfeed.plan import CpSplit, Packing, StepPlan, account_of, packs_of, slices_of
from meshfeed.plan.packing import cp_sizes


def check_plan(plan: StepPlan, lengths: Any, packing: Packing, *, dp: int, cp: int, quantum: int = 1) -> None:
    """The laws of the planner; lengths are all short enough to be kept."""
    lengths = np.asarray(lengths, np.int64)
    ranks = dp * cp
    assert plan.num_ranks == ranks
    assert plan.num_microbatches % quantum == 0
    np.testing.assert_array_equal(plan.lengths, lengths)
    # each sequence with a token exactly once, the others nowhere
    np.testing.assert_array_equal(plan.microbatch >= 0, lengths > 0)
    assert (plan.microbatch < plan.num_microbatches).all()
    # groups are aligned blocks; sizes are a chain of divisors, but for that of all ranks
    assert (plan.first_rank % plan.cp_size == 0).all() and (plan.first_rank + plan.cp_size <= ranks).all()
    sizes = np.unique(plan.cp_size[plan.cp_size < ranks])
    assert (sizes[1:] % sizes[:-1] == 0).all()
    if packing.policy == "dynamic_cp" and packing.cp_sizes is None:
        assert set(sizes) <= set(cp_sizes(ranks, powers=packing.cost.ring_tokens > 0))
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
    packs = np.stack((plan.microbatch, plan.first_rank))[:, placed]
    if packing.max_sequences is not None:
        assert np.unique(packs, axis=1, return_counts=True)[1].max(initial=0) <= packing.max_sequences
    assert account.tokens == int(lengths.sum())
    assert account.objective >= account.bound * (1 - 1e-9)


def check_packs(plan: StepPlan, packing: Packing | None = None) -> None:
    """Every rank's packs name every row once per rank of its group, and are what the account says of them."""
    seen = np.zeros(plan.lengths.size, np.int64)
    rank_tokens = np.zeros((plan.num_microbatches, plan.num_ranks), np.int64)
    for rank in range(plan.num_ranks):
        for m, pack in enumerate(packs_of(plan, rank)):
            seen[pack.sequences] += 1
            whole = pack.num_tokens
            assert whole % plan.align.pack_multiple(pack.cp_size) == 0
            assert (pack.padded_lengths % plan.align.sequence_multiple(pack.cp_size) == 0).all()
            assert (pack.padded_lengths >= pack.lengths).all()
            assert 0 <= pack.cp_rank < pack.cp_size
            rank_tokens[m, rank] = whole // pack.cp_size or plan.idle_tokens
    np.testing.assert_array_equal(seen, np.where(plan.microbatch >= 0, plan.cp_size, 0))
    if packing is not None:
        assert rank_tokens.max(initial=0) <= packing.capacity
        np.testing.assert_array_equal(account_of(plan, packing).rank_tokens, rank_tokens)


@functools.cache
def submasks(mask: int) -> np.ndarray:
    """All subsets of a subset; int64."""
    return np.array([part for part in range(mask + 1) if part & mask == part])


def least_objective(
    lengths: Any, packing: Packing, *, ranks: int, sizes: Any, num_microbatches: int
) -> float:
    """The optimum of sum over microbatches of the largest load, over all groups and assignments.

    Tables hold the optimum of every subset of the sequences; all splits of a subset in two are tried.
    """
    lengths = np.asarray(lengths, np.int64)
    subsets = range(1 << lengths.size)
    holds = np.array([[subset >> i & 1 for i in range(lengths.size)] for subset in subsets])

    def split(first: np.ndarray, second: np.ndarray, combine: np.ufunc) -> np.ndarray:
        tried = ((submasks(subset), subset) for subset in subsets)
        return np.array([combine(first[parts], second[subset ^ parts]).min() for parts, subset in tried])

    block = {}
    for size in sizes:
        fits = holds @ packing.align.padded(lengths, size) <= packing.capacity * size
        block[size] = np.where(fits, holds @ packing.cost.load(lengths, size), np.inf)

    @functools.cache
    def blocks(shape: tuple[int, ...]) -> np.ndarray:
        return block[shape[0]] if len(shape) == 1 else split(block[shape[0]], blocks(shape[1:]), np.maximum)

    def shapes(free: int, widest: int) -> Iterator[tuple[int, ...]]:
        if free == 0:
            yield ()
        for size in sizes:
            if size <= min(free, widest):
                yield from ((size, *rest) for rest in shapes(free - size, size))

    microbatch = np.min([blocks(shape) for shape in shapes(ranks, ranks)], axis=0)
    step = microbatch
    for _ in range(num_microbatches - 1):
        step = split(microbatch, step, np.add)
    return float(step[-1])


def some_parts(rng: np.random.Generator, lengths: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """Parts that lie among the tokens of some sequences: the sequence, first token and tokens of each."""
    of: list[int] = []
    start: list[int] = []
    tokens: list[int] = []
    for sequence, length in enumerate(lengths.tolist()):
        at = int(rng.integers(0, 9))
        while at < length and rng.random() < 0.7:
            size = int(rng.integers(1, length - at + 1))
            of, start, tokens = [*of, sequence], [*start, at], [*tokens, size]
            at += size + int(rng.integers(0, 9))
    return of, start, tokens


def outputs_of(
    plan: StepPlan, rank: int, split: CpSplit, of: Sequence[int], start: Sequence[int], tokens: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """What a rank's tokens are of such parts: (part, which of its tokens), token by token, for each microbatch."""
    part_of = {
        (sequence, first + number): (part, number)
        for part, (sequence, first, count) in enumerate(zip(of, start, tokens))
        for number in range(count)
    }
    found: list[list[tuple[int, int]]] = []
    for pack in packs_of(plan, rank):
        own, outputs = slices_of(pack, [pack.cp_rank], split), list[tuple[int, int]]()
        for k, low, high in zip(own.sequence.tolist(), own.start.tolist(), own.stop.tolist()):
            if k == pack.sequences.size:  # the dummy
                continue
            row = int(pack.sequences[k])
            sequence, first, length = (int(a[row]) for a in (plan.sequence, plan.start, plan.lengths))
            at = ((sequence, first + token) for token in range(low, min(high, length)))
            outputs += [part_of[token] for token in at if token in part_of]
        found.append(outputs)
    return found
