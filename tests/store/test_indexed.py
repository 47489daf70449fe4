"""Laws of the .bin/.idx store: what is written is read, by document and as a stream, at any size."""

import errno
import itertools
import os
import pickle
import struct
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import StoreError
from meshfeed.files import LocalFile, byte_file
from meshfeed.store import DatasetStore, IndexedStore, IndexedWriter, best_dtype, open_store
from meshfeed.store.base import replaces_together
from meshfeed.store.node_index import NodeIndex
from raw_index import write_raw
from soak import cases

DTYPES = ("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")
LAWS = settings(max_examples=cases(80), deadline=None)

# documents -> sequences -> tokens; empty ones at every level
CORPORA = st.lists(
    st.lists(st.lists(st.integers(0, 100), max_size=9), max_size=4),
    max_size=12,
)


def write(prefix, corpus, dtype="u2", **options):
    with IndexedWriter(prefix, dtype, overwrite=True, **options) as writer:
        for document in corpus:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    return str(prefix)


def flat(document, dtype="u2"):
    return np.array([token for sequence in document for token in sequence], dtype)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture
def small(tmp_path):
    """Four documents of 3, 0, 5 and 2 tokens."""
    return write(tmp_path / "small", [[[1, 2, 3]], [], [[4, 5], [6, 7, 8]], [[9, 10]]])


# -- what is written is read ------------------------------------------------------------------------


@LAWS
@given(corpus=CORPORA, dtype=st.sampled_from(DTYPES))
def test_documents_come_back(place, corpus, dtype):
    store = open_store(write(place / "documents", corpus, dtype))
    assert store.dtype == np.dtype(dtype)
    assert store.num_documents == len(corpus)
    assert store.num_sequences == sum(map(len, corpus))
    assert store.num_tokens == sum(flat(document).size for document in corpus)
    with store:
        lengths = store.lengths(np.arange(len(corpus)))
        assert lengths.dtype == np.int64
        for place_, document in enumerate(corpus):
            tokens = flat(document, dtype)
            assert lengths[place_] == tokens.size
            for start in range(tokens.size + 1):
                stop = (start + tokens.size + 1) // 2
                read = store.read(place_, start, stop)
                assert read.dtype == store.dtype
                assert np.array_equal(read, tokens[start:stop])
    assert list(store.verify())[-1] == 1.0


@LAWS
@given(corpus=CORPORA, data=st.data())
def test_the_stream_is_the_documents_back_to_back(place, corpus, data):
    stream = np.concatenate([flat(document) for document in corpus] or [flat([])])
    offset = st.integers(0, stream.size)
    ranges = data.draw(st.lists(st.tuples(offset, offset).map(sorted), max_size=6))
    starts = np.array([start for start, _ in ranges], np.int64)
    stops = np.array([stop for _, stop in ranges], np.int64)
    begins = np.cumsum([0, *(flat(document).size for document in corpus)])[:-1]
    with open_store(write(place / "stream", corpus)) as store:
        expected = [stream[start:stop] for start, stop in ranges]
        assert np.array_equal(store.read_stream(starts, stops), np.concatenate([*expected, flat([])]))
        offsets, counts = store.document_starts(starts, stops)
        inside = [sorted({o for o in begins.tolist() if start < o < stop}) for start, stop in ranges]
        assert offsets.tolist() == [o for each in inside for o in each]
        assert counts.tolist() == [len(each) for each in inside]
        assert store.offsets(np.arange(len(corpus))).tolist() == begins.tolist()
        store.will_need(starts, stops)


