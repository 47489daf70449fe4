"""The rows of Arrow streams and files, as `datasets.save_to_disk` and polars write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshfeed.errors import ChecksumError
from meshfeed.files import ByteFile
from meshfeed.formats.parquet import RawStream, arrow_for, typed_arrow

_FILE_MAGIC = b"ARROW1"
_ROWS_TOGETHER = 256
_END = b"\xff\xff\xff\xff\0\0\0\0"


def batches_in(file: ByteFile) -> Iterator[Any]:
    """The record batches of an entered file, in order. Raises StoreError.

    A local file is mapped, so unused columns cost nothing.
    """
    arrow = arrow_for(file.url, "Arrow")
    with typed_arrow(file.url), _source(arrow, file) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        if is_file:
            opened = arrow.ipc.open_file(source)
            yield from (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:
            yield from _of_stream(arrow.ipc.open_stream(source), source, file.url)


def _source(arrow: Any, file: ByteFile) -> Any:
    return arrow.PythonFile(RawStream(file), mode="r") if file.is_remote else arrow.memory_map(file.url)


def _of_stream(opened: Any, source: Any, url: str) -> Iterator[Any]:
    at = source.tell()
    for batch in opened:
        at = source.tell()
        yield batch
    source.seek(at)
    if source.read(len(_END)) != _END:  # pyarrow does not notice a missing end
        raise ChecksumError(f"{url}: byte {at}: no end mark; it was cut short: write it or copy it again")


def rows_of(batch: Any, names: Sequence[str], most: int) -> Iterator[dict[str, Any]]:
    """The rows of a batch, of some columns. most: bytes that are converted at a time."""
    some = batch.select(list(names))
    together = max(min(most * max(len(some), 1) // max(some.nbytes, 1), _ROWS_TOGETHER), 1)
    for first in range(0, len(some), together):
        yield from some.slice(first, together).to_pylist()
