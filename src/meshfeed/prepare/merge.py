"""Parts -> token stores, in the order of the inputs: the only step that is one process's work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.files.durable import durable_file
from meshfeed.files.url import without_secrets
from meshfeed.formats.prepared import ERRORS
from meshfeed.prepare.job import Job
from meshfeed.prepare.part_file import (
    Block,
    Malformed,
    PartSummary,
    blocks_of_part,
    part_path,
    write_array,
)
from meshfeed.store import DatasetWriter, open_store

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

ORIGINS = "origins.npy"
TRAIN, VALIDATION = "train", "validation"


def merge(
    job: Job, summaries: Sequence[PartSummary], out: Path, on_part: Callable[[int], None]
) -> dict[str, Any]:
    """Write the stores of a job into a folder; what they hold, as JSON values.

    summaries: of all its parts. on_part: called with each part, while its documents are written. Raises
    StoreError.
    """
    malformed = [each for summary in summaries for each in summary.malformed]
    bases = bases_of([count for summary in summaries for count in summary.counts], job.spans[:, 1])
    columns = job.encoder().columns

    def blocks() -> Iterator[tuple[int, Block]]:
        for part, summary in enumerate(summaries):
            for block in blocks_of_part(part_path(job.folder, part), summary.num_blocks, list(columns)):
                yield part, block

    keep = np.ones(sum(summary.num_documents for summary in summaries), np.bool_)
    apart = np.zeros_like(keep)
    if job.request.wants_hashes:
        keep, apart = _chosen(job, (block for _, block in blocks()))
    names = [TRAIN, VALIDATION] if job.request.validation else ["."]
    stores = {name: _Store(out / name, columns) for name in names}
    with ExitStack() as stack:
        for store in stores.values():
            stack.enter_context(store.writer)
        first = 0
        for part, block in blocks():
            mine = slice(first, first + block.lengths.size)
            for name, store in stores.items():
                chosen = keep[mine] & (apart[mine] == (name == VALIDATION))
                store.add(block, job.spans[block.spans, 1], bases[block.spans] + block.numbers, chosen)
            first = mine.stop
            on_part(part)
    for store in stores.values():
        store.write_origins()
    if malformed:
        _write_malformed(job, out / ERRORS, bases, malformed)
    return {
        "num_duplicates": int((~keep).sum()),
        "num_malformed": len(malformed),
        "num_malformed_inputs": len({int(job.spans[each.span, 1]) for each in malformed}),
        "stores": {name: _counted(out / name) for name in names},
    }


def bases_of(counts: Sequence[int] | I64, inputs: I64) -> I64:
    """The number of the first line or row of each span in its input; int64 [num_spans].

    counts: lines or rows of each span. inputs: that each is in, in order. Example: counts [3 2 4] of inputs
    [0 0 1] -> [0 3 0].
    """
    before = np.cumsum(counts, dtype=np.int64) - np.asarray(counts, np.int64)
    first = inputs.searchsorted(inputs)
    return before - before[first]


def runs_of(inputs: I64, numbers: I64, last: tuple[int, int]) -> I64:
    """The documents, of some in a row, that do not come right after the one before in the same file.

    inputs, numbers: where each is from; int64 [n]. last: where the one before them is from.
    """
    files, places = np.append(last[0], inputs), np.append(last[1], numbers)
    return np.flatnonzero((files[1:] != files[:-1]) | (places[1:] != places[:-1] + 1))


def first_of_each(hashes: U64) -> Mask:
    """Whether each document is the first with its hash; uint64 [n, 2] -> bool [n]."""
    # Sorted by hash and then by place, a document is a repetition where it has the hash of the one before.
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    again = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    keep = np.ones(len(hashes), np.bool_)
    keep[order[1:][again]] = False
    return keep


def set_apart(hashes: U64, share: float) -> Mask:
    """Whether each document is of the validation set; uint64 [n, 2] -> bool [n].

    A function of the document and the share alone, and monotone in the share: a larger set holds the smaller.
    """
    # A float times a power of two is exact, and a share below 1 stays below 2**64.
    return hashes[:, 0] < np.uint64(int(share * 2**64))


class _Store:
    """A token store being written, and where its documents come from. writer: to be entered."""

    def __init__(self, folder: Path, columns: Mapping[str, np.dtype[Any]]) -> None:
        self._folder = folder
        self.writer = DatasetWriter(folder, columns)
        self._origins: list[I64] = []
        self._num_documents, self._last = 0, (-1, -1)

    def add(self, block: Block, inputs: I64, numbers: I64, chosen: Mask) -> None:
        """The chosen documents of a block; inputs, numbers: where each of the block's is from; int64 [n]."""
        if not chosen.any():
            return
        lengths, inputs, numbers = block.lengths[chosen], inputs[chosen], numbers[chosen]
        columns = block.columns
        if not chosen.all():
            tokens = np.repeat(chosen, block.lengths)
            columns = {name: values[tokens] for name, values in columns.items()}
        self.writer.add_documents(lengths, **columns)
        starts = runs_of(inputs, numbers, self._last)
        self._origins.append(
            np.stack([self._num_documents + starts, inputs[starts], numbers[starts]], axis=1)
        )
        self._num_documents += lengths.size
        self._last = int(inputs[-1]), int(numbers[-1])

    def write_origins(self) -> None:
        """Write the place of each document's input. Raises StoreError."""
        with durable_file(self._folder / ORIGINS) as stream:
            write_array(stream, np.concatenate([np.zeros((0, 3), np.int64), *self._origins]))


def _chosen(job: Job, blocks: Iterable[Block]) -> tuple[Mask, Mask]:
    """Whether each document stays, and whether it is for validation; bool [num_documents] each."""
    hashes = np.concatenate([np.zeros((0, 2), np.uint64), *(block.hashes for block in blocks)])
    keep = first_of_each(hashes) if job.request.dedup else np.ones(len(hashes), np.bool_)
    return keep, set_apart(hashes, job.request.validation)


def _write_malformed(job: Job, path: Path, bases: I64, malformed: Sequence[Malformed]) -> None:
    with durable_file(path) as stream:
        for each in malformed:
            where = job.request.inputs[int(job.spans[each.span, 1])]
            number = int(bases[each.span]) + each.number
            place = {"jsonl": {"line": 1 + number}, "parquet": {"row": number}}.get(where.kind, {})
            byte = {"byte": each.byte} if each.byte >= 0 else {}
            line = {"file": without_secrets(where.url)} | place | byte | {"error": each.reason}
            stream.write(json.dumps(line).encode() + b"\n")


def _counted(folder: Path) -> dict[str, Any]:
    store = open_store(folder)
    return {
        "num_documents": store.num_documents,
        "num_tokens": store.num_tokens,
        "dtype": store.dtype.name,
        "fingerprint": store.fingerprint,
    }