@pytest.mark.parametrize("num_documents", [1, 255, 256, 257, 5000])
def test_document_starts_around_the_size_of_the_search_guide(tmp_path, num_documents):
    lengths = np.random.default_rng(num_documents).integers(0, 4, num_documents)
    with IndexedWriter(tmp_path / "many", "u1") as writer:
        for length in lengths.tolist():
            writer.add_document(np.zeros(length, np.uint8))
    begins = np.unique(lengths.cumsum() - lengths)
    with open_store(tmp_path / "many") as store:
        size = 1 + store.num_tokens // 50
        starts = np.arange(0, store.num_tokens, size)
        stops = np.minimum(starts + size, store.num_tokens)
        offsets, counts = store.document_starts(starts, stops)
        expected = [begins[(begins > start) & (begins < stop)] for start, stop in zip(starts, stops)]
        assert np.array_equal(offsets, np.concatenate(expected))
        assert counts.tolist() == [each.size for each in expected]


def test_an_index_without_order_is_read_by_document_and_refused_as_a_stream(tmp_path):
    data = np.arange(20, dtype="<u2").tobytes()
    # sequences overlap, go backwards and leave bytes out
    prefix = write_raw(
        tmp_path / "loose", lengths=[3, 2, 4, 0], pointers=[20, 0, 4, 40], documents=[0, 2, 2, 4], data=data
    )
    store = open_store(prefix)
    assert not store.is_stream
    with store:
        assert store.lengths(np.arange(3)).tolist() == [5, 0, 4]
        assert store.read(0, 0, 5).tolist() == [10, 11, 12, 0, 1]
        assert store.read(0, 2, 4).tolist() == [12, 0]
        assert store.read(2, 1, 3).tolist() == [3, 4]
        one = np.array([0])
        for use in (store.read_stream, store.document_starts, store.will_need):
            with pytest.raises(StoreError, match="not a stream"):
                use(one, one)
        with pytest.raises(StoreError, match="not a stream"):
            store.offsets(one)
    assert list(store.verify())[-1] == 1.0


def test_read_stream_fills_the_callers_buffer(small):
    batch = np.zeros((2, 4), np.uint16)
    with open_store(small) as store:
        out = store.read_stream(np.array([6, 1]), np.array([8, 3]), batch[1])
        assert np.shares_memory(out, batch)
        assert batch.tolist() == [[0, 0, 0, 0], [7, 8, 2, 3]]


def test_announced_ranges_are_merged_and_never_mean_the_whole_file(tmp_path, monkeypatch):
    prefix = write(tmp_path / "c", [[[0] * 100_000]], checksum_bytes=None)
    advised = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, at, size, advice: advised.append((at, size)), raising=False
    )
    with open_store(prefix) as store:
        store.will_need(np.array([90_000, 5, 60_000, 7, 10]), np.array([90_001, 10, 60_000, 8, 30]))
        assert advised == [(10, 50), (180_000, 2)]
        advised.clear()
        store.will_need(np.array([5]), np.array([5]))
        assert advised == []


@pytest.mark.parametrize(
    "out",
    [np.zeros(3, np.uint16), np.zeros(4, np.int16), np.zeros((2, 2), np.uint16), np.zeros(8, np.uint16)[::2]],
)
def test_read_stream_refuses_a_buffer_that_does_not_fit(small, out):
    with open_store(small) as store, pytest.raises(StoreError, match="out is"):
        store.read_stream(np.array([0]), np.array([4]), out)


def test_read_stream_refuses_a_read_only_buffer(small):
    out = np.zeros(4, np.uint16)
    out.flags.writeable = False
    with open_store(small) as store, pytest.raises(StoreError, match="writeable"):
        store.read_stream(np.array([0]), np.array([4]), out)


# -- entering, leaving, sharing ---------------------------------------------------------------------


def open_files_under(directory):
    return [p for p in Path("/proc/self/fd").iterdir() if str(directory) in os.path.realpath(p)]


