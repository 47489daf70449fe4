"""PREFIX.sums beside a .bin/.idx pair: whole, of these very files, and what it finds."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import mosaic
from meshfeed.cli.main import main
from meshfeed.errors import ChangedError, ChecksumError, StoreError
from meshfeed.files import Cache, byte_file
from meshfeed.remote.cached import CachedFile
from meshfeed.store import IndexedStore, IndexedWriter, checksums
from meshfeed.store.checksums import checksums_beside
from meshfeed.store.node_index import NodeIndex
from raw_index import write_raw
from services.faults import Fault, Faults
from services.needs import needs
from services.nginx import Nginx

BLOCK = 1 << 12
SUFFIXES = (".bin", ".idx", ".sums")


def write(
    prefix: Path, seed: int = 0, checksum_bytes: int | None = BLOCK, documents: int = 60, **options: Any
) -> Path:
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.uint16, checksum_bytes=checksum_bytes, **options) as writer:
        for _ in range(documents):
            writer.add_document(rng.integers(0, 60_000, 500))
    return prefix


def contents(prefix: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[bytes | None]:
    paths = [Path(f"{prefix}{suffix}") for suffix in suffixes]
    return [path.read_bytes() if path.exists() else None for path in paths]


def flip(path: Path | str, at: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 16]))


def verify(prefix: Path) -> None:
    assert list(mf.open(prefix).verify())[-1] == 1.0


def is_guarded(prefix: Path) -> bool:
    store = mf.open(prefix)
    sums = checksums_beside(store.path)
    return sums is not None and checksums.is_of(sums, store.path, store.fingerprint)


def run(*words: Any) -> int:
    return main(["inspect", *map(str, words)])


# -- writing ----------------------------------------------------------------------------------------


def test_the_pair_is_the_same_with_and_without(tmp_path: Path) -> None:
    with_sums, without = write(tmp_path / "a"), write(tmp_path / "b", checksum_bytes=None)
    assert contents(with_sums)[:2] == contents(without)[:2]
    assert contents(with_sums)[2] is not None and contents(without)[2] is None
    assert is_guarded(with_sums)
    verify(with_sums)
    verify(without)


@pytest.mark.parametrize("num_documents", [0, 1, 60])
@pytest.mark.parametrize("modes", [False, True])
def test_writer_and_command_agree(tmp_path: Path, num_documents: int, modes: bool) -> None:
    prefix = tmp_path / "c"
    with IndexedWriter(prefix, np.uint16, modes=modes, checksum_bytes=BLOCK) as writer:
        for i in range(num_documents):
            writer.add_document(np.arange(i * 40) % 60_000)
    written = contents(prefix)
    Path(f"{prefix}.sums").unlink()
    list(checksums.write_checksums(IndexedStore(prefix).pair, BLOCK))
    assert contents(prefix) == written
    verify(prefix)


@pytest.mark.parametrize("block", [0, -1, 1, 4095, 5000, 1 << 27])
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, block: int) -> None:
    with pytest.raises(StoreError, match="a power of two"):
        IndexedWriter(tmp_path / "c", "u2", checksum_bytes=block)


def test_overwriting_takes_the_old_checksums_away(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", 0)
    write(prefix, 1, overwrite=True)
    assert is_guarded(prefix)
    verify(prefix)
    write(prefix, 2, checksum_bytes=None, overwrite=True)
    assert contents(prefix)[2] is None


def test_checksums_alone_are_not_overwritten_either(tmp_path: Path) -> None:
    Path(tmp_path / "c.sums").write_bytes(b"precious")
    with pytest.raises(StoreError, match=r"c\.sums: exists already"):
        write(tmp_path / "c")
    assert (tmp_path / "c.sums").read_bytes() == b"precious"


class Killed(BaseException):
    """The process ended here."""


@pytest.mark.parametrize("step", range(6))
def test_killed_while_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Wherever it ends, no checksums lie beside a readable pair that is not theirs."""
    prefix = write(tmp_path / "c", 0)
    steps = iter(range(100))

    def counted(name: str) -> Callable[..., Any]:
        whole = getattr(Path, name)

        def act(path: Path, *args: Any, **options: Any) -> Any:
            if path.name.startswith("c.") and next(steps) >= step:
                raise Killed
            return whole(path, *args, **options)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", counted("unlink"))
        patch.setattr(Path, "replace", counted("replace"))
        with pytest.raises(Killed):  # the sixth is of the temporary files
            write(prefix, 1, overwrite=True)
    if Path(f"{prefix}.idx").exists():
        assert is_guarded(prefix)
        verify(prefix)
    else:
        assert step > 0
    write(prefix, 2, overwrite=True)
    verify(prefix)


