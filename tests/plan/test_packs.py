"""Plans, packs and slices: every sequence once, every token on one rank of its group."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import PlanError
from meshfeed.plan import Align, Pack, StepPlan, packs_of, plan_fixed, slices_of
from soak import cases

laws = settings(max_examples=cases(150), deadline=None)
counts = st.integers(1, 5)


@laws
@given(st.lists(st.integers(1, 90), max_size=40), counts, counts, counts, counts, counts)
def test_packs_hold_every_sequence_once_on_every_rank_of_a_group(
    lengths: list[int], dp: int, cp: int, rows: int, sequence: int, pack: int
) -> None:
    align = Align(sequence=sequence, pack=pack)
    plan = plan_fixed(np.array(lengths, np.int64), dp=dp, cp=cp, micro_batch_size=rows, align=align)
    assert plan.num_microbatches == math.ceil(len(lengths) / (dp * rows))
    held: dict[int, list[int]] = {cp_rank: [] for cp_rank in range(cp)}
    for rank in range(dp * cp):
        packs = packs_of(plan, rank)
        assert len(packs) == plan.num_microbatches
        for microbatch in packs:
            assert (microbatch.cp_size, microbatch.cp_rank) == (cp, rank % cp)
            assert len(microbatch.sequences) <= rows
            assert microbatch.lengths.tolist() == [lengths[s] for s in microbatch.sequences]
            assert (microbatch.padded_lengths >= microbatch.lengths).all()
            assert (microbatch.padded_lengths % math.lcm(sequence, 2 * cp if cp > 1 else 1) == 0).all()
            assert int(microbatch.cu_seqlens_padded[-1]) % (pack * cp) == 0
            held[rank % cp] += microbatch.sequences.tolist()
    for sequences in held.values():
        assert sorted(sequences) == list(range(len(lengths)))


def up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def padded_by_hand(lengths: list[int], cp: int, align: Align) -> list[int]:
    """Padded lengths of the sequences of one pack, by the text of `Align`."""
    each = math.lcm(align.sequence, 2 * cp if cp > 1 else 1)
    padded = [up(length, each) for length in lengths]
    if padded:
        padded[-1] += up(sum(padded), math.lcm(each, align.pack * cp)) - sum(padded)
    return padded


@st.composite
def free_plans(draw: st.DrawFn) -> StepPlan:
    """Plans with a cp group of its own size for each microbatch and block of ranks; some left out."""
    num_ranks, num_microbatches = 8, draw(st.integers(0, 4))
    rows: list[tuple[int, int, int, int]] = []
    for microbatch in range(num_microbatches):
        first = 0
        while first < num_ranks:
            cp = draw(st.sampled_from([c for c in (1, 2, 3, 4, 8) if first + c <= num_ranks]))
            for length in draw(st.lists(st.integers(1, 50), max_size=3)):
                rows.append((length, draw(st.sampled_from([microbatch] * 4 + [-1])), first, cp))
            first += cp
    rows = draw(st.permutations(rows))
    length, microbatch, first_rank, cp_size = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    return StepPlan(
        lengths=length,
        microbatch=microbatch.astype(np.int32),
        first_rank=first_rank.astype(np.int32),
        cp_size=cp_size.astype(np.int32),
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
        idle_cp_size=draw(st.sampled_from([1, 2, 4])),
        align=Align(sequence=draw(counts), pack=draw(counts)),
    )


@laws
@given(free_plans())
def test_packs_of_any_plan_are_what_plain_loops_make_them(plan: StepPlan) -> None:
    columns = (plan.lengths, plan.microbatch, plan.first_rank, plan.cp_size)
    rows = list(zip(*(column.tolist() for column in columns)))
    for rank in range(plan.num_ranks):
        packs = packs_of(plan, rank)
        assert len(packs) == plan.num_microbatches
        for at, pack in enumerate(packs):
            mine = [s for s, (_, m, first, cp) in enumerate(rows) if m == at and first <= rank < first + cp]
            assert pack.sequences.tolist() == mine
            lengths = [rows[s][0] for s in mine]
            assert pack.lengths.tolist() == lengths
            if mine:
                _, _, first, cp = rows[mine[0]]
                assert (pack.cp_size, pack.cp_rank) == (cp, rank - first)
            else:
                assert (pack.cp_size, pack.cp_rank) == (plan.idle_cp_size, rank % plan.idle_cp_size)
            assert pack.padded_lengths.tolist() == padded_by_hand(lengths, pack.cp_size, plan.align)
            assert pack.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(mine) + 1)]
            for array in (pack.sequences, pack.cu_seqlens, pack.cu_seqlens_padded):
                assert array.dtype == np.int32
                assert not array.flags.writeable


@laws
@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_multiples_of_padding(length: int, sequence: int, pack: int, cp: int) -> None:
    align = Align(sequence=sequence, pack=pack)
    padded = int(align.padded(np.array(length), cp))
    wanted = [n for n in range(length, length + 400) if n % sequence == 0 and (cp == 1 or n % (2 * cp) == 0)]
    assert padded == wanted[0]
    whole = int(align.pack_multiple(cp))
    assert whole % (pack * cp) == 0
    assert whole % int(align.sequence_multiple(cp)) == 0
    assert int(align.sequence_multiple(cp)) == math.lcm(sequence, 2 * cp if cp > 1 else 1)
    assert whole == math.lcm(pack * cp, sequence, 2 * cp if cp > 1 else 1)


@laws
@given(st.lists(st.integers(1, 90), max_size=60), counts, counts, counts)
def test_a_fixed_plan_deals_as_megatrons_samplers_do(lengths: list[int], dp: int, cp: int, rows: int) -> None:
    plan = plan_fixed(np.array(lengths, np.int64), dp=dp, cp=cp, micro_batch_size=rows)
    for rank in range(dp * cp):
        for at, pack in enumerate(packs_of(plan, rank)):
            first = at * dp * rows + rank // cp * rows  # of this microbatch, this replica's rows
            assert pack.sequences.tolist() == list(range(len(lengths)))[first : first + rows]


@laws
@given(st.lists(st.integers(1, 90), max_size=40), counts, counts, counts, st.integers(1, 6), counts, counts)
def test_several_microbatches_together_are_their_packs_end_to_end(
    lengths: list[int], dp: int, cp: int, rows: int, together: int, sequence: int, pack_to: int
) -> None:
    align = Align(sequence=sequence, pack=pack_to)
    plan = plan_fixed(np.array(lengths, np.int64), dp=dp, cp=cp, micro_batch_size=rows, align=align)
    for rank in range(dp * cp):
        alone, joined = packs_of(plan, rank), packs_of(plan, rank, together=together)
        assert len(joined) == math.ceil(len(alone) / together)
        for at, pack in enumerate(joined):
            parts = alone[at * together : (at + 1) * together]
            assert pack.sequences.tolist() == [s for part in parts for s in part.sequences.tolist()]
            assert pack.lengths.tolist() == [n for part in parts for n in part.lengths.tolist()]
            assert pack.padded_lengths.tolist() == [n for part in parts for n in part.padded_lengths.tolist()]
            assert (pack.cp_size, pack.cp_rank) == (cp, rank % cp)
            assert int(pack.cu_seqlens_padded[0]) == 0


@laws
@given(
    st.lists(st.integers(1, 90), max_size=8),
    st.integers(1, 8),
    st.sampled_from(["zigzag", "contiguous"]),
    counts,
    counts,
    st.data(),
)
def test_slices_of_a_group_cover_every_token_once(
    lengths: list[int], cp: int, split: str, sequence: int, pack_to: int, data: st.DataObject
) -> None:
    align = Align(sequence=sequence, pack=pack_to)
    plan = plan_fixed(np.array(lengths, np.int64), dp=1, cp=cp, micro_batch_size=8, align=align)
    for microbatch in range(plan.num_microbatches):
        packs = [packs_of(plan, rank)[microbatch] for rank in range(cp)]
        own: list[set[tuple[int, int]]] = []
        for rank, pack in enumerate(packs):
            slices = slices_of(pack, [rank], split)  # type: ignore[arg-type]
            tokens = [
                (s, t)
                for s, a, b in zip(slices.sequence.tolist(), slices.start.tolist(), slices.stop.tolist())
                for t in range(a, b)
            ]
            own.append(set(tokens))
            assert len(own[-1]) == len(tokens)
            for s, padded in enumerate(pack.padded_lengths.tolist()):
                mine = [t for q, t in tokens if q == s]
                if split == "zigzag" and cp > 1:
                    size = padded // (2 * cp)
                    chunks = [rank, 2 * cp - 1 - rank]
                else:
                    size, chunks = padded // cp, [rank]
                assert mine == [c * size + i for c in chunks for i in range(size)]
        everything = {(s, t) for s, n in enumerate(packs[0].padded_lengths.tolist()) for t in range(n)}
        assert set().union(*own) == everything
        assert sum(len(each) for each in own) == len(everything)
        some = data.draw(st.sets(st.integers(0, cp - 1), min_size=1))
        joined = slices_of(packs[0], sorted(some), split)  # type: ignore[arg-type]
        assert int(joined.sizes.sum()) == sum(len(own[rank]) for rank in some)
        rows = list(zip(joined.sequence.tolist(), joined.start.tolist(), joined.stop.tolist()))
        assert {(s, t) for s, a, b in rows for t in range(a, b)} == set().union(*(own[r] for r in some))
        assert rows == sorted(rows)
        for (s, _, stop), (next_s, start, _) in pairwise(rows):
            assert s != next_s or stop < start, "neighbours are joined"
        shuffled = slices_of(packs[0], data.draw(st.permutations(sorted(some))), split)
        assert shuffled.start.tolist() == joined.start.tolist()


def test_slices_of_a_packs_ranks_by_hand() -> None:
    plan = plan_fixed(np.array([16, 6], np.int64), dp=1, cp=4, micro_batch_size=2)
    pack = packs_of(plan, 1)[0]
    assert pack.padded_lengths.tolist() == [16, 8]

    def rows(cp_ranks: list[int], split: str) -> list[tuple[int, int, int]]:
        slices = slices_of(pack, cp_ranks, split)  # type: ignore[arg-type]
        return list(zip(slices.sequence.tolist(), slices.start.tolist(), slices.stop.tolist()))

    assert rows([1], "zigzag") == [(0, 2, 4), (0, 12, 14), (1, 1, 2), (1, 6, 7)]
    assert rows([3], "zigzag") == [(0, 6, 10), (1, 3, 5)]
    assert rows([0, 1], "zigzag") == [(0, 0, 4), (0, 12, 16), (1, 0, 2), (1, 6, 8)]
    assert rows([1], "contiguous") == [(0, 4, 8), (1, 2, 4)]
    assert rows([0, 2, 3], "contiguous") == [(0, 0, 4), (0, 8, 16), (1, 0, 2), (1, 4, 8)]
    assert rows([0, 1, 2, 3], "zigzag") == rows([0, 1, 2, 3], "contiguous") == [(0, 0, 16), (1, 0, 8)]


def test_a_dummy_has_no_slices() -> None:
    packs = packs_of(plan_fixed(np.array([9], np.int64), dp=2, cp=2, micro_batch_size=1), 3)
    assert [(pack.sequences.size, pack.cp_size, pack.cp_rank) for pack in packs] == [(0, 2, 1)]
    assert (packs[0].cu_seqlens.tolist(), packs[0].cu_seqlens_padded.tolist()) == ([0], [0])
    for cp_ranks in ([1], [0, 1]):
        assert slices_of(packs[0], cp_ranks, "zigzag").start.size == 0
    assert packs_of(plan_fixed(np.zeros(0, np.int64), dp=2, cp=2, micro_batch_size=1), 0) == []


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(mf.errors.PlanError):
        plan_fixed(np.ones(3, np.int64), dp=0, cp=1, micro_batch_size=1)
    with pytest.raises(mf.errors.PlanError):
        Align(sequence=0)
    with pytest.raises(mf.errors.PlanError, match="pack=-1"):
        Align(pack=-1)
    for sizes in ((1, 0, 1), (1, 1, 0), (-1, 1, 1)):
        with pytest.raises(mf.errors.PlanError, match="at least 1"):
            plan_fixed(np.ones(3, np.int64), dp=sizes[0], cp=sizes[1], micro_batch_size=sizes[2])
    huge = plan_fixed(np.full(3, 2**30, np.int64), dp=1, cp=1, micro_batch_size=3)
    with pytest.raises(mf.errors.PlanError, match="int32"):
        packs_of(huge, 0)
    with pytest.raises(mf.errors.PlanError, match="int32"):
        packs_of(plan_fixed(np.full(2, 2**30, np.int64), dp=1, cp=1, micro_batch_size=1), 0, together=2)
    odd = Pack(
        sequences=np.zeros(1, np.int32),
        cu_seqlens=np.array([0, 9], np.int32),
        cu_seqlens_padded=np.array([0, 9], np.int32),
        cp_size=2,
        cp_rank=0,
    )
    for split in ("zigzag", "contiguous"):
        with pytest.raises(mf.errors.PlanError, match="do not split"):
            slices_of(odd, [0], split)  # type: ignore[arg-type]
    pack = packs_of(plan_fixed(np.ones(3, np.int64), dp=1, cp=2, micro_batch_size=3), 0)[0]
    with pytest.raises(mf.errors.PlanError, match="cp split"):
        slices_of(pack, [0], "diagonal")  # type: ignore[arg-type]


def test_a_pack_that_does_not_split_is_refused_with_the_lengths_that_do_not() -> None:
    ends = np.array([0, 8, 14, 22], np.int32)
    pack = Pack(
        sequences=np.arange(3, dtype=np.int32), cu_seqlens=ends, cu_seqlens_padded=ends, cp_size=2, cp_rank=0
    )
    with pytest.raises(PlanError, match=r"padded lengths \[6\] do not split in 4"):
        slices_of(pack, [0], "zigzag")