def test_files_are_held_only_within_the_outermost_with(small, tmp_path):
    store = open_store(small)
    assert store.stats.opens == 0
    with store:
        store.lengths(np.arange(4))
        assert store.stats.opens == 0
        with store:
            store.read(0, 0, 3)
        assert store.read(3, 0, 2).tolist() == [9, 10]
        assert (store.stats.opens, store.stats.reads, store.stats.bytes_read) == (1, 2, 10)
    if Path("/proc/self/fd").is_dir():
        assert open_files_under(tmp_path) == []
    with pytest.raises(StoreError, match="not entered"):
        store.read(0, 0, 1)
    with store:
        assert store.read(0, 0, 3).tolist() == [1, 2, 3]
    assert store.stats.opens == 2


def test_making_a_store_touches_nothing(tmp_path):
    store = IndexedStore(tmp_path / "absent")
    assert store.path == str(tmp_path / "absent")
    with pytest.raises(StoreError, match="missing"):
        _ = store.num_tokens


@pytest.mark.parametrize("entered", [False, True])
def test_a_pickled_store_arrives_not_entered_and_works(small, entered):
    store = open_store(small)
    fingerprint = store.fingerprint
    if entered:
        with store:
            store.read(0, 0, 1)
            copy = pickle.loads(pickle.dumps(store))
    else:
        copy = pickle.loads(pickle.dumps(store))
    with pytest.raises(StoreError, match="not entered"):
        copy.lengths(np.array([0]))
    with copy:
        assert copy.read(2, 0, 5).tolist() == [4, 5, 6, 7, 8]
    assert (copy.fingerprint, copy.stats.opens) == (fingerprint, 1)


