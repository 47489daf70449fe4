"""Arrow as a token store, as Hugging Face `datasets` saves it: a document per row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, Self, cast

import numpy as np

from meshfeed.arrays import Array, Bools, Longs
from meshfeed.errors import ChecksumError, OptionError, StoreError
from meshfeed.files import ByteFile, Folder
from meshfeed.files.url import is_http
from meshfeed.formats.documents import DocumentFiles, DocumentFilesFormat, FileSpan
from meshfeed.formats.parquet import RawStream, Rows, arrow_for, lists_in, name_in, spans_of, typed_arrow
from meshfeed.store.format import Place
from meshfeed.store.loss_columns import LOSS_COLUMNS

_FILE_MAGIC = b"ARROW1"
_END = b"\xff\xff\xff\xff\0\0\0\0"

STATE = "state.json"
"""File in a folder of `save_to_disk` that names its data files."""
SPLITS = "dataset_dict.json"
"""File in a folder of several such folders that names them."""


class ArrowStore(DocumentFiles):
    """Arrow streams or files; each row is a document, its tokens in one column of lists.

    Needs pyarrow. See `DocumentFiles`.
    """

    format = "arrow"

    def check(self) -> Self:
        _ = arrow_for(self.path, "Arrow")
        return super().check()

    def _spans(self) -> list[FileSpan]:
        """Record batches of local files; a remote file is one span, since it is read from its beginning."""
        spans: list[FileSpan] = []
        for f, file in enumerate(self._files):
            if file.is_remote:
                spans.append(FileSpan(f, 0, file.size_bytes))
                continue
            with file:
                columns = (batch.column(self._name(file, batch)) for batch in batches_in(file))
                # nothing is checked yet, so no offset may be followed
                spans += spans_of(f, [column.get_total_buffer_size() for column in columns])
        return spans

    def _scan(self, span: FileSpan, beside: Bools) -> Iterator[tuple[Longs, Array]]:
        file, first = self._files[span.file], 0
        for number, batch in enumerate(islice(batches_in(file), span.end)):
            if number >= span.begin:
                name = self._name(file, batch)
                beside[:] = np.isin(LOSS_COLUMNS, batch.schema.names)
                with typed_arrow(file.url):
                    values = batch.column(name)
                    values.validate(full=True)  # its offsets, which are trusted below
                    found = lists_in(values, Rows(file.url, name, first), self._column)
                yield found
            first += len(batch)

    def _name(self, file: ByteFile, batch: Any) -> str:
        return name_in(batch.schema, self._column.names, file.url)


class ArrowFormat(DocumentFilesFormat):
    """Arrow files, and the folders of `datasets.save_to_disk`."""

    name = "arrow"
    lies_at = "a folder of datasets.save_to_disk, a .arrow file, or a folder of such"
    suffix, store = ".arrow", ArrowStore

    def files(self, place: Place) -> tuple[Folder, list[str]] | None:
        """The files that state.json names, in its order, also over HTTP; else as for other formats.

        Raises StoreError for several splits, rows that are reordered by an index, or no data file.
        """
        may_be = is_http(place.given) or any(name.lower().endswith(self.suffix) for name in place.names)
        if place.is_file or not may_be:
            return super().files(place)
        if _holds(place, SPLITS):
            paths = ", ".join(f"{place.shown.rstrip('/')}/{split}" for split in _splits(place))
            raise OptionError(f"{place.shown}: a DatasetDict; give the path of one split: {paths}")
        if not _holds(place, STATE):
            return super().files(place)
        file = place.within.file(STATE)
        try:
            state: Any = json.loads(file.peek([(0, file.size_bytes)])[0])
            names = [str(each["filename"]) for each in state["_data_files"]]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{file.url}: does not say its data files: {error!r}; save it again") from error
        if cast(dict[str, Any], state).get("_indices_data_files"):
            raise StoreError(
                f"{file.url}: its rows are reordered by an index; save it again after flatten_indices()"
            )
        if not names:
            raise StoreError(f"{file.url}: names no data files, so it holds no documents; save it again")
        return place.within, names


def _holds(place: Place, name: str) -> bool:
    """Whether a folder has such a file; requested by name if folders cannot be listed."""
    return place.holds(place.within, name) if is_http(place.given) else name in place.names


def _splits(place: Place) -> list[str]:
    """The splits of a DatasetDict: its folders, or, if they cannot be listed, those that it names."""
    if not is_http(place.given):
        return sorted({name.partition("/")[0] for name in place.names if "/" in name})
    file = place.within.file(SPLITS)
    try:
        return sorted(map(str, json.loads(file.peek([(0, file.size_bytes)])[0])["splits"]))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{file.url}: does not say its splits: {error!r}; save it again") from error


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
    if source.read(1):  # nor what follows
        raise StoreError(
            f"{url}: byte {at + len(_END)}: more follows the end of its stream, such as another one; write "
            f"all rows as one stream, or each stream as a file"
        )
