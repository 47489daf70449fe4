"""Megatron-core's own builder and reader as the oracle: equal bytes, equal tokens, both ways."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from meshfeed.store import IndexedWriter, best_dtype, open_store
from soak import cases

NAMES = tuple(dtype.name for dtype in DType)
LAWS = settings(max_examples=cases(60), deadline=None)
TOKENS = st.lists(st.integers(0, 127), max_size=9)
MODES = st.integers(-128, 127)
CORPORA = st.lists(st.lists(st.tuples(TOKENS, MODES), max_size=4), max_size=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("oracle")


def write_theirs(prefix, corpus, name, multimodal):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, name), multimodal=multimodal)
    for document in corpus:
        for tokens, mode in document:
            builder.add_item(torch.tensor(tokens, dtype=torch.int64), mode)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_ours(prefix, corpus, name, multimodal):
    with IndexedWriter(prefix, name, modes=multimodal, overwrite=True) as writer:
        for document in corpus:
            for tokens, mode in document:
                writer.add_sequence(tokens, mode if multimodal else 0)
            writer.end_document()
    return str(prefix)


def read_bytes(prefix):
    contents = []
    for suffix in (".bin", ".idx"):
        with open(prefix + suffix, "rb") as stream:
            contents.append(stream.read())
    return contents


@LAWS
@given(corpus=CORPORA, name=st.sampled_from(NAMES), multimodal=st.booleans())
def test_both_writers_write_the_same_bytes(place, corpus, name, multimodal):
    ours = write_ours(place / "ours", corpus, name, multimodal)
    theirs = write_theirs(place / "theirs", corpus, name, multimodal)
    assert read_bytes(ours) == read_bytes(theirs)


def random_corpus(name):
    rng = np.random.default_rng(NAMES.index(name))
    return [
        [
            (rng.integers(0, 128, 1 + rng.integers(40)).tolist(), int(rng.integers(-128, 128)))
            for _ in range(n)
        ]
        for n in rng.integers(0, 5, 50).tolist()
    ]


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_their_reader_reads_our_files(tmp_path, name, multimodal):
    corpus = random_corpus(name)
    theirs = IndexedDataset(write_ours(tmp_path / "c", corpus, name, multimodal), multimodal=multimodal)
    sequences = [sequence for document in corpus for sequence in document]
    assert len(theirs) == len(sequences)
    assert theirs.document_indices.tolist() == np.cumsum([0, *map(len, corpus)]).tolist()
    for place_, (tokens, mode) in enumerate(sequences):
        got = theirs.get(place_)
        if multimodal:
            got, got_mode = got
            assert got_mode == mode
        assert got.dtype == np.dtype(name) and got.tolist() == tokens


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_our_reader_reads_their_files(tmp_path, name, multimodal):
    corpus = random_corpus(name)
    store = open_store(write_theirs(tmp_path / "c", corpus, name, multimodal))
    assert (store.dtype, store.has_modes, store.is_stream) == (np.dtype(name), multimodal, True)
    documents = [[token for tokens, _ in document for token in tokens] for document in corpus]
    with store:
        lengths = store.lengths(np.arange(store.num_documents))
        assert lengths.tolist() == list(map(len, documents))
        assert [store.read(k, 0, len(tokens)).tolist() for k, tokens in enumerate(documents)] == documents
        everything = store.read_stream(np.array([0]), np.array([store.num_tokens]))
        assert everything.tolist() == [token for tokens in documents for token in tokens]
        if multimodal:
            modes = [mode for document in corpus for _, mode in document]
            assert store.modes(np.arange(store.num_sequences)).tolist() == modes
    assert list(store.verify())[-1] == 1.0


def test_their_merged_files_are_read(tmp_path):
    one, two = ([[([1, 2, 3], 0)], [([4], 0), ([5, 6], 0)]], [[([7], 0)], []])
    builder = IndexedDatasetBuilder(str(tmp_path / "merged.bin"), dtype=np.uint16)
    for name, corpus in (("one", one), ("two", two)):
        builder.add_index(write_ours(tmp_path / name, corpus, "uint16", False))
    builder.finalize(str(tmp_path / "merged.idx"))
    both = write_ours(tmp_path / "both", one + two, "uint16", False)
    assert read_bytes(both) == read_bytes(str(tmp_path / "merged"))
    assert open_store(both).fingerprint == open_store(tmp_path / "merged").fingerprint


@pytest.mark.parametrize("vocab_size", [None, 0, 256, 65499, 65500, 65536, 2**31])
def test_best_dtype_is_theirs(vocab_size):
    assert best_dtype(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))
