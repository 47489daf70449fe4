"""Context-parallel splits: every token once, the reference's indices, and nothing lost when put together."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_calls import Rank, on_this_cp_rank
from meshfeed.errors import PlanError
from meshfeed.plan import Align, Packing, packs_of, plan_fixed, plan_step, slices_of
from soak import cases

SPLITS = ("zigzag", "contiguous", "pack_contiguous")


def one_pack(lengths, cp, align=None):
    count = max(len(lengths), 1)
    plan = plan_fixed(np.array(lengths, np.int64), dp=1, cp=cp, micro_batch_size=count, align=align)
    return packs_of(plan, 0)[0]


def indices(pack, slices):
    """Places in the padded pack, in the order in which they are held."""
    starts = pack.cu_seqlens_padded
    held = zip(starts[slices.sequence], slices.start, slices.stop)
    parts = [np.arange(at + start, at + stop) for at, start, stop in held]
    return np.concatenate([np.zeros(0, np.int64), *parts])


packs = given(
    lengths=st.lists(st.one_of(st.integers(1, 5), st.integers(1, 300)), min_size=1, max_size=20),
    cp=st.sampled_from((1, 2, 3, 4, 8)),
    tp=st.sampled_from((1, 2, 3, 8)),
    share=st.sampled_from((1, 32)),
    split=st.sampled_from(SPLITS),
)


@settings(max_examples=cases(150), deadline=None)
@packs
def test_gathered_shards_without_padding_are_the_original(lengths, cp, tp, share, split):
    pack = one_pack(lengths, cp, Align(sequence=tp, pack=share))
    padded = np.full(pack.cu_seqlens_padded[-1], -1)
    for i, (start, length) in enumerate(zip(pack.cu_seqlens_padded, lengths)):
        padded[start : start + length] = i * 1000 + np.arange(length)
    gathered = np.full_like(padded, -2)
    of_ranks = [indices(pack, slices_of(pack, [rank], split)) for rank in range(cp)]
    for mine in of_ranks:
        assert mine.size * cp == padded.size
        gathered[mine] = padded[mine]
    np.testing.assert_array_equal(gathered, padded)
    every_second = indices(pack, slices_of(pack, range(0, cp, 2), split))
    assert every_second.tolist() == sorted(np.concatenate(of_ranks[::2]).tolist())
    real = gathered[gathered >= 0]
    expected = [i * 1000 + t for i, length in enumerate(lengths) for t in range(length)]
    assert real.tolist() == expected


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_zigzag_equals_megatron_core(cp):
    pack = one_pack([1, 77, 1000, 64, 5], cp, Align(sequence=3))
    starts = pack.cu_seqlens_padded
    for rank in range(cp):
        of_sequences = []
        for start, stop in itertools.pairwise(starts):
            batch = {"tokens": torch.arange(int(start), int(stop))[None]}
            of_sequences.append(on_this_cp_rank(batch, Rank(cp, rank))["tokens"][0].numpy())
        np.testing.assert_array_equal(
            indices(pack, slices_of(pack, [rank], "zigzag")), np.concatenate(of_sequences)
        )


def test_zigzag_gives_every_rank_the_same_attention():
    pack = one_pack([4096, 512, 64], 4)
    for i in range(3):
        work = []
        for rank in range(4):
            slices = slices_of(pack, [rank], "zigzag")
            at = slices.sequence == i
            tokens = np.concatenate([np.arange(a, b) for a, b in zip(slices.start[at], slices.stop[at])])
            work.append(int((tokens + 1).sum()))
        assert len(set(work)) == 1


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("cp_ranks", [[0], [1], [0, 1]])
def test_a_dummy_pack_has_no_slices(split, cp_ranks):
    plan = plan_fixed(np.array([8]), dp=2, cp=2, micro_batch_size=1)
    assert slices_of(packs_of(plan, 2)[0], cp_ranks, split).sizes.sum() == 0


def test_unknown_split_is_refused():
    with pytest.raises(PlanError, match="cp split 'ring': choose one of zigzag, contiguous, pack"):
        slices_of(one_pack([8], 2), [0], "ring")


@settings(max_examples=cases(40, 800), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20),
    cp=st.sampled_from((1, 2, 3, 4, 8)),
    share=st.sampled_from((1, 4)),
)
def test_runs_of_a_pack_need_only_a_multiple_of_cp(lengths, cp, share):
    packing = Packing(capacity=4096, align=Align(pack=share))
    plan = plan_step(lengths, packing, dp=1, cp=cp, cp_split="pack_contiguous")
    (pack,) = packs_of(plan, 0)
    assert sum(lengths) <= pack.num_tokens < sum(lengths) + share * cp
    assert pack.padded_lengths[:-1].tolist() == [lengths[i] for i in pack.sequences[:-1]]
    real = []
    for rank in range(cp):
        slices = slices_of(pack, [rank], "pack_contiguous")
        whole = np.array_split(np.arange(pack.num_tokens), cp)[rank]
        np.testing.assert_array_equal(indices(pack, slices), whole)
        stop = np.minimum(slices.stop, pack.lengths[slices.sequence])
        real.append(int(np.maximum(stop - slices.start, 0).sum()))
    assert sum(real) == sum(lengths) and max(real) - min(real) <= share * cp
