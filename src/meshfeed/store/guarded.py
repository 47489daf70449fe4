"""The .bin of a local store. Each block is compared with the .sums when it is first read."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshfeed.errors import ChangedError
from meshfeed.files import LocalFile
from meshfeed.files.byte_file import I64, Bytes
from meshfeed.files.local.file import Descriptor, fill
from meshfeed.files.local.version import wait_for_tick
from meshfeed.files.sums import FileSums
from meshfeed.store.base import runs
from meshfeed.store.node_index import NodeIndex

_LOOKS = 3


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
            self._guard, self._is_asked = None, False

    def read_into(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None = None) -> None:
        if not out.size:
            return
        for _ in range(_LOOKS):
            for block in self._unseen(begins, begins + sizes):
                self._compare(block)
            guard = self._guard
            super().read_into(out, begins, sizes, places)
            if guard is self._guard:
                return
        raise ChangedError(
            f"{self.url}: somebody is writing to it; wait until it is whole, and resume the run"
        )

    def will_need(self, begins: I64, ends: I64) -> None:
        """See LocalFile. Blocks that are still to be compared are announced whole."""
        unseen = np.array(self._unseen(begins, ends), np.int64)
        if unseen.size and self._guard is not None:
            self._waits = True  # whatever the last read found
            size = self._guard[0].block_bytes
            firsts = unseen * size
            begins = np.append(begins, firsts)
            ends = np.append(ends, np.minimum(firsts + size, self.size_bytes))
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

    def _unseen(self, begins: I64, ends: I64) -> list[int]:
        """Blocks in some ranges that no process of this node has compared, ascending."""
        if not self._is_asked:
            self._refuse_not_entered()
            guard = self._index.guard()
            with self._lock:  # the first of several threads: a second answer would read as a change
                if not self._is_asked:
                    self._guard, self._is_asked = guard, True
        guard = self._guard
        if guard is None:
            return []
        sums, seen = guard
        some = ends > begins
        first, last = begins[some] // sums.block_bytes, (ends[some] - 1) // sums.block_bytes
        if not seen.size or (seen[first].all() and seen[last].all() and (last - first < 2).all()):
            return []
        touched = np.unique(runs(first, last - first + 1))
        return touched[seen[touched] == 0].tolist()

    def _compare(self, block: int) -> None:
        guard = self._guard
        if guard is None:
            return
        sums, seen = guard
        begin = block * sums.block_bytes
        data = np.empty(min(sums.block_bytes, sums.size_bytes - begin), np.uint8)
        file = self._opened()
        fill(file.fd, data, np.array([begin]), np.array([data.size]), None, self.url)
        sums.check(data.data, begin, self.url)
        seen[block] = 1
