"""Parts -> token stores, in the order of the inputs: the only step that runs in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from meshfeed.arrays import Array, Bools, Longs, Words
from meshfeed.files.local.durable import durable_file
from meshfeed.formats.prepared import ERRORS, ORIGINS, OriginRuns, place_of
from meshfeed.multimodal import MultimodalStore, MultimodalWriter
from meshfeed.parts.store import SIZES, parts_of
from meshfeed.prepare.encoding.multimodal import PART_DTYPES
from meshfeed.prepare.job.job import Job
from meshfeed.prepare.job.part_file import (
    Block,
    Malformed,
    PartSummary,
    blocks_of_part,
    part_path,
    write_array,
)
from meshfeed.store import DatasetWriter, open_store

TRAIN, VALIDATION = "train", "validation"


def merge(
    job: Job, summaries: Sequence[PartSummary], out: Path, on_part: Callable[[int], None]
) -> dict[str, Any]:
    """Write the stores of a job into a folder; returns their contents in numbers, as JSON values.

    summaries: of all its parts. on_part: called with each part, while its documents are written. Raises
    StoreError.
    """
    malformed = [each for summary in summaries for each in summary.malformed]
    encoder = job.encoder()
    columns, names = encoder.columns, [*encoder.columns, *encoder.beside]

    def blocks() -> Iterator[tuple[int, Block]]:
        for part, summary in enumerate(summaries):
            path = part_path(job.folder, part)
            for block in blocks_of_part(path, summary.num_blocks, names):
                yield part, block

    keep = np.ones(sum(summary.num_documents for summary in summaries), np.bool_)
    apart = np.zeros_like(keep)
    if job.request.wants_hashes:
        hashes = np.concatenate([np.zeros((0, 2), np.uint64), *(block.hashes for _, block in blocks())])
        apart = set_apart(hashes, job.request.validation)
        if job.request.dedup:
            keep = first_of_each(hashes)
    folders = [TRAIN, VALIDATION] if job.request.validation else ["."]
    counts = [count for summary in summaries for count in summary.counts]
    bases, origins = bases_of(counts, job.spans[:, 1]), {name: OriginRuns() for name in folders}
    writer = MultimodalWriter if encoder.beside else DatasetWriter
    with ExitStack() as stack:
        stores = {name: stack.enter_context(writer(out / name, columns)) for name in folders}
        first = 0
        for part, block in blocks():
            mine = slice(first, first + block.lengths.size)
            span, number = block.records.T
            for name, store in stores.items():
                chosen = keep[mine] & (apart[mine] == (name == VALIDATION))
                _add(store, block, chosen)
                origins[name].add(job.spans[span[chosen], 1], bases[span[chosen]] + number[chosen])
            first = mine.stop
            on_part(part)
    for name, runs in origins.items():
        with durable_file(out / name / ORIGINS) as stream:
            write_array(stream, runs.array())
    if malformed:
        _write_malformed(job, out / ERRORS, bases, malformed)
    return {
        "num_duplicates": int((~keep).sum()),
        "num_malformed": len(malformed),
        "num_malformed_inputs": len({int(job.spans[each.span, 1]) for each in malformed}),
        "stores": {name: _counted(out / name) for name in folders},
    }


def bases_of(counts: Sequence[int] | Longs, inputs: Longs) -> Longs:
    """The number of the first line or row of each span in its input; int64 [num_spans].

    counts: lines or rows of each span. inputs: that each is in, in order. Example: counts [3 2 4] of inputs
    [0 0 1] -> [0 3 0].
    """
    before = np.cumsum(counts, dtype=np.int64) - np.asarray(counts, np.int64)
    first = inputs.searchsorted(inputs)
    return before - before[first]


def first_of_each(hashes: Words) -> Bools:
    """Whether each document is the first with its hash; uint64 [n, 2] -> bool [n]."""
    # Sorted by hash and then by position, a document is a repetition if the one before has its hash.
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    again = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    keep = np.ones(len(hashes), np.bool_)
    keep[order[1:][again]] = False
    return keep


def set_apart(hashes: Words, share: float) -> Bools:
    """Whether each document is of the validation set; uint64 [n, 2] -> bool [n].

    Depends on the document and the share alone, and is monotone in the share: a larger set contains the
    smaller.
    """
    # A float times a power of two is exact, and a share below 1 stays below 2**64.
    return hashes[:, 0] < np.uint64(int(share * 2**64))


def _add(store: DatasetWriter, block: Block, chosen: Bools) -> None:
    columns = {name: values for name, values in block.columns.items() if name not in PART_DTYPES}
    if isinstance(store, MultimodalWriter):
        _add_parts(store, block.columns, chosen)
    if not chosen.all():
        tokens = np.repeat(chosen, block.lengths)
        columns = {name: values[tokens] for name, values in columns.items()}
    store.add_documents(block.lengths[chosen], **columns)


def _add_parts(store: MultimodalWriter, columns: Mapping[str, Array], chosen: Bools) -> None:
    counts, num_bytes = columns["num_parts"], columns["part_bytes"]
    kept = np.flatnonzero(np.repeat(chosen, counts))
    ends = num_bytes.cumsum()
    raw = columns["parts"]
    rows = columns["part_sizes"].reshape(-1, len(SIZES))[kept]
    store.add_parts(
        parts_of(rows, num_bytes[kept], counts[chosen]),
        [raw[end - size : end].tobytes() for end, size in zip(ends[kept].tolist(), num_bytes[kept].tolist())],
    )


def _write_malformed(job: Job, path: Path, bases: Longs, malformed: Sequence[Malformed]) -> None:
    with durable_file(path) as stream:
        for each in malformed:
            where = job.request.inputs[int(job.spans[each.span, 1])]
            place = place_of(where.url, where.kind, int(bases[each.span]) + each.number)
            byte = {"byte": each.byte} if each.byte >= 0 else {}
            line = place | byte | {"error": each.reason}
            stream.write(json.dumps(line).encode() + b"\n")


def _counted(folder: Path) -> dict[str, Any]:
    store = open_store(folder)
    counts = {"num_documents": store.num_documents, "num_tokens": store.num_tokens}
    if isinstance(store, MultimodalStore):
        counts["num_parts"] = store.num_parts
    return counts | {"dtype": store.dtype.name, "fingerprint": store.fingerprint}
