"""The arrays of Megatron-core's own datasets and compiled helpers, and ours: equal to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import _get_size_per_split_per_dataset
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index
from megatron.core.datasets.utils import normalize

from meshfeed.errors import RecipeError
from meshfeed.integrations.megatron import gpt_order
from meshfeed.integrations.megatron.gpt_order import (
    PARTS,
    blend_of_sizes,
    blend_of_weights,
    build_index,
    document_range,
    passes_of,
    sizes_of_blend,
)
from soak import cases, some

LAWS = settings(max_examples=cases(120), deadline=None)


def each_way(make):
    """What a call makes with the compiled loops, and with NumPy alone."""
    with pytest.MonkeyPatch.context() as patch:
        made = [make()]
        patch.setattr(gpt_order, "_shuffle", None)
        patch.setattr(gpt_order, "_blend_steps", None)
        return [*made, make()]


def their_index(lengths, length, num_samples, seed, extra, drop_last, begin):
    """What GPTDataset does with its arrays, by its own functions."""
    documents = np.arange(begin, begin + lengths.size, dtype=np.int32)
    sizes = np.concatenate((np.zeros(begin, np.int32), lengths))
    tokens = int(lengths.sum())
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * length + extra:
        epochs += 1
    separate = False
    if epochs > 1:
        before = ((epochs - 1) * tokens - extra) // length
        separate = num_samples - before < int(0.80 * ((tokens - extra) // length))
    random = np.random.RandomState(seed)
    document = _build_document_index(documents, epochs, random, separate)
    sample = helpers.build_sample_idx(sizes, document, length, epochs, tokens, drop_last, extra)
    total = sample.shape[0] - 1
    return document, sample, _build_shuffle_index(before if separate else total, total, random), separate


@LAWS
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda some: sum(some) > 1),
    last=st.integers(1, 9),
    length=st.integers(2, 50),
    num_samples=st.one_of(st.none(), st.integers(1, 80)),
    seed=st.integers(0, 2**32 - 1),
    extra=st.booleans(),
    drop_last=st.booleans(),
    begin=st.integers(0, 3),
)
def test_the_three_arrays_are_theirs(lengths, last, length, num_samples, seed, extra, drop_last, begin):
    lengths = np.array([*lengths, last], np.int32)
    if not drop_last:  # where the last document of all is empty, their own check stops the job
        lengths = np.maximum(lengths, 1)
    document, sample, shuffle, separate = their_index(
        lengths, length, num_samples, seed, extra, drop_last, begin
    )
    passes = passes_of(int(lengths.sum()), length, num_samples, extra=extra, drop_last=drop_last)
    assert passes.separate_last == separate
    for ours in each_way(lambda: build_index(passes, lengths, begin, seed)):
        for name, theirs in (("document", document), ("sample", sample), ("shuffle", shuffle)):
            assert ours[name].dtype == theirs.dtype, name
            assert np.array_equal(ours[name], theirs), name


@pytest.mark.parametrize("num_samples", [None, 70_000, 150_000, 190_000])
@pytest.mark.parametrize("drop_last", [True, False])
def test_larger_datasets_past_blocks_and_single_precision(num_samples, drop_last):
    lengths = np.random.default_rng(1).integers(0, 600, 150_000).astype(np.int32)
    length = 512
    theirs = their_index(lengths, length, num_samples, 77, True, drop_last, 0)
    passes = passes_of(int(lengths.sum()), length, num_samples, drop_last=drop_last)
    assert passes.num_epochs * passes.epoch_tokens > 2**24
    for ours in each_way(lambda: build_index(passes, lengths, 0, 77)):
        for name, want in zip(("document", "sample", "shuffle"), theirs):
            assert np.array_equal(ours[name], want), name


def test_a_partial_sample_may_end_in_an_empty_document():
    passes = passes_of(10, 4, None, drop_last=False)
    assert build_index(passes, np.array([10, 0], np.int32), 0, 3)["sample"].shape == (4, 2)


@LAWS
@given(
    shares=st.lists(
        st.sampled_from(["0", "1", "5", "30", "969", "0.3", ".25", "98.5"]), min_size=1, max_size=3
    ),
    num_documents=st.integers(0, 10_000_000),
)
def test_splits_are_theirs(shares, num_documents):
    split = ",".join(shares)
    if not any(float(share) for share in shares):
        with pytest.raises(RecipeError, match="split"):
            document_range(split, "train", num_documents)
        return
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for part, edges in zip(PARTS, matrix):
        if edges is None:
            with pytest.raises(RecipeError, match=f"gives nothing to part='{part}'"):
                document_range(split, part, num_documents)
        else:
            theirs = tuple(int(round(edge * float(num_documents))) for edge in edges)  # noqa: RUF046
            assert document_range(split, part, num_documents) == theirs


@pytest.mark.parametrize("split", ["", "x", "1,2,3,4", "1.2.3", "0,0,0"])
def test_what_is_no_split_is_refused(split):
    with pytest.raises(RecipeError, match="split="):
        document_range(split, "train", 10)


def their_blend(weights, size):
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(dataset, sample, weights, len(weights), size, False)
    return dataset, sample


def weights_of(kind, count):
    rng = np.random.default_rng(count)
    return {
        "random": rng.random(count) + 1e-3,
        "equal": np.ones(count),
        "extreme": 10 ** rng.uniform(-6, 0, count),
        "whole": rng.integers(1, 100, count),
    }[kind].tolist()


@some(6)
@pytest.mark.parametrize("kind", ["random", "equal", "extreme", "whole"])
@pytest.mark.parametrize("count, size", [(1, 100), (2, 200_000), (3, 200_000), (50, 60_000), (700, 9_000)])
def test_blends_are_theirs(kind, count, size):
    weights = weights_of(kind, count)
    dataset, sample = their_blend(normalize(normalize(weights)), size)
    for ours in each_way(lambda: blend_of_weights(weights, size)):
        assert ours["dataset"].dtype == np.int16 and np.array_equal(ours["dataset"], dataset)
        assert ours["sample"].dtype == np.int64 and np.array_equal(ours["sample"], sample)


@LAWS
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12), st.integers(0, 3000))
def test_blends_of_any_weights_are_theirs(weights, size):
    dataset, sample = their_blend(normalize(normalize(weights)), size)
    for ours in each_way(lambda: blend_of_weights(weights, size)):
        assert np.array_equal(ours["dataset"], dataset) and np.array_equal(ours["sample"], sample)


@LAWS
@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_blends_of_every_sample_are_theirs(sizes):
    total = sum(sizes)
    dataset, sample = np.zeros(total, np.int16), np.zeros(total, np.int64)
    helpers.build_exhaustive_blending_indices(dataset, sample, sizes, len(sizes))
    for ours in each_way(lambda: blend_of_sizes(sizes, None)):
        assert np.array_equal(ours["dataset"], dataset) and np.array_equal(ours["sample"], sample)
    dataset, sample = their_blend(normalize(sizes), total // 2)
    for ours in each_way(lambda: blend_of_sizes(sizes, total // 2)):
        assert np.array_equal(ours["dataset"], dataset) and np.array_equal(ours["sample"], sample)


@LAWS
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    st.integers(1, 10**9),
    st.sampled_from([0.0, 0.005]),
)
def test_sizes_of_a_blend_are_theirs(weights, samples, surplus):
    given_, built = sizes_of_blend(weights, samples, surplus)
    assert [[each] for each in given_] == _get_size_per_split_per_dataset(normalize(weights), [samples])
    theirs = _get_size_per_split_per_dataset(normalize(weights), [samples], surplus=surplus)
    assert [[each] for each in built] == theirs


def test_more_datasets_than_megatron_blends_are_refused():
    with pytest.raises(RecipeError, match="blend of 32767"):
        blend_of_sizes([1] * 32_767, None)


def test_seeds_that_megatron_cannot_take_are_refused():
    with pytest.raises(RecipeError, match="seed=-1"):
        build_index(passes_of(10, 4, None), np.array([10], np.int32), 0, -1)