def test_files_that_are_written_meanwhile_get_no_checksums(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", checksum_bytes=None)
    making = checksums.write_checksums(mf.open(prefix).pair, BLOCK)
    next(making)
    flip(f"{prefix}.bin", 0)
    os.utime(f"{prefix}.bin", (1, 1))
    with pytest.raises(ChangedError, match="was written while"):
        list(making)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


# -- the command --------------------------------------------------------------------------------------


def test_inspect_makes_and_verifies_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "c", checksum_bytes=None)
    assert run(prefix, "--json") == 0
    assert json.loads(capsys.readouterr().out)["checksums"] == "none"
    assert run(prefix, "--write-checksums", "--verify", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["checksums"], facts["verified"]) == ("yes", True)


@pytest.mark.parametrize(("suffix", "at"), [(".bin", 0), (".bin", 20_000), (".bin", 59_999), (".idx", 400)])
def test_verify_names_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, at: int
) -> None:
    prefix = write(tmp_path / "c")
    flip(f"{prefix}{suffix}", at)
    assert run(prefix, "--verify") == 1
    told = capsys.readouterr().err.replace("\n", "")
    if suffix == ".bin":
        begin = at // BLOCK * BLOCK
        assert f"c.bin: bytes {begin}..{min(begin + BLOCK, 60_000)} do not match its .sums" in told
        assert "1 of 16 blocks" in told
    else:
        assert "c.idx: byte" in told


@pytest.mark.parametrize("how", ["cut", "flipped", "another"])
def test_damaged_checksums_are_named_and_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    prefix = write(tmp_path / "c")
    sums = Path(f"{prefix}.sums")
    match how:
        case "cut":
            os.truncate(sums, 60)
        case "flipped":
            flip(sums, 70)
        case _:
            sums.write_text("a list of sums of somebody's")
    assert run(prefix, "--verify") == 1
    assert "c.sums: " in capsys.readouterr().err
    with mf.open(prefix) as store, pytest.raises(StoreError, match=r"c\.sums: "):
        store.read(0, 0, 5)
    assert run(prefix, "--write-checksums", "--verify") == 0


