"""Arrow as a token store, as Hugging Face `datasets` saves it: a document per row, read in place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import ByteFile, Folder
from meshfeed.files.url import is_http
from meshfeed.formats.arrow_stream import ArrowColumn, batches_of, column_of, schema_of
from meshfeed.formats.documents import DocumentFiles, DocumentFilesFormat, FileSpan
from meshfeed.formats.parquet import arrow_for, name_in, typed_arrow
from meshfeed.formats.tokens import refuse_unfit
from meshfeed.store.base import I64, Pieces, grouped
from meshfeed.store.format import Place
from meshfeed.store.loss_columns import LOSS_COLUMNS
from meshfeed.store.node_arrays import joined

STATE = "state.json"
"""File in a folder of `save_to_disk` that names its data files."""
SPLITS = "dataset_dict.json"
"""File in a folder of several such folders that names them."""


class ArrowStore(DocumentFiles):
    """Arrow streams or files; each row is a document, its tokens in one column of lists.

    Lengths come from their offsets alone. Only requested tokens are read, in place. Their dtype is
    the smallest of uint16, int32 and int64 that holds all numbers of the column's type. A shard is a file.
    Needs pyarrow. See `DocumentFiles`.
    """

    format = "arrow"

    @property
    def shard_ends(self) -> I64:
        """Where files end, in documents; int64 [num_files]."""
        return self._index["file_ends"]

    @property
    def largest_token(self) -> int | None:
        """None: tokens are not read for the index."""
        return None

    def check(self) -> ArrowStore:
        """Load pyarrow, and check that the files exist."""
        _ = arrow_for(self.path, "Arrow")
        super().check()
        return self

    # -- the index --------------------------------------------------------------------------------------

    def _spans(self) -> list[FileSpan]:
        """Whole files, since little of each is read."""
        return [FileSpan(i, 0, file.size_bytes) for i, file in enumerate(self._files)]

    def _scan(self, span: FileSpan) -> Mapping[str, Array]:
        file = self._files[span.file]
        with typed_arrow(file.url):
            arrow = arrow_for(file.url, "Arrow")
            beside = np.isin(LOSS_COLUMNS, schema_of(arrow, file).names)
            column = self._found(file)
            batches = list(batches_of(arrow, file, column))
        width = column.dtype.itemsize
        at, sizes = ([getattr(batch, name) for batch in batches] for name in ("at", "sizes"))
        found: dict[str, Array] = {"at": _end_to_end(at), "sizes": _end_to_end(sizes)}
        found |= {"beside": beside, "dtype": np.array([column.dtype.str])}
        most = 0 if self._column.of_loss else int(np.iinfo(column.dtype).max)
        return found | {"lengths": found["sizes"] // width, "most": np.array([min(most, 2**63 - 1)])}

    def _joined(
        self, spans: Sequence[FileSpan], arrays: Sequence[Mapping[str, Array]]
    ) -> Mapping[str, Array]:
        both = {name: joined(arrays, name) for name in ("at", "sizes")}
        return both | {"dtype": joined(arrays, "dtype", "U3")}

    def _found(self, file: ByteFile) -> ArrowColumn:
        """The column of an entered file."""
        arrow = arrow_for(file.url, "Arrow")
        schema = schema_of(arrow, file)
        name = name_in(schema, self._column.names, file.url)
        return column_of(arrow, schema, name, file.url, self._column)

    # -- reading ----------------------------------------------------------------------------------------

    def read_into(self, out: npt.NDArray[Any], starts: I64, stops: I64) -> None:
        pieces = self.documents.pieces(starts, stops)
        places = pieces.lengths.cumsum() - pieces.lengths
        for f, mine in grouped(self._file_of(pieces.documents)):
            begins, sizes = self._bytes(f, pieces, mine)
            some = self._numbers(f, pieces.documents[mine], begins, sizes)
            at = 0
            for place, size in zip(places[mine].tolist(), pieces.lengths[mine].tolist()):
                out[place : place + size] = some[at : at + size]
                at += size

    def _tokens(self, documents: I64) -> list[Array]:
        found: list[Array] = [np.zeros(0, np.int64)] * documents.size
        for f, mine in grouped(self._file_of(documents)):
            which = documents[mine]
            begins, sizes = self._index["at"][which], self._index["sizes"][which]
            numbers = self._numbers(f, which, begins, sizes)
            tokens = np.split(numbers, (sizes // self._dtype_of(f).itemsize).cumsum()[:-1])
            for i, some in zip(mine.tolist(), tokens):
                found[i] = some
        return found

    def _announce(self, pieces: Pieces) -> None:
        for f, mine in grouped(self._file_of(pieces.documents)):
            begins, sizes = self._bytes(f, pieces, mine)
            self._files[f].will_need(begins, begins + sizes)

    def _file_of(self, documents: I64) -> I64:
        return self._index["file_ends"].searchsorted(documents, side="right")

    def _dtype_of(self, f: int) -> np.dtype[Any]:
        return np.dtype(str(self._index["dtype"][f]))

    def _bytes(self, f: int, pieces: Pieces, mine: I64) -> tuple[I64, I64]:
        """Bytes (begin, size) of some pieces of lists, all of one file."""
        width = self._dtype_of(f).itemsize
        begins = self._index["at"][pieces.documents[mine]] + pieces.begin[mine] * width
        return begins, pieces.lengths[mine] * width

    def _numbers(self, f: int, documents: I64, begins: I64, sizes: I64) -> Array:
        """The tokens in some bytes of some documents, back to back. Raises StoreError for a negative one."""
        out = np.empty(int(sizes.sum()), np.uint8)
        self._files[f].read_into(out, begins, sizes)
        numbers = out.view(self._dtype_of(f))

        def where(i: int) -> str:
            first = self._index["file_ends"][f - 1] if f else 0
            return f"{self._files[f].url}: row {documents[i] - first}"

        ends = sizes.cumsum() // numbers.itemsize
        if self._column.of_loss:
            return self._column.of_dtype(numbers, lambda at: where(int(ends.searchsorted(at, side="right"))))
        refuse_unfit(numbers, ends, where)
        return numbers


class ArrowFormat(DocumentFilesFormat):
    """Arrow files, and the folders of `datasets.save_to_disk`."""

    name = "arrow"
    lies_at = "a folder of datasets.save_to_disk, a .arrow file, or a folder of such"
    suffix, store = ".arrow", ArrowStore

    def files(self, place: Place) -> tuple[Folder, list[str]] | None:
        """The files that state.json names, in its order, also over HTTP; else as for other formats.

        Raises StoreError for several splits, rows that are reordered by an index, or no data file.
        """
        may_be = is_http(place.given) or any(name.endswith(self.suffix) for name in place.names)
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


def _end_to_end(arrays: Sequence[I64]) -> I64:
    return np.concatenate([*arrays, np.zeros(0, np.int64)])
