"""A pair on this machine: its index read once per node, its .bin compared with its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from meshfeed.arrays import Bytes, Longs
from meshfeed.errors import ChangedError, StoreError
from meshfeed.files import Cache, LocalFile
from meshfeed.files.byte_file import Descriptor, fill
from meshfeed.files.local.version import wait_for_tick
from meshfeed.files.sums import FileSums, wrong_block
from meshfeed.intervals import distinct, numbers_in, together
from meshfeed.store.index import Header
from meshfeed.store.node_index import NodeIndex
from meshfeed.store.pair import Pair

_LOOKS = 3  # at a .bin that somebody is writing
_COMPARED_BYTES, _MOST_COMPARED = 1 << 20, 16  # bytes, blocks that are compared together


class LocalPair(Pair):
    """The pair PREFIX.idx and PREFIX.bin. What the node's copy of the index knows is taken from there."""

    def __init__(self, path: str, prefix: str, cache: Cache | None = None) -> None:
        self._index = NodeIndex(prefix, cache)
        super().__init__(path, self._index, GuardedFile(self._index), self._index.cache)

    @cached_property
    def header(self) -> Header:
        if (facts := self._index.facts) is None:
            return super().header
        _ = self.idx.size_bytes, self.data.size_bytes  # from now on, also in a pickled copy, others fail
        return Header(prefix=self.path, **facts["header"] | {"dtype": np.dtype(facts["header"]["dtype"])})

    @cached_property
    def fingerprint(self) -> str:
        facts = self._index.facts
        return super().fingerprint if facts is None else facts["fingerprint"]

    @property
    def is_checked(self) -> bool:
        return bool((self._index.facts or {}).get("is_checked"))


class GuardedFile(LocalFile):
    """A LocalFile that raises ChecksumError instead of returning a block whose checksum differs.

    A block is compared once per node and version of the files; see `NodeIndex`. If the file is written or
    touched during a run, this process compares its blocks again. Without a .sums, nothing is compared.
    """

    def __init__(self, index: NodeIndex) -> None:
        super().__init__(f"{index.prefix}.bin")
        self._index = index
        self._guard: tuple[FileSums, Bytes] | None = None
        self._is_asked = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_index": self._index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_index"])
        self._size_bytes = state["_size_bytes"]

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if not self._depth:
            self._guard, self._is_asked, self._version = None, False, None

    def read_into(self, out: Bytes, begins: Longs, sizes: Longs, places: Longs | None = None) -> None:
        if not out.size:
            return
        for _ in range(_LOOKS):
            unseen, guard = self._unseen(begins, begins + sizes), self._guard
            if guard is not None and unseen.size:
                self._compare(guard, unseen, begins, begins + sizes)
            super().read_into(out, begins, sizes, places)
            if guard is self._guard:
                return
        raise ChangedError(
            f"{self.url}: somebody is writing to it; wait until it is whole, and resume the run"
        )

    def will_need(self, begins: Longs, ends: Longs) -> None:
        """See LocalFile. Blocks that are still to be compared are announced whole."""
        unseen = self._unseen(begins, ends)
        if unseen.size and self._guard is not None:
            self._waits = True  # whatever the last read found
            more = _bytes_of(self._guard[0], unseen)
            begins, ends = np.append(begins, more[0]), np.append(ends, more[1])
        super().will_need(begins, ends)

    def _open(self) -> Descriptor:
        # Shared marks belong to the version that the index saw, even if the file was written since.
        device, inode, _, modified_ns, _ = self._index.versions.data
        self._version = self._version or (device, inode, modified_ns)
        return super()._open()

    def _look(self) -> int:
        return self._index.versions.data[2]

    def _allow_written(self, modified_ns: int) -> None:
        if self._guard is None:
            super()._allow_written(modified_ns)
        else:
            wait_for_tick(modified_ns)
            sums, _ = self._guard
            self._guard = sums, np.zeros(sums.sums.size, np.uint8)

    def _unseen(self, begins: Longs, ends: Longs) -> Longs:
        """Blocks in and around some ranges that no process of this node has compared, ascending."""
        if not self._is_asked:
            self._refuse_not_entered()
            guard = self._index.guard()
            with self._lock:  # the first of several threads: a second answer would read as a change
                if not self._is_asked:
                    self._guard, self._is_asked = guard, True
        none = np.zeros(0, np.int64)
        if self._guard is None:
            return none
        sums, seen = self._guard
        some = ends > begins
        first, last = begins[some] // sums.block_bytes, (ends[some] - 1) // sums.block_bytes
        if not seen.size or (seen[first].all() and seen[last].all() and (last - first < 2).all()):
            return none
        asked = distinct(numbers_in(first, last - first + 1))
        # those around them, too: few large reads cost less than many small ones, and an epoch needs all
        group = min(max(_COMPARED_BYTES // sums.block_bytes, 1), _MOST_COMPARED)
        groups = distinct(asked[seen[asked] == 0] // group)
        around = (groups[:, None] * group + np.arange(group)).ravel()
        around = around[around < seen.size]
        return around[seen[around] == 0]

    def _compare(self, guard: tuple[FileSums, Bytes], blocks: Longs, begins: Longs, ends: Longs) -> None:
        """Mark the blocks that are right. Raises StoreError for another one in the ranges."""
        fd = self._opened().fd
        if self._guard is not guard:  # the file was written: its marks are others now
            return
        sums, seen = guard
        most = max(sums.block_bytes, _COMPARED_BYTES)
        buffer = np.empty(most, np.uint8)
        is_right = np.ones(blocks.size, np.bool_)
        for low, high in zip(*(each.tolist() for each in _bytes_of(sums, blocks))):
            for begin in range(low, high, most):
                for first, end, error in self._faults(fd, sums, buffer[: min(high - begin, most)], begin):
                    if ((begins < end) & (ends > first)).any():
                        raise error
                    is_right &= blocks != first // sums.block_bytes
        if seen.flags.writeable:
            seen[blocks[is_right]] = 1
            return
        self._index.tell(blocks[is_right])
        if not seen[blocks[is_right]].all():  # its disk is full, or its file another by now
            own = seen.copy()
            own[blocks[is_right]] = 1
            with self._lock:  # of several threads, the first one; or the file was written
                if self._guard is guard:
                    self._guard = sums, own

    def _faults(
        self, fd: int, sums: FileSums, out: Bytes, begin: int
    ) -> Iterator[tuple[int, int, StoreError]]:
        """Read some blocks: (first byte, end, error) of each that is wrong or cannot be read.

        out: for their bytes, from byte `begin` of the file on. Raises ChangedError.
        """
        try:
            fill(fd, out, np.array([begin]), np.array([out.size]), None, self.url)
        except ChangedError:
            raise
        except StoreError as error:  # such as a sector that the disk cannot read
            size = sums.block_bytes
            if out.size <= size:
                yield begin, begin + out.size, error
                return
            for at in range(0, out.size, size):
                yield from self._faults(fd, sums, out[at : at + size], begin + at)
            return
        for first, end in sums.wrong(out.data, begin):
            yield first, end, wrong_block(self.url, first, end)


def _bytes_of(sums: FileSums, blocks: Longs) -> tuple[Longs, Longs]:
    """Begin and end of each stretch of adjacent blocks; int64 [n] -> [m]."""
    firsts = blocks * sums.block_bytes
    return together(firsts, np.minimum(firsts + sums.block_bytes, sums.size_bytes))
