"""The .idx of a local store is read by one process of a node, and mapped by none."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.errors import ChangedError, ChecksumError, StoreError
from meshfeed.files import Cache
from meshfeed.files.cache import once
from meshfeed.files.sums import FileSums
from meshfeed.store import IndexedStore, IndexedWriter, node_index, pair
from meshfeed.store.index import Index

LAYOUT, NUM_RANKS = "pp4", 4


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    with IndexedWriter(tmp_path / "data" / "c", "u2") as writer:
        for i in range(400):
            writer.add_document([i % 251] * (1 + i % 7))
    return str(tmp_path / "data" / "c")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def in_children(count: int, act: Callable[[int], object]) -> list[object]:
    """What `act` returns in forked children that run at the same time."""
    ends = []
    for number in range(count):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.write(write, json.dumps(act(number)).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        ends.append((child, read))
    found = []
    for child, read in ends:
        with os.fdopen(read) as stream:
            text = stream.read()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found.append(json.loads(text))
    return found


def opened_in(folder: str) -> list[str]:
    """Files of a folder that this process opens from now on."""
    names: list[str] = []

    def note(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).startswith(folder):
            names.append(Path(str(args[0])).name)

    sys.addaudithook(note)
    return names


def test_one_process_of_a_node_opens_the_files_and_the_others_map_its_copy(corpus: str, cache: Cache) -> None:
    def rank(number: int) -> object:
        names = opened_in(str(Path(corpus).parent))
        with mf.open(corpus, cache=cache) as store:
            lengths = store.lengths(np.arange(400)).sum().item()
        return store.fingerprint, lengths, sorted(set(names))

    found = in_children(NUM_RANKS, rank)
    assert len({tuple(each[:2]) for each in found}) == 1
    assert sorted(each[2] for each in found) == [[], [], [], ["c.bin", "c.idx", "c.sums"]]


def test_a_process_looks_once_at_each_file_of_a_pair(
    corpus: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pair that the node knows: 10,000 of these on a shared disk, and 8 processes a node, add up."""
    list(mf.open(corpus, cache=cache).files)
    looked, whole = list[str](), os.stat

    def noted(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(corpus):
            looked.append(Path(path).suffix)
        return whole(path, *more, **options)

    monkeypatch.setattr(os, "stat", noted)
    store = mf.open(corpus, cache=cache)
    assert looked == [".idx", ".bin", ".sums"]
    with store:
        assert store.read(6, 0, 7).tolist() == [6] * 7
    assert looked[3:] == [".idx"], "was it written since it was opened?"


@pytest.fixture
def small(tmp_path: Path) -> str:
    with IndexedWriter(tmp_path / "small", np.uint16) as writer:
        for i in range(9):
            writer.add_document([i] * (1 + i))
    return str(tmp_path / "small")


def test_what_the_maker_of_a_small_copy_has_checked_others_do_not(
    small: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mf.open(small, cache=cache)
    monkeypatch.setattr(Index, "check", None)
    monkeypatch.setattr(pair, "read_header", None)
    store: Any = mf.open(small, cache=cache)
    assert isinstance(first, IndexedStore) and store.header == first.header


def test_a_damaged_copy_is_not_trusted(small: str, corpus: str, cache: Cache) -> None:
    mf.open(small, cache=cache)
    (copy,) = [path for path in (cache.own_path / "index").iterdir() if len(path.name) == 32]
    with copy.open("r+b") as stream:
        stream.seek(34 + 4 * 5)
        stream.write(struct.pack("<i", 4))  # in place of 6
    with mf.open(small, cache=cache) as store:
        assert store.lengths(np.arange(9)).tolist() == [*range(1, 10)]
    mf.open(corpus, cache=cache)
    (copy,) = [
        path
        for path in (cache.own_path / "index").iterdir()
        if len(path.name) == 32 and path.stat().st_size > 4096
    ]
    with copy.open("r+b") as stream:
        stream.seek(34 + 4 * 5)
        stream.write(struct.pack("<i", 4))
    with pytest.raises(StoreError, match="damaged"):
        mf.open(corpus, cache=cache)


def test_a_fault_is_told_to_all(corpus: str, cache: Cache) -> None:
    with open(f"{corpus}.idx", "r+b") as stream:
        stream.seek(34 + 4 * 5)
        stream.write(struct.pack("<i", -1))
    Path(f"{corpus}.sums").unlink(missing_ok=True)

    def rank(number: int) -> object:
        with pytest.raises(StoreError, match=r"c\.idx: byte 54: sequence 5 has -1 tokens"):
            mf.open(corpus, cache=cache)
        return len(list((cache.own_path / "index").iterdir()))

    assert len(in_children(2, rank)) == 2
    assert in_children(1, rank) == [3]  # the copy, a lock and the time of the last sweep


def test_a_rank_without_stored_bytes_opens_no_file(corpus: str, cache: Cache) -> None:
    list(mf.open(corpus, cache=cache).files)  # the copy is there

    def rank(number: int) -> object:
        names = opened_in(str(Path(corpus).parent))
        recipe = mf.Recipe(
            data=mf.open(corpus, cache=cache), sequence=mf.Windows(16), batch=mf.Batch(sequences=4), epochs=1
        )
        with mf.Feed(
            recipe, mf.Layout.parse(LAYOUT), number, transport=mf.Transport(delivery="direct")
        ) as feed:
            steps = sum(1 for step in feed for _ in step.microbatches)
        return steps, sorted(set(names))

    found = in_children(NUM_RANKS, rank)
    assert len({each[0] for each in found}) == 1 and found[0][0] > 0
    assert [each[1] for each in found] == [["c.bin"], [], [], ["c.bin"]]


def test_an_index_that_is_cut_or_gone_during_a_run_kills_nobody(corpus: str, cache: Cache) -> None:
    def rank(number: int) -> object:
        with mf.open(corpus, cache=cache) as store:
            before = store.lengths(np.arange(400)).tolist()
            os.truncate(f"{corpus}.idx", 10)
            return before == store.lengths(np.arange(400)).tolist()

    assert in_children(1, rank) == [True]
    with pytest.raises(mf.errors.StoreError, match=r"c\.idx: byte 10: ends within"):
        mf.open(corpus, cache=cache)


def test_an_index_that_was_written_since_it_was_opened_is_refused(corpus: str, cache: Cache) -> None:
    store = mf.open(corpus, cache=cache)
    with open(f"{corpus}.idx", "r+b") as stream:
        stream.seek(34)
        stream.write(struct.pack("<i", 3))
    os.utime(f"{corpus}.idx", ns=(1, 1))
    with pytest.raises(ChangedError, match="when it was opened"):
        store.__enter__()


def test_another_version_has_another_copy(corpus: str, cache: Cache) -> None:
    first = mf.open(corpus, cache=cache).fingerprint
    with IndexedWriter(corpus, "u2", overwrite=True) as writer:
        writer.add_document([1, 2, 3])
    with mf.open(corpus, cache=cache) as store:
        assert store.fingerprint != first and store.read(0, 0, 3).tolist() == [1, 2, 3]


def test_what_nobody_used_for_a_day_is_removed(
    corpus: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, and what killed processes left; not the copy that is opened, however old."""
    other, folder = f"{corpus}2", cache.make() / "index"
    with IndexedWriter(other, "u2") as writer:
        writer.add_document([1])
    list(mf.open(other, cache=cache).files)
    list(mf.open(corpus, cache=cache).files)
    for suffix in (".part", ".seen"):
        (folder / f"{'0' * 32}{suffix}").write_bytes(b"half")
    monkeypatch.setattr(once, "_SWEEP_EVERY_S", -1.0)
    Path(f"{other}.bin").touch()  # another version, whose copy is made
    list(mf.open(other, cache=cache).files)
    assert len([each for each in folder.iterdir() if len(each.name) >= 32]) == 8
    for each in folder.iterdir():
        os.utime(each, (1, 1))
    list(mf.open(corpus, cache=cache).files)
    Path(f"{other}.bin").touch()
    list(mf.open(other, cache=cache).files)
    kept = sorted(each.name for each in folder.iterdir() if len(each.name) >= 32)
    assert len(kept) == 4 and kept[0][:32] == kept[1][:32] and kept[2][:32] == kept[3][:32]


def test_a_damaged_copy_is_made_again(corpus: str, cache: Cache) -> None:
    expected = mf.open(corpus, cache=cache).fingerprint
    (copy,) = (each for each in (cache.own_path / "index").iterdir() if len(each.name) == 32)
    for damage in (b"", b"abc", b"not a copy at all"):
        copy.unlink()  # a sweep may still map the old one
        copy.write_bytes(damage)
        with mf.open(corpus, cache=cache) as store:
            assert store.fingerprint == expected and store.lengths(np.array([6])).tolist() == [7]
        assert copy.stat().st_size > 100


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The block whose bytes this process compares, each time."""
    found, wrong = list[int](), FileSums.wrong

    def note(sums: FileSums, data: memoryview, begin: int) -> list[tuple[int, int]]:
        found.append(begin)
        return wrong(sums, data, begin)

    monkeypatch.setattr(FileSums, "wrong", note)
    return found


def test_marks_that_others_have_mapped_are_not_cut(corpus: str, cache: Cache, compared: list[int]) -> None:
    """A sweep may take a copy, and leave the marks beside it: cut, they would kill the jobs that read them."""
    with mf.open(corpus, cache=cache) as store:
        store.read(5, 0, 1)
    compared.clear()
    (seen,) = (cache.own_path / "index").glob("*.seen")
    with seen.open("rb") as mapped:
        seen.with_suffix("").unlink()
        with mf.open(corpus, cache=cache) as store:
            compared.clear()  # of the .idx, for its copy
            assert store.read(5, 0, 6).tolist() == [5] * 6
        assert os.fstat(mapped.fileno()).st_size == 1 and not compared, "the marks hold"


def test_marks_that_the_disk_cannot_take(
    corpus: str, cache: Cache, monkeypatch: pytest.MonkeyPatch, compared: list[int]
) -> None:
    """On a full btrfs, writing to a map would kill the process: it has marks of its own then."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node_index.os, "pwrite", full)
    with mf.open(corpus, cache=cache) as store:
        for _ in range(3):
            compared.clear()
            assert store.read(5, 0, 6).tolist() == [5] * 6
        assert not compared, "it is compared once"
    (seen,) = (cache.own_path / "index").glob("*.seen")
    assert seen.read_bytes() == b"\0"


def test_threads_whose_marks_the_disk_cannot_take_share_their_own(
    corpus: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replaced those of the others, which took that for a change of the file."""
    part, wrong, meet, has_met = 40_000, FileSums.wrong, threading.Barrier(3), threading.Event()
    with IndexedWriter(corpus, "u2", overwrite=True, checksum_bytes=4096) as writer:
        writer.add_document([at for at in range(3) for _ in range(part)])

    def read(at: int) -> list[int]:
        return store.read(0, at * part, at * part + 9).tolist()

    found, first = dict[int, list[int]](), threading.current_thread()
    others = [threading.Thread(target=lambda at=at: found.update({at: read(at)})) for at in (1, 2)]
    left, late = [*others], {thread: threading.Event() for thread in others}

    def let_another_go_on() -> None:
        thread = left.pop()
        late[thread].set()
        thread.join()

    def full(*_: object) -> None:
        meet.wait(60)
        has_met.set()
        if (me := threading.current_thread()) is not first:
            late[me].wait(60)

    def compare(*given: Any) -> list[tuple[int, int]]:
        if threading.current_thread() is first and has_met.is_set() and left:
            let_another_go_on()
        return wrong(*given)

    monkeypatch.setattr(node_index.NodeIndex, "tell", full)
    with mf.open(corpus, cache=cache) as store:
        monkeypatch.setattr(FileSums, "wrong", compare)
        for thread in others:
            thread.start()
        try:
            found[0] = read(0)
        finally:
            while left:
                let_another_go_on()
    assert found == {at: [at] * 9 for at in range(3)}


def test_an_index_that_differs_from_its_checksums_is_refused(corpus: str, cache: Cache) -> None:
    with IndexedWriter(corpus, "u2", overwrite=True) as writer:
        for i in range(2_000):
            writer.add_document([i % 251] * (1 + i % 7))
    with open(f"{corpus}.idx", "r+b") as stream:  # where the fingerprint does not look
        stream.seek(20_000)
        stream.write(b"\1")
    with pytest.raises(ChecksumError, match=r"c\.idx: bytes 0\.\.\d+ do not match its .sums"):
        mf.open(corpus, cache=cache)


@pytest.mark.parametrize("how", ["no cache folder", "a large index"])
def test_without_a_copy_the_index_is_read_in_place(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with mf.open(corpus) as store:
        expected = store.lengths(np.arange(400)).tolist(), store.fingerprint
    cache = Cache(tmp_path / "other")
    if how == "no cache folder":
        (tmp_path / "other").write_text("a file")
    else:
        monkeypatch.setattr(node_index, "_MOST_BYTES", 100)
    with mf.open(corpus, cache=cache) as store:
        assert (store.lengths(np.arange(400)).tolist(), store.fingerprint) == expected
        assert store.read(5, 0, 6).tolist() == [5] * 6
        with IndexedWriter(corpus, "u2", overwrite=True) as writer:
            for i in range(400):
                writer.add_document([7] * (1 + i % 5))
        with pytest.raises(ChangedError, match=r"c\.idx: was written or replaced since it was opened"):
            store.read(5, 0, 1)
        os.truncate(f"{corpus}.idx", 200)
        with pytest.raises(ChangedError, match="the file ends"):
            store.lengths(np.arange(400))


def test_where_the_cache_is_full_each_process_counts_for_itself(
    corpus: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(once, "sync", full)
    store = mf.open(corpus, cache=cache)
    assert store.once_per_node(lambda: np.arange(3), kind="sums").tolist() == [0, 1, 2]