@pytest.mark.parametrize("entered", [False, True])
def test_a_forked_store_works_in_both_processes(small, entered):
    store = open_store(small)
    if entered:
        store.__enter__()
        store.read(0, 0, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with store:
                code = 0 if store.read(2, 1, 4).tolist() == [5, 6, 7] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with store:
        assert store.read(2, 1, 4).tolist() == [5, 6, 7]


def test_threads_share_a_store(tmp_path):
    prefix = write(tmp_path / "shared", [[[i % 251] * 7] for i in range(300)])
    wrong = []
    with open_store(prefix) as store:

        def read_all(first):
            for document in range(first, 300):
                with store:
                    if store.read(document, 0, 7).tolist() != [document % 251] * 7:
                        wrong.append(document)

        store.read(0, 0, 7)  # opens the file: threads that read first at the same time each open it
        threads = [threading.Thread(target=read_all, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert (store.stats.opens, store.stats.reads) == (1, 1 + sum(300 - first for first in range(6)))


def test_threads_that_read_first_at_once_read_once(small, monkeypatch):
    both_ask, both_read = threading.Barrier(2), threading.Barrier(2)
    first_reads, asked, reads = threading.Event(), itertools.count(), itertools.count()
    ask, read_into = NodeIndex.guard, LocalFile.read_into

    def guard(self):
        answer = ask(self)
        both_ask.wait(600)  # neither has an answer yet
        if next(asked):
            first_reads.wait(600)  # the second gets its own while the first reads
        return answer

    def read(self, *args):
        first_reads.set()
        if next(reads) < 2:
            both_read.wait(600)
        read_into(self, *args)

    monkeypatch.setattr(NodeIndex, "guard", guard)
    monkeypatch.setattr(LocalFile, "read_into", read)
    with open_store(small) as store:
        threads = [threading.Thread(target=store.read, args=(0, 0, 1)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.stats.reads == 2


# -- the file under the reader ----------------------------------------------------------------------


def test_short_reads_are_finished(small, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(byte_file, "_read_ranges", None)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:3]], at))
    with open_store(small) as store:
        assert store.read_stream(np.array([0, 4]), np.array([7, 10])).tolist() == [
            *range(1, 8),
            *range(5, 11),
        ]


def test_a_file_cut_while_it_is_read_is_named_with_the_byte(small):
    with open_store(small) as store:
        store.read(0, 0, 1)
        os.truncate(f"{small}.bin", 9)
        with pytest.raises(StoreError, match=r"small\.bin: byte 9: the file ends"):
            store.read_stream(np.array([0]), np.array([10]))


def test_a_failing_disk_is_named_with_the_byte(small, monkeypatch):
    def fail(fd, buffers, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(small) as store:
        store.read(0, 0, 1)
        monkeypatch.setattr(byte_file, "_read_ranges", None)
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(StoreError, match=r"small\.bin: byte 6: Input/output error"):
            store.read_stream(np.array([3]), np.array([10]))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_changes_between_open_and_enter_is_refused(small, suffix):
    store = open_store(small)
    with open(small + suffix, "ab") as stream:
        stream.write(b"\0" * 8)
    with pytest.raises(StoreError, match="when it was opened"), store:
        store.read(0, 0, 1)


def test_ranges_and_documents_outside_the_store_are_refused(small):
    with open_store(small) as store:
        for start, stop in ((-1, 2), (3, 2), (0, 11), (2**62, 2**62)):
            for use in (store.read_stream, store.document_starts, store.will_need):
                with pytest.raises(StoreError, match=r"the stream has 10"):
                    use(np.array([start]), np.array([stop]))
        for document in (-1, 4, 2**62):
            with pytest.raises(StoreError, match="it has 4"):
                store.lengths(np.array([document]))
            with pytest.raises(StoreError, match="it has 4"):
                store.read(document, 0, 0)
        for start, stop in ((-1, 1), (2, 1), (0, 4)):
            with pytest.raises(StoreError, match="document 0 asked for, it has 3"):
                store.read(0, start, stop)
        with pytest.raises(StoreError, match=r"both must be \[m\]"):
            store.read_stream(np.array([0, 1]), np.array([1]))
        with pytest.raises(StoreError, match="no modes"):
            store.modes(np.array([0]))


@pytest.mark.parametrize("kind", [IndexedStore, DatasetStore])
def test_places_and_lengths_are_one_look_up(kind):
    assert replaces_together(kind, "extents", "offsets", "lengths")


def test_modes_come_back(tmp_path):
    with IndexedWriter(tmp_path / "modes", "i4", modes=True) as writer:
        for mode in (0, 1, -128, 127):
            writer.add_sequence([mode], mode)
        writer.end_document()
    store = open_store(tmp_path / "modes")
    assert store.has_modes
    with store:
        assert store.modes(np.array([3, 0, 2])).tolist() == [127, 0, -128]
        with pytest.raises(StoreError, match="sequence 4 asked for"):
            store.modes(np.array([4]))


# -- size -------------------------------------------------------------------------------------------


def write_sparse(prefix, num_sequences, num_real, length):
    """2**33 and more empty sequences and documents, then a few long ones; the files are mostly holes."""
    bin_size = num_real * length * 2
    first_real = num_sequences - num_real
    pointers_at = 34 + 4 * num_sequences
    documents_at = 34 + 12 * num_sequences
    with open(f"{prefix}.idx", "wb") as idx:
        idx.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num_sequences, num_sequences + 1))
        idx.seek(pointers_at - 4 * num_real)
        idx.write(np.full(num_real, length, "<i4").tobytes())
        idx.seek(documents_at - 8 * num_real)
        idx.write((np.arange(num_real) * length * 2).astype("<i8").tobytes())
        idx.seek(documents_at + 8 * first_real)
        idx.write(np.arange(first_real, num_sequences + 1).astype("<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as data:
        data.truncate(bin_size)
        data.seek(bin_size - 8)
        data.write(np.arange(1, 5, dtype="<u2").tobytes())


def test_size_is_free(tmp_path):
    num_sequences, num_real, length = 2**33 + 5, 8, 2**31 - 1
    write_sparse(tmp_path / "huge", num_sequences, num_real, length)
    tracemalloc.start()
    with open_store(tmp_path / "huge") as store:
        assert (store.num_documents, store.num_tokens) == (num_sequences, num_real * length)
        end = store.num_tokens
        assert store.read_stream(np.array([end - 4]), np.array([end])).tolist() == [1, 2, 3, 4]
        assert store.read(num_sequences - 1, length - 4, length).tolist() == [1, 2, 3, 4]
        offsets, counts = store.document_starts(np.array([0, length - 5, end - 9]), np.array([end, end, end]))
        starts = [k * length for k in range(1, num_real)]
        assert offsets.tolist() == starts * 2 and counts.tolist() == [num_real - 1, num_real - 1, 0]
        assert store.lengths(np.array([0, 2**32, num_sequences - 1])).tolist() == [0, 0, length]
        store.will_need(np.array([end - 4]), np.array([end]))
        assert len(store.fingerprint) == 32
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 24


# -- fingerprint ------------------------------------------------------------------------------------


def test_fingerprint_follows_the_content_and_not_the_path(tmp_path):
    corpus = [[[1, 2, 3]], [[4]]]
    one = open_store(write(tmp_path / "one", corpus)).fingerprint
    assert one == open_store(write(tmp_path / "two", corpus)).fingerprint
    others = [
        open_store(write(tmp_path / "token", [[[1, 2, 9]], [[4]]])).fingerprint,
        open_store(write(tmp_path / "shape", [[[1, 2, 3], [4]]])).fingerprint,
        open_store(write(tmp_path / "dtype", corpus, "i2")).fingerprint,
        open_store(write(tmp_path / "modes", corpus, modes=True)).fingerprint,
        open_store(write(tmp_path / "empty", [])).fingerprint,
    ]
    assert len({one, *others}) == 6


# -- the writer -------------------------------------------------------------------------------------


def test_nothing_appears_before_a_clean_end_and_nothing_is_left_of_another(tmp_path):
    class Unwell(Exception):
        pass

    with pytest.raises(Unwell), IndexedWriter(tmp_path / "c", "u2") as writer:
        writer.add_document([1, 2])
        assert not any((tmp_path / f"c.{suffix}").exists() for suffix in ("bin", "idx", "sums"))
        raise Unwell
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept_unless_told_otherwise(tmp_path):
    write(tmp_path / "c", [[[1]]])
    with pytest.raises(StoreError, match="overwrite=True"), IndexedWriter(tmp_path / "c", "u2"):
        pass
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "c", "u2", overwrite=True):
        raise ZeroDivisionError
    with open_store(tmp_path / "c") as store:
        assert store.read(0, 0, 1).tolist() == [1]
    write(tmp_path / "c", [[[2]]])
    with open_store(tmp_path / "c") as store:
        assert store.read(0, 0, 1).tolist() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx", "c.sums"]


def test_a_store_that_appears_while_writing_is_not_overwritten(tmp_path):
    with pytest.raises(StoreError, match="exists already"), IndexedWriter(tmp_path / "c", "u2") as writer:
        writer.add_document([1, 2])
        (tmp_path / "c.bin").write_bytes(b"precious")
    assert [p.name for p in tmp_path.iterdir()] == ["c.bin"]
    assert (tmp_path / "c.bin").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("dtype", "tokens", "at"),
    [
        ("u2", [5, 65536], 1),
        ("u2", [-1], 0),
        ("u1", [0, 1, 256], 2),
        ("i4", [2**31], 0),
        ("i8", np.array([1, 2**63], np.uint64), 1),
        ("i1", np.array([127, -128, 128], np.int16), 2),
        ("f4", [0, 2**24 + 1], 1),
        ("f4", np.array([1.0, 1e39]), 1),
        ("f8", np.array([-(2**53) - 1]), 0),
    ],
)
def test_tokens_outside_the_dtype_are_refused_by_place(tmp_path, dtype, tokens, at):
    refused = pytest.raises(StoreError, match=rf"sequence 1 \(document 1\): token {at} is")
    with refused, IndexedWriter(tmp_path / "c", dtype) as writer:
        writer.add_document([1])
        writer.add_document(tokens)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "tokens",
    [[1.5], [[1, 2]], ["a"], [2**70], [[1], [2, 3]], None, 3, np.ma.array([1, 2], mask=[True, False])],
)
def test_what_is_no_sequence_of_tokens_is_refused(tmp_path, tokens):
    with IndexedWriter(tmp_path / "c", "i8") as writer:
        with pytest.raises(StoreError):
            writer.add_document(tokens)
        writer.add_document([7])
    with open_store(tmp_path / "c") as store:
        assert (store.num_documents, store.read(0, 0, 1).tolist()) == (1, [7])


