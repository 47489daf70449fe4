"""Checksums of a Megatron store's blocks: made of what lies there, compared with it, and whose they are.

The format is in `files.sums`. Blocks of remote files are compared as they come; see `files.fetcher.objects`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshfeed.errors import ChangedError, ChecksumError, StoreError
from meshfeed.files import LocalFile
from meshfeed.files.local.durable import durable_file
from meshfeed.files.sums import BIN, BLOCK_BYTES, IDX, SUFFIX, Summer, Sums, is_block_size
from meshfeed.store.mismatch import damage, others_sums, wrong_block
from meshfeed.store.node_index import are_of, checksums_beside, versions_of

if TYPE_CHECKING:
    from meshfeed.store.indexed import IndexedStore

_READ_BYTES = 1 << 26  # whole blocks, whatever their size
_LOOKS = 3


def is_of(sums: Sums, store: IndexedStore) -> bool:
    """Whether checksums are of a store on this machine, by its sizes and its fingerprint."""
    return are_of(sums, store.path, store.fingerprint)


def write_checksums(store: IndexedStore, block_bytes: int = BLOCK_BYTES) -> Iterator[float]:
    """Write `path`.sums for a store on this machine, or replace it, yielding the part done, in (0, 1].

    Raises StoreError; the .sums appears whole or not at all.
    """
    refuse_block_bytes(store.path, block_bytes)
    if store.wants_ahead:
        raise StoreError(f"{store.path}: is remote; write its checksums where it was made, and copy them")
    files = (LocalFile(each.url) for each in reversed(store.files))
    fresh = type(store)(store.path, *files)  # which has not looked at anything yet, and compares nothing
    before = versions_of(store.path)[:2]
    summers = Summer(block_bytes), Summer(block_bytes)
    for number, _, piece, done in _pieces(fresh):
        summers[number].update(piece)
        yield done
    sums = Sums(fresh.fingerprint, (summers[0].sums(), summers[1].sums()))
    if versions_of(store.path)[:2] != before:
        raise ChangedError(f"{store.path}: was written while its checksums were made; make them again")
    with durable_file(Path(store.path + SUFFIX)) as stream:
        stream.write(sums.encode())


def is_guarded(store: IndexedStore) -> bool:
    """Whether a store has checksums, whatever they say."""
    if store.wants_ahead:
        return store.files[0].guarded_by is not None
    return Path(store.path + SUFFIX).is_file()


def compare(store: IndexedStore) -> Iterator[float]:
    """Read every block of a store that has checksums and compare it, yielding the part done, in (0, 1].

    Raises ChecksumError that names the first block that differs; StoreError for checksums of another store.
    """
    if not is_guarded(store):
        return
    sums = None if store.wants_ahead else checksums_beside(store.path)
    if sums is None:  # from far away it comes compared
        yield from (done for *_, done in _pieces(store))
        return
    if [each.size_bytes for each in sums.files] != [each.size_bytes for each in store.files]:
        raise others_sums(store.path, "files of other sizes")
    wrong: list[tuple[str, int, int]] = []
    for number, begin, piece, done in _pieces(store):
        url = store.files[number].url
        wrong += [(url, low, high) for low, high in sums.files[number].wrong(piece, begin)]
        yield done
    num_blocks = sum(each.sums.size for each in sums.files)
    num_wrong = sum(url == store.files[BIN].url for url, *_ in wrong)
    # one wrong block of one may be either: it is named
    is_same_pair = num_wrong < max(sums.files[BIN].sums.size, 2)
    if wrong and (is_same_pair or sums.fingerprint == store.fingerprint):
        raise wrong_block(*wrong[0], f", {len(wrong)} of {num_blocks} blocks in all")
    if sums.fingerprint != store.fingerprint:
        raise others_sums(store.path, "another store")


def refuse_others(store: IndexedStore) -> IndexedStore:
    """The store, known to be the one whose checksums guard its files, if any do. Raises StoreError.

    What is peeked for header and fingerprint is not guarded, and may come wrong: it is looked at again before
    anything that is not as it should be counts. What stays wrong is looked at through the guard.
    """
    data, idx = store.files
    guard = data.guarded_by
    if guard is None:
        return store
    found = ""
    for look in range(_LOOKS):
        if look:
            data.look_again()
            idx.look_again()
            store = type(store)(store.path, idx, data)
        try:
            found = store.fingerprint
            if found == guard and (store.is_stream or look == _LOOKS - 1):
                return store
        except StoreError as error:
            if type(error) is not StoreError:
                raise  # storage fails, which another look does not change
            found = f"none ({error})"
    raise _refused(store, f"fingerprint {guard}, the files have {found}")


def _refused(store: IndexedStore, what: str) -> StoreError:
    """The error for a remote pair that is not the one of its .sums."""
    files = store.files

    def wrong_at(number: int, begin: int, end: int) -> ChecksumError | None:
        size = min(end, files[number].size_bytes) - begin
        try:
            files[number].look_up(np.empty(size, np.uint8), np.array([begin]), np.array([size]))
        except ChecksumError as error:
            return error
        return None

    reason = damage((files[BIN].size_bytes, files[IDX].size_bytes), wrong_at)
    if reason is False:
        return others_sums(store.path, what)
    if reason is True:
        return ChecksumError(
            f"{store.path}: short ranges of .bin or .idx come wrong {_LOOKS} times, whole blocks come right; "
            f"the server, or a cache before it, answers ranges wrongly: read by another way"
        )
    return reason


def refuse_block_bytes(path: str, block_bytes: int) -> None:
    """Raises StoreError for a size that checksums cannot be of."""
    if not is_block_size(block_bytes):
        raise StoreError(f"{path}: checksums of {block_bytes!r} bytes each; a power of two, 4 KiB to 64 MiB")


def _pieces(store: IndexedStore) -> Iterator[tuple[int, int, memoryview, float]]:
    """(which file, first byte, bytes, part done) of both files, from end to end."""
    total, done = sum(each.size_bytes for each in store.files), 0
    for number, file in enumerate(store.files):
        with file:
            for begin in range(0, file.size_bytes, _READ_BYTES):
                out = np.empty(min(_READ_BYTES, file.size_bytes - begin), np.uint8)
                file.read_into(out, np.array([begin]), np.array([out.size]))
                done += out.size
                yield number, begin, out.data, done / total
