"""Plans, packs and slices: every sequence once, every token on one rank of its group."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.plan import Align, packs_of, plan_fixed, slices_of

laws = settings(derandomize=True, max_examples=150, deadline=None)
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


@laws
@given(st.lists(st.integers(1, 90), max_size=40), counts, counts, counts, st.integers(1, 6))
def test_several_microbatches_together_are_their_packs_end_to_end(
    lengths: list[int], dp: int, cp: int, rows: int, together: int
) -> None:
    plan = plan_fixed(np.array(lengths, np.int64), dp=dp, cp=cp, micro_batch_size=rows)
    for rank in range(dp * cp):
        alone, joined = packs_of(plan, rank), packs_of(plan, rank, together=together)
        assert len(joined) == math.ceil(len(alone) / together)
        for at, pack in enumerate(joined):
            parts = alone[at * together : (at + 1) * together]
            assert pack.sequences.tolist() == [s for part in parts for s in part.sequences.tolist()]
            assert pack.padded_lengths.tolist() == [n for part in parts for n in part.padded_lengths.tolist()]


@laws
@given(
    st.lists(st.integers(1, 90), max_size=8),
    st.integers(1, 8),
    st.sampled_from(["zigzag", "contiguous"]),
    st.data(),
)
def test_slices_of_a_group_cover_every_token_once(
    lengths: list[int], cp: int, split: str, data: st.DataObject
) -> None:
    plan = plan_fixed(np.array(lengths, np.int64), dp=1, cp=cp, micro_batch_size=8)
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


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(mf.PlanError):
        plan_fixed(np.ones(3, np.int64), dp=0, cp=1, micro_batch_size=1)
    with pytest.raises(mf.PlanError):
        Align(sequence=0)
    huge = plan_fixed(np.full(3, 2**30, np.int64), dp=1, cp=1, micro_batch_size=3)
    with pytest.raises(mf.PlanError, match="int32"):
        packs_of(huge, 0)
    pack = packs_of(plan_fixed(np.ones(3, np.int64), dp=1, cp=2, micro_batch_size=3), 0)[0]
    with pytest.raises(mf.PlanError, match="cp split"):
        slices_of(pack, [0], "diagonal")  # type: ignore[arg-type]