def test_a_pair_that_others_wrote_anew_is_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Megatron does, which does not know of checksums: same sizes, same index, other tokens."""
    prefix = write(tmp_path / "c", 0)
    other = write(tmp_path / "d", 1)
    for suffix in (".bin", ".idx"):
        Path(f"{other}{suffix}").replace(f"{prefix}{suffix}")
    assert run(prefix, "--json") == 0
    assert json.loads(capsys.readouterr().out)["checksums"] == "of another store"
    assert run(prefix, "--verify") == 1
    assert "if they are newer than it, recreate it" in capsys.readouterr().err
    assert run(prefix, "--write-checksums", "--verify") == 0


@pytest.mark.parametrize("at", [0, 30_001])  # where the fingerprint looks, and where it does not
def test_checksums_that_the_files_contradict_are_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    prefix = write(tmp_path / "c")
    sums, begin = contents(prefix)[2], at // BLOCK * BLOCK
    flip(f"{prefix}.bin", at)
    assert run(prefix, "--write-checksums") == 1
    err = capsys.readouterr().err.replace("\n", "")
    assert (
        f"c.bin: bytes {begin}..{begin + BLOCK} do not match its .sums, 1 of 16 blocks in all; restore" in err
    )
    assert "c.sums and write it again" in err and "wrote" not in err
    assert contents(prefix)[2] == sums
    flip(f"{prefix}.bin", at)  # restored
    assert run(prefix, "--write-checksums", "--json") == 0
    told = capsys.readouterr()
    file = {"file": f"{prefix}.sums", "blocks": 2, "block_bytes": 1 << 16}
    assert json.loads(told.out)["checksums_file"] == file
    assert "c.sums: checksums of 2 blocks of 65,536 bytes" in told.err
    assert contents(prefix)[2] != sums


# -- local files, as they are read ---------------------------------------------------------------------


def overwrite(path: str, at: int) -> None:
    """Other bytes in place, with the times that the file had."""
    stat = os.stat(path)
    flip(path, at)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_local_file_that_was_overwritten_in_place_is_noticed_where_it_is_read(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c")
    with mf.open(prefix) as store:
        store.read(0, 0, 5)  # a copy of the index is there now
    overwrite(f"{prefix}.bin", 30_001)  # where no fingerprint looks
    store = mf.open(prefix)
    begin = 30_001 // BLOCK * BLOCK
    with store:
        assert store.read(0, 0, 500).size == 500
        for _ in range(2):
            with pytest.raises(ChecksumError, match=rf"/c\.bin: bytes {begin}\.\.{begin + BLOCK} do not"):
                store.read_stream(np.array([15_000]), np.array([15_010]))
        with pytest.raises(ChecksumError):  # a range over many blocks
            store.read_stream(np.array([100]), np.array([29_000]))


def test_a_block_is_compared_once_per_node_with_those_around_it(tmp_path: Path) -> None:
    prefix, readers = write(tmp_path / "c", documents=300), list[int]()
    index = mf.open(prefix).files[1]
    assert isinstance(index, NodeIndex)
    found = index.guard()
    assert found is not None
    for start in (0, 40_000):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with mf.open(prefix) as store:
                    store.read_stream(np.array([start]), np.array([start + 10]))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        readers.append(int(found[1].sum()))
    assert readers == [16, 32]  # seen from here, and so by every process


def test_a_local_file_that_is_written_during_a_run_is_noticed(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", checksum_bytes=None)
    with mf.open(prefix) as store:
        store.read(0, 0, 5)
        flip(f"{prefix}.bin", 30_001)
        os.utime(f"{prefix}.bin")  # times tick every few milliseconds
        with pytest.raises(ChangedError, match=r"c\.bin: was written, or its modification time"):
            store.read(0, 0, 5)


def test_a_touched_file_is_read_on_and_a_written_one_is_compared_again(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c")
    with mf.open(prefix) as store, mf.open(prefix) as late:
        expected = store.read_stream(np.array([0]), np.array([20_000])).tolist()
        os.utime(f"{prefix}.bin", (1, 1))
        assert store.read_stream(np.array([0]), np.array([20_000])).tolist() == expected
        flip(f"{prefix}.bin", 30_001)
        for each in (store, late):  # other processes have seen the block whole, and so has this one
            with pytest.raises(ChecksumError, match=r"c\.bin: bytes"):
                each.read_stream(np.array([15_000]), np.array([15_010]))


def test_a_file_written_after_others_compared_it_is_compared_in_the_first_read(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", documents=300)
    with mf.open(prefix) as store:
        store.read(0, 0, 5)  # marks the first blocks for the node
    late = mf.open(prefix)
    flip(f"{prefix}.bin", 3 * BLOCK + 1)
    os.utime(f"{prefix}.bin")
    with late, pytest.raises(ChecksumError, match=rf"c\.bin: bytes {3 * BLOCK}\.\."):
        late.read_stream(np.array([3 * BLOCK // 2]), np.array([40 * BLOCK // 2]))  # blocks with and without


def test_a_damaged_block_does_not_fail_a_read_of_those_around_it(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", documents=300)
    mf.open(prefix)
    overwrite(f"{prefix}.bin", 3 * BLOCK + 1)
    with mf.open(prefix) as store:
        for _ in range(2):
            assert store.read_stream(np.array([0]), np.array([2 * BLOCK // 2])).size == BLOCK
            with pytest.raises(ChecksumError, match=rf"c\.bin: bytes {3 * BLOCK}\.\."):
                store.read_stream(np.array([3 * BLOCK // 2]), np.array([3 * BLOCK // 2 + 9]))


def test_a_damaged_block_is_compared_once_for_those_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its bytes are wrong, or the disk cannot read them."""
    prefix, bad, preadv, reads = write(tmp_path / "c", documents=300), 3 * BLOCK, os.preadv, list[int]()
    mf.open(prefix)
    overwrite(f"{prefix}.bin", bad + 1)
    sector = 9 * BLOCK + 512

    def failing(fd: int, buffers: tuple[memoryview], at: int) -> int:
        reads.append(at)
        if at < sector + 512 and at + len(buffers[0]) > sector:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(byte_file, "_read_ranges", None)
    monkeypatch.setattr(os, "preadv", failing)
    with mf.open(prefix) as store:
        for begin, end in ((0, 3), (4, 9), (10, 16)):
            assert store.read_stream(np.array([begin * BLOCK // 2]), np.array([end * BLOCK // 2])).size
        del reads[:]
        for begin, end in ((0, 3), (4, 9), (10, 16)):
            store.read_stream(np.array([begin * BLOCK // 2]), np.array([end * BLOCK // 2]))
        assert reads == [0, 4 * BLOCK, 10 * BLOCK]
        for _ in range(2):
            with pytest.raises(ChecksumError, match=rf"c\.bin: bytes {bad}\.\."):
                store.read_stream(np.array([bad // 2]), np.array([bad // 2 + 9]))
            with pytest.raises(StoreError, match=rf"c\.bin: byte {9 * BLOCK}: Input/output error"):
                store.read_stream(np.array([9 * BLOCK // 2]), np.array([9 * BLOCK // 2 + 9]))


def test_a_pair_beside_an_old_sums_is_not_read(tmp_path: Path) -> None:
    """As from afar: nobody can tell whether the files are newer, or damaged."""
    prefix, other = write(tmp_path / "c", 0), write(tmp_path / "d", 1)
    for suffix in (".bin", ".idx"):
        Path(f"{other}{suffix}").replace(f"{prefix}{suffix}")
    with mf.open(prefix) as store, pytest.raises(StoreError, match=r"c\.sums: made for other files"):
        store.read(0, 0, 5)


# -- from far away ------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Nginx]:
    needs("nginx")
    (tmp_path / "served").mkdir()
    with Nginx(tmp_path / "served") as nginx:
        yield nginx


def far(server: Nginx, tmp_path: Path, block_bytes: int = BLOCK) -> IndexedStore:
    store = mf.open(f"{server.url}/c", cache=Cache(tmp_path / "cache", block_bytes=block_bytes))
    assert isinstance(store, IndexedStore)
    return store


def read(store: IndexedStore) -> list[int]:
    with store:
        return store.read_stream(np.array([0]), np.array([store.num_tokens])).tolist()


def test_bytes_that_differ_from_their_checksums_are_not_served(server: Nginx, tmp_path: Path) -> None:
    prefix = write(tmp_path / "served" / "c")
    stat = os.stat(f"{prefix}.bin")
    flip(f"{prefix}.bin", 30_001)  # where no fingerprint looks
    os.utime(f"{prefix}.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    store = far(server, tmp_path)
    begin = 30_001 // BLOCK * BLOCK
    with store:
        assert store.read(0, 0, 500).size == 500
        for _ in range(2):  # nor is it kept
            with pytest.raises(ChecksumError, match=rf"/c\.bin: bytes {begin}\.\.{begin + BLOCK} .*3 times"):
                store.read_stream(np.array([15_000]), np.array([15_010]))
    with pytest.raises(ChecksumError, match=rf"bytes {begin}\.\."):
        list(store.verify())


def test_checksums_of_another_store_are_refused_at_once(server: Nginx, tmp_path: Path) -> None:
    write(tmp_path / "served" / "c", 0)
    other = write(tmp_path / "d", 1)
    for suffix in (".bin", ".idx"):
        Path(f"{other}{suffix}").replace(tmp_path / "served" / f"c{suffix}")
    with pytest.raises(StoreError, match=r"/c\.sums: made for fingerprint .* or remove it") as caught:
        far(server, tmp_path)
    assert type(caught.value) is StoreError


def test_checksums_of_files_of_another_size_are_refused_at_once(server: Nginx, tmp_path: Path) -> None:
    prefix = write(tmp_path / "served" / "c")
    write_raw(prefix, lengths=[2], pointers=[0], documents=[0, 1], data=b"\1\0\2\0")
    with pytest.raises(StoreError, match=r"c\.bin: 4 bytes, its \.sums was made for 60000"):
        far(server, tmp_path)


def test_without_checksums_all_is_as_it_was(server: Nginx, tmp_path: Path) -> None:
    prefix = write(tmp_path / "served" / "c", checksum_bytes=None)
    store = far(server, tmp_path)
    assert store.files[0].guarded_by is None
    assert read(store) == read(mf.open(prefix))
    list(store.verify())


def test_what_was_fetched_unchecked_is_not_taken_for_checked(server: Nginx, tmp_path: Path) -> None:
    prefix = write(tmp_path / "served" / "c", checksum_bytes=None)
    read(far(server, tmp_path))
    list(checksums.write_checksums(mf.open(prefix).pair, BLOCK))
    guarded = far(server, tmp_path)
    assert guarded.files[0].guarded_by == guarded.fingerprint
    with guarded:
        fetched = guarded.stats.bytes_fetched
        tokens = guarded.read_stream(np.array([0]), np.array([guarded.num_tokens]))
        assert tokens.tolist() == read(mf.open(prefix))
        assert guarded.stats.bytes_fetched - fetched == 60_000


@pytest.mark.parametrize(
    ("block", "becomes"), [(4096, 16384), (12288, 16384), (16384, 16384), (20480, 32768)]
)
def test_a_caches_blocks_are_whole_checksums(server: Nginx, tmp_path: Path, block: int, becomes: int) -> None:
    prefix = write(tmp_path / "served" / "c", checksum_bytes=1 << 14)
    store = far(server, tmp_path, block)
    data = store.files[0]
    assert isinstance(data, CachedFile)
    assert data._opened.cut.block_bytes == becomes
    assert read(store) == read(mf.open(prefix))


def test_far_checksums_are_made_where_the_files_are(server: Nginx, tmp_path: Path) -> None:
    write(tmp_path / "served" / "c")
    with pytest.raises(StoreError, match="is remote"):
        list(checksums.write_checksums(far(server, tmp_path).pair))


@pytest.mark.parametrize("times", ["kept", "new"])
def test_verify_looks_at_storage_and_not_at_what_the_node_remembers(
    server: Nginx, tmp_path: Path, capsys: pytest.CaptureFixture[str], times: str
) -> None:
    """A process that reads keeps answers and blocks alive; neither says what lies there now."""
    prefix = write(tmp_path / "served" / "c")
    store = far(server, tmp_path)
    words = f"{server.url}/c", "--verify", "--cache", tmp_path / "cache"
    with store:
        store.read_stream(np.array([0]), np.array([store.num_tokens]))
        list(store.verify())
        (overwrite if times == "kept" else flip)(f"{prefix}.bin", 30_001)
        begin = 30_001 // BLOCK * BLOCK
        with pytest.raises(ChecksumError, match=rf"bytes {begin}\.\."):
            list(store.verify())
        assert run(*words) == 1
        assert f"bytes {begin}.." in capsys.readouterr().err.replace("\n", "")
        (overwrite if times == "kept" else flip)(f"{prefix}.bin", 30_001)
        assert run(*words) == 0
        assert store.read(0, 0, 500).size == 500
    assert not list((tmp_path / "cache").glob("*/anew-*"))


def test_verify_of_shards_looks_at_storage(server: Nginx, tmp_path: Path) -> None:
    samples = [{"tokens": np.arange(i + 1, dtype=np.uint16)} for i in range(50)]
    mosaic.written(tmp_path / "served" / "m", {"tokens": "ndarray:uint16"}, samples, hashes=["sha1"])
    store = mf.open(f"{server.url}/m", cache=tmp_path / "cache")
    with store:
        store.read(0, 0, 1)
        list(store.verify())
        shard = next((tmp_path / "served" / "m").glob("shard*"))
        overwrite(str(shard), 1_000)
        with pytest.raises(ChecksumError):
            list(store.verify())


def test_verify_of_local_files_reads_the_files_and_not_the_nodes_copy(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", checksum_bytes=None)
    with mf.open(prefix) as store, pytest.raises(StoreError, match=r"c\.idx: byte 38: "):
        with open(f"{prefix}.idx", "r+b") as stream:
            stream.seek(38)
            stream.write(b"\xff\xff\xff\xff")
        list(store.verify())


# -- damage that stays --------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "at"), [(".bin", 0), (".bin", 59_999), (".idx", 0), (".idx", 600)])
def test_damage_where_the_fingerprint_looks_is_not_blamed_on_the_checksums(
    server: Nginx, tmp_path: Path, suffix: str, at: int
) -> None:
    """From far away, and, for the .bin, on this machine: the error names file and block, and hides nothing."""
    prefix = write(tmp_path / "served" / "c")
    overwrite(f"{prefix}{suffix}", at)
    begin = at // BLOCK * BLOCK
    with pytest.raises(
        ChecksumError, match=rf"/c\{suffix}: bytes {begin}\.\.\d+ do not match .*copy it again"
    ) as far_:
        far(server, tmp_path)
    assert "recreate" not in str(far_.value) and "3 times" in str(far_.value)
    if suffix == ".bin":
        with mf.open(prefix) as store, pytest.raises(ChecksumError) as near:
            store.read(0, 0, 5)
        assert re.search(rf"/c\.bin: bytes {begin}\.\.\d+ do not match .*copy it again$", str(near.value))
        with pytest.raises(
            ChecksumError, match=r"1 of \d+ blocks in all; the file is damaged: copy it again$"
        ):
            verify(prefix)


def test_a_server_that_answers_short_ranges_wrongly(server: Nginx, tmp_path: Path) -> None:
    write(tmp_path / "served" / "c")

    def turned(number: int, method: str, path: str) -> Fault:
        return Fault(flip=5, flip_most=512) if path.endswith(".bin") else Fault()

    with (
        Faults(server.url, turned) as proxy,
        pytest.raises(
            ChecksumError, match=r"/c: short ranges .* come wrong 3 times, whole blocks come right"
        ),
    ):
        mf.open(f"{proxy.url}/c", cache=Cache(tmp_path / "cache", block_bytes=BLOCK))
