"""Checksums of the blocks of a .bin/.idx pair: create them, match them with their pair, verify the pair.

`files.sums` is the format of PREFIX.sums. Reads are verified elsewhere: of remote files by
`remote.fetcher.objects`, of a local .bin by `GuardedFile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from meshfeed.errors import ChangedError, ChecksumError, StoreError
from meshfeed.files import ByteFile, LocalFile, typed_errors
from meshfeed.files.local.durable import durable_file
from meshfeed.files.local.version import Version, version_of
from meshfeed.files.sums import (
    ANEW,
    BIN,
    BLOCK_BYTES,
    IDX,
    SUFFIX,
    Summer,
    Sums,
    is_block_size,
    parse,
    wrong_block,
)
from meshfeed.store.index import ends_of_idx, sampled_of_bin
from meshfeed.store.pair import Pair

_READ_BYTES = 1 << 26  # whole blocks, whatever their size
_LOOKS = 3
_FEW = 3
_RESTORE = "restore the file from a copy or, if it is right as it is, remove {} and write it again"

Block = tuple[str, int, int]
"""A block of a file: its URL, first byte and end."""


def checksums_beside(prefix: str) -> Sums | None:
    """The content of a local `prefix`.sums; None without one. Raises StoreError."""
    path = Path(prefix + SUFFIX)
    with typed_errors(path):
        return parse(str(path), path.read_bytes()) if path.exists() else None


def checksums_of(prefix: str, fingerprint: str) -> Sums | None:
    """The checksums of a local pair with that fingerprint; None without any.

    Raises StoreError for checksums of other files; ChecksumError if the pair or its .sums is damaged.
    """
    sums = checksums_beside(prefix)
    if sums is not None and not is_of(sums, prefix, fingerprint):
        raise _refused_here(prefix, sums)
    return sums


def is_of(sums: Sums, prefix: str, fingerprint: str) -> bool:
    """Whether checksums belong to the files of a prefix, which have this fingerprint."""
    sizes = [LocalFile(f"{prefix}{suffix}").size_bytes for suffix in (".bin", ".idx")]
    return [each.size_bytes for each in sums.files] == sizes and sums.fingerprint == fingerprint


def write_checksums(pair: Pair, block_bytes: int = BLOCK_BYTES) -> Iterator[float]:
    """Write `path`.sums for files on this machine, or replace it, yielding the fraction done, in (0, 1].

    Raises ChecksumError if there is a .sums already, of these files, that a block of them contradicts;
    StoreError. The .sums appears whole or not at all.
    """
    refuse_block_bytes(pair.path, block_bytes)
    if pair.data.is_remote:
        raise StoreError(f"{pair.path}: is remote; write its checksums where it was made, and copy them")

    def versions() -> list[Version]:
        return [version_of(f"{pair.path}{suffix}") for suffix in (".bin", ".idx")]

    fresh = Pair(pair.path, LocalFile(pair.idx.url), LocalFile(pair.data.url))  # verifies nothing
    before, old = versions(), _usable_beside(fresh)
    summers, wrong = (Summer(block_bytes), Summer(block_bytes)), list[Block]()
    for number, begin, piece, done in _pieces(fresh):
        summers[number].update(piece)
        if old is not None:
            wrong += _wrong_in(fresh, old, number, begin, piece)
        yield done
    sums = Sums(fresh.fingerprint, (summers[0].sums(), summers[1].sums()))
    if versions() != before:
        raise ChangedError(f"{pair.path}: was written while its checksums were made; make them again")
    if old is not None and _are_damaged(fresh, old, wrong):
        raise wrong_block(*wrong[0], _of_all(old, wrong), _RESTORE.format(pair.path + SUFFIX))
    with durable_file(Path(pair.path + SUFFIX)) as stream:
        stream.write(sums.encode())


def compare(pair: Pair) -> Iterator[float]:
    """Read and verify every block of files that have checksums, yielding the fraction done, in (0, 1].

    Raises ChecksumError naming the first block that differs; StoreError for checksums of another store.
    """
    if not pair.is_summed:
        return
    sums = None if pair.data.is_remote else checksums_beside(pair.path)
    if sums is None:  # remote bytes were verified when they were fetched
        yield from (done for *_, done in _pieces(pair))
        return
    if [each.size_bytes for each in sums.files] != [each.size_bytes for each in pair.files]:
        raise _others_sums(pair.path, "files of other sizes")
    wrong = list[Block]()
    for number, begin, piece, done in _pieces(pair):
        wrong += _wrong_in(pair, sums, number, begin, piece)
        yield done
    if _are_damaged(pair, sums, wrong):
        raise wrong_block(*wrong[0], _of_all(sums, wrong))
    if sums.fingerprint != pair.fingerprint:
        raise _others_sums(pair.path, "another store")


def refuse_others(pair: Pair) -> Pair:
    """The pair, once any checksums that guard its files are known to be its own. Raises StoreError.

    Peeks for header and fingerprint are not guarded, so they may be wrong: they are read again before a
    mismatch is reported. If it persists, the blocks are read through the guard to find the cause.
    """
    data, idx = pair.files
    guard = data.guarded_by
    if guard is None:
        return pair
    found = ""
    for look in range(_LOOKS):
        if look:
            data.look_again()
            idx.look_again()
            pair = Pair(pair.path, idx, data)
        try:
            found = pair.fingerprint
            if found == guard and (pair.header.is_stream or look == _LOOKS - 1):
                return pair
        except StoreError as error:
            if type(error) is not StoreError:
                raise  # storage fails; reading again does not help
            found = f"none ({error})"
    raise _refused_afar(pair, f"fingerprint {guard}, the files have {found}")


def refuse_block_bytes(path: str, block_bytes: int) -> None:
    """Raises StoreError for an invalid size of blocks."""
    if not is_block_size(block_bytes):
        raise StoreError(f"{path}: checksum_bytes={block_bytes!r}: a power of two, 4 KiB to 64 MiB")


def _refused_here(prefix: str, sums: Sums) -> StoreError:
    """The error for a local pair that does not match its .sums: damaged, or other files."""
    files = LocalFile(f"{prefix}.bin"), LocalFile(f"{prefix}.idx")
    others = _others_sums(prefix, "other files than those next to it")
    if [each.size_bytes for each in files] != [each.size_bytes for each in sums.files]:
        return others

    def read(number: int, begin: int, end: int) -> None:
        unit, size = sums.files[number].block_bytes, sums.files[number].size_bytes
        low, high = begin // unit * unit, min(-(-end // unit) * unit, size)
        (data,) = files[number].peek([(low, high)])
        sums.files[number].check(memoryview(data), low, files[number].url)

    found = _damage(files, read)
    return found if isinstance(found, ChecksumError) else others


def _refused_afar(pair: Pair, what: str) -> StoreError:
    """The error for a remote pair that does not match its .sums."""
    files = pair.files

    def read(number: int, begin: int, end: int) -> None:
        size = min(end, files[number].size_bytes) - begin
        files[number].look_up(np.empty(size, np.uint8), np.array([begin]), np.array([size]))

    reason = _damage(files, read)
    if reason is False:
        return _others_sums(pair.path, what)
    if reason is True:
        return ChecksumError(
            f"{pair.path}: short ranges of .bin or .idx come wrong {_LOOKS} times, whole blocks come right; "
            f"the server, or a cache before it, answers ranges wrongly: read by another way"
        )
    return reason


def _others_sums(prefix: str, what: str) -> StoreError:
    """The error for a .sums that was made for other files than those next to it."""
    return StoreError(
        f"{prefix}{SUFFIX}: made for {what}; copy the files again, or, if they are newer than it, {ANEW}",
        path=prefix + SUFFIX,
    )


def _damage(files: Sequence[ByteFile], read: Callable[[int, int, int], None]) -> ChecksumError | bool:
    """Why a pair has another fingerprint than its .sums, from the blocks that the fingerprint covers.

    read: reads a range of one of the files. Raises ChecksumError for a wrong block in it.
    Returns the error of a wrong block if other blocks of the .bin are right. Otherwise whether the .bin is
    right: False means that it is another file.
    """

    def error_in(number: int, begin: int, end: int) -> ChecksumError | None:
        try:
            return read(number, begin, end)
        except ChecksumError as error:
            return error

    first, *others, last = sampled_of_bin(files[BIN].size_bytes)
    wrong, is_right = None, False
    for tried, (begin, end) in enumerate([first, last, *others], 1):
        error = error_in(BIN, begin, end)
        wrong, is_right = wrong or error, is_right or error is None
        if wrong is not None and is_right:
            return wrong
        if tried == _FEW and not is_right:
            return False
    if not is_right:
        return False
    found = (error_in(IDX, begin, end) for begin, end in ends_of_idx(files[IDX].size_bytes))
    return next((error for error in found if error is not None), True)


def _usable_beside(pair: Pair) -> Sums | None:
    """The .sums of a local store, if it can be read and was made for files of these sizes."""
    try:
        sums = checksums_beside(pair.path)
    except StoreError:
        return None
    sizes = [each.size_bytes for each in pair.files]
    return sums if sums is not None and [each.size_bytes for each in sums.files] == sizes else None


def _wrong_in(pair: Pair, sums: Sums, number: int, begin: int, piece: memoryview) -> list[Block]:
    """The blocks of a piece, whole blocks of a file from byte `begin`, that differ from their checksums."""
    url = pair.files[number].url
    return [(url, low, high) for low, high in sums.files[number].wrong(piece, begin)]


def _are_damaged(pair: Pair, sums: Sums, wrong: Sequence[Block]) -> bool:
    """Whether wrong blocks mean damage, and not that the .sums was made for other files."""
    num_wrong = sum(url == pair.files[BIN].url for url, *_ in wrong)
    # if the one block of a file is wrong, either may be damaged: name the block
    is_same_pair = num_wrong < max(sums.files[BIN].sums.size, 2)
    return bool(wrong) and (is_same_pair or sums.fingerprint == pair.fingerprint)


def _of_all(sums: Sums, wrong: Sequence[Block]) -> str:
    return f", {len(wrong)} of {sum(each.sums.size for each in sums.files)} blocks in all"


def _pieces(pair: Pair) -> Iterator[tuple[int, int, memoryview, float]]:
    """(which file, first byte, bytes, fraction done) of both files, from begin to end."""
    total, done = sum(each.size_bytes for each in pair.files), 0
    for number, file in enumerate(pair.files):
        with file:
            for begin in range(0, file.size_bytes, _READ_BYTES):
                out = np.empty(min(_READ_BYTES, file.size_bytes - begin), np.uint8)
                file.read_into(out, np.array([begin]), np.array([out.size]))
                done += out.size
                yield number, begin, out.data, done / total