@LAWS
@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)
    | st.lists(st.integers(0, 2**64 - 1), max_size=4),
    dtype=st.sampled_from(DTYPES),
)
def test_the_writer_keeps_values_or_refuses_them(place, values, dtype):
    prefix = place / "kept"
    try:
        with IndexedWriter(prefix, dtype, overwrite=True) as writer:
            writer.add_document(values)
    except StoreError:
        return
    with open_store(prefix) as store:
        assert [int(token) for token in store.read(0, 0, len(values))] == values


def test_special_floats_are_values(tmp_path):
    with IndexedWriter(tmp_path / "c", "f4") as writer:
        writer.add_document(np.array([np.inf, -np.inf, np.nan, 0.5]))
    with open_store(tmp_path / "c") as store:
        assert np.array_equal(
            store.read(0, 0, 4), np.array([np.inf, -np.inf, np.nan, 0.5], "f4"), equal_nan=True
        )


def test_a_full_disk_is_a_store_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"), IndexedWriter(tmp_path / "c", "u2") as writer:
        writer.add_document([1])
    assert list(tmp_path.iterdir()) == []


def test_a_store_half_renamed_is_taken_back(tmp_path, monkeypatch):
    rename = Path.replace

    def only_bin(self, target):
        if str(target).endswith(".idx"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", only_bin)
    with pytest.raises(StoreError, match="Input/output error"), IndexedWriter(tmp_path / "c", "u2") as writer:
        writer.add_document([1])
    assert list(tmp_path.iterdir()) == []


def test_a_document_must_be_ended(tmp_path):
    with pytest.raises(StoreError, match="call end_document"), IndexedWriter(tmp_path / "c", "u2") as writer:
        writer.add_sequence([1])
    with IndexedWriter(tmp_path / "c", "u2") as writer:
        writer.add_sequence([1])
        with pytest.raises(StoreError, match="call end_document"):
            writer.add_document([2])
        writer.end_document()
    assert open_store(tmp_path / "c").num_documents == 1


def test_writing_outside_with_modes_unasked_or_a_foreign_dtype_is_refused(tmp_path):
    writer = IndexedWriter(tmp_path / "c", "u2")
    with pytest.raises(StoreError, match="inside `with`"):
        writer.add_document([1])
    with writer:
        with pytest.raises(StoreError, match="modes=True"):
            writer.add_sequence([1], mode=1)
        with pytest.raises(StoreError, match="already writing"):
            writer.__enter__()
    for dtype in ("u4", "f2", "U3"):
        with pytest.raises(StoreError, match="no code"):
            IndexedWriter(tmp_path / "d", dtype)
    with pytest.raises(StoreError, match="missing"), IndexedWriter(tmp_path / "no" / "c", "u2"):
        pass


def test_the_writers_memory_does_not_grow(tmp_path):
    def peak(num_documents):
        tokens = np.arange(8, dtype=np.uint16)
        tracemalloc.start()
        with IndexedWriter(tmp_path / f"c{num_documents}", "u2") as writer:
            for _ in range(num_documents):
                writer.add_document(tokens)
        bytes_ = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return bytes_

    assert peak(5_000) < peak(200) + (1 << 18)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "u2"), (65499, "u2"), (65500, "i4"), (10**9, "i4"), (None, "i4")]
)
def test_best_dtype(vocab_size, dtype):
    assert best_dtype(vocab_size) == np.dtype(dtype)
