"""JSONL as a token store: a document per line, with its tokens, or with text for a tokenizer."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, FileStats, Folder
from meshfeed.store.index_cache import Array
from meshfeed.store.lengths import lengths_index
from meshfeed.store.stream import (
    I64,
    checked_out,
    checked_places,
    checked_ranges,
    document_starts_between,
    pieces_of,
)
from meshfeed.store.tokenizing import Tokenizer

_COLUMNS = ("tokens", "input_ids")
_PART_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_LONGEST_LINE_BYTES = 1 << 30
_KEPT_DOCUMENTS = 4096
_SAMPLED_BYTES, _NUM_SAMPLED = 1 << 9, 8


class JsonlStore:
    """A .jsonl file: document i is line i. All but the attributes wants `with store:`.

    Args:
        folder, name: where the file lies.
        column: the key of the tokens (a list of whole numbers), or of the text where there is a tokenizer;
            None takes "tokens" or "input_ids", or "text" with a tokenizer.
        tokenizer: "bytes", or the path of a file of the `tokenizers` package; None for lines of tokens.

    The first to open a file reads all of it once, to know how long each document is and where it lies; that
    is kept beside the cache of the node. A line is parsed, and a text tokenized, when it is read.
    All methods raise StoreError, naming file and line.
    """

    def __init__(
        self, folder: Folder, name: str, *, column: str | None = None, tokenizer: str | None = None
    ) -> None:
        self._folder, self._name, self._column = folder, name, column
        self._tokenizer_name = tokenizer
        self._file: ByteFile = folder.file(name)
        self.path = self._file.url
        self._depth = 0
        self._lock = threading.RLock()
        self._kept: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()

    # -- what it is ---------------------------------------------------------------------------------------

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return None if self._tokenizer_name is None else Tokenizer(self._tokenizer_name)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens: uint8 for bytes, else uint32."""
        return np.dtype(np.uint32) if self._tokenizer is None else self._tokenizer.dtype

    @property
    def num_documents(self) -> int:
        """Lines."""
        return self._offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self._offsets[-1])

    @property
    def is_stream(self) -> bool:
        """Documents lie end to end."""
        return True

    @property
    def wants_ahead(self) -> bool:
        """Whether ranges should be announced many steps before."""
        return self._file.is_remote

    @property
    def stats(self) -> FileStats:
        """What reading has cost so far."""
        return self._file.stats

    @property
    def fingerprint(self) -> str:
        """Hex digest of the file's size, some of its bytes, the column and the tokenizer."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        size = self._file.size_bytes
        told = f"jsonl 1 {size} {self._column} {self._tokenizer and self._tokenizer.digest}"
        digest = hashlib.blake2b(told.encode(), digest_size=16)
        last = max(size - _SAMPLED_BYTES, 0)
        places = [last * i // (_NUM_SAMPLED - 1) for i in range(_NUM_SAMPLED)]
        digest.update(b"".join(self._file.peek([(at, at + _SAMPLED_BYTES) for at in places])))
        return digest.hexdigest()

    # -- entering and leaving -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self._lock:
            self._file.__enter__()
            self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._depth -= 1
            self._file.__exit__(*exc)
            if not self._depth:
                self._kept.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"given": (self._folder, self._name, self._column, self._tokenizer_name)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        folder, name, column, tokenizer = state["given"]
        self.__init__(folder, name, column=column, tokenizer=tokenizer)

    def __repr__(self) -> str:
        return f"JsonlStore({self.path!r})"

    # -- documents and the stream -------------------------------------------------------------------------

    def lengths(self, documents: I64) -> I64:
        """Tokens of each document; int64 [n] -> int64 [n]."""
        documents = checked_places(self.path, documents, self.num_documents, "document")
        return self._offsets[documents + 1] - self._offsets[documents]

    def offsets(self, documents: I64) -> I64:
        """Stream offset, in tokens, of each document's first; int64 [n] -> int64 [n]."""
        return self._offsets[checked_places(self.path, documents, self.num_documents, "document")]

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start..stop of one document; [stop - start] of `dtype`."""
        (length,) = self.lengths(np.array([document])).tolist()
        if not 0 <= start <= stop <= length:
            raise StoreError(
                f"{self.path}: tokens {start}..{stop} of document {document} asked for, it has {length}"
            )
        first = int(self._offsets[document])
        return self.read_stream(np.array([first + start]), np.array([first + stop]))

    def read_stream(self, starts: I64, stops: I64, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Tokens of the stream's ranges, back to back; see IndexedStore."""
        starts, stops = checked_ranges(self.path, self.num_tokens, starts, stops)
        out = checked_out(self.path, out, self.dtype, int((stops - starts).sum()))
        documents, skip, take = pieces_of(self._offsets, starts, stops)
        with self._lock:
            tokens = self._documents(np.unique(documents))
            at = 0
            for document, first, size in zip(documents.tolist(), skip.tolist(), take.tolist()):
                out[at : at + size] = tokens[document][first : first + size]
                at += size
        return out

    def document_starts(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        """Offsets of documents strictly inside each range, and how many each has; see IndexedStore."""
        starts, stops = checked_ranges(self.path, self.num_tokens, starts, stops)
        offsets = self._offsets
        return document_starts_between(offsets[:-1][np.diff(offsets) > 0], starts, stops)

    def will_need(self, starts: I64, stops: I64) -> None:
        """Announce ranges of the stream that will be read, each once."""
        documents, _, _ = pieces_of(self._offsets, *checked_ranges(self.path, self.num_tokens, starts, stops))
        documents = np.unique(documents)
        begins = self._index["begins"][documents]
        self._file.will_need(begins, begins + self._index["sizes"][documents])

    def forget_needs(self) -> None:
        """What was announced and is not read yet will not be."""
        self._file.forget_needs()

    def _documents(self, documents: I64) -> dict[int, npt.NDArray[Any]]:
        """Tokens of some documents, parsed anew unless they were read lately."""
        found = {each: self._kept[each] for each in documents.tolist() if each in self._kept}
        missing = np.array([each for each in documents.tolist() if each not in found], np.int64)
        begins, sizes = self._index["begins"][missing], self._index["sizes"][missing].astype(np.int64)
        data = np.empty(int(sizes.sum()), np.uint8)
        self._file.read_into(data, begins, sizes)
        lengths, at = self.lengths(missing).tolist(), 0
        for document, size, length in zip(missing.tolist(), sizes.tolist(), lengths):
            tokens = self._tokens_of(data[at : at + size].tobytes(), document)
            at += size
            if tokens.size != length:
                raise StoreError(
                    f"{self.path}: line {document + 1} has {tokens.size} tokens, {length} when its lengths "
                    f"were noted; the file was changed, open it anew"
                )
            found[document] = self._kept[document] = tokens
        while len(self._kept) > _KEPT_DOCUMENTS:
            self._kept.popitem(last=False)
        return found

    def _tokens_of(self, line: bytes, document: int) -> npt.NDArray[Any]:
        where = f"{self.path}: line {document + 1}"
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where}: no JSON: {error}; mend or remove the line") from error
        if not isinstance(given, dict):
            raise StoreError(f"{where}: no object; a line is {{key: value, ...}}")
        row = cast(dict[str, Any], given)
        if self._tokenizer is not None:
            text = row.get(self._column or "text")
            if not isinstance(text, str):
                raise StoreError(f"{where}: {self._column or 'text'!r} is no text; name the key with column=")
            return self._tokenizer.encode(text)
        key = self._column or next((name for name in _COLUMNS if name in row), "tokens")
        try:
            tokens = np.asarray(row[key])
        except (KeyError, ValueError, OverflowError) as error:
            raise StoreError(
                f"{where}: no list of tokens under {key!r}; name the key with column=, or give a tokenizer="
            ) from error
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise StoreError(f"{where}: {key!r} is no list of whole numbers")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < 1 << 32:
            raise StoreError(f"{where}: {key!r} holds a token outside 0 to {(1 << 32) - 1}")
        return tokens.astype(np.uint32)

    # -- the lengths index --------------------------------------------------------------------------------

    @cached_property
    def _offsets(self) -> I64:
        """Stream offset of each document, and the stream's end; int64 [num_documents + 1]."""
        return np.concatenate((np.zeros(1, np.int64), self._index["lengths"].cumsum(dtype=np.int64)))

    @cached_property
    def _index(self) -> dict[str, Array]:
        parts = max(-(-self._file.size_bytes // _PART_BYTES), 1)
        return lengths_index(
            self._folder.kept, parts, self._part, kind="jsonl", version=1, of=self.fingerprint
        )

    def _part(self, part: int) -> dict[str, Array]:
        """Lines that begin in one stretch of the file: first byte, bytes and tokens of each."""
        begins, sizes, lengths = list[int](), list[int](), list[int]()
        with self._file:
            for begin, line in self._lines(part * _PART_BYTES, (part + 1) * _PART_BYTES):
                begins.append(begin)
                sizes.append(len(line))
                # the number of the line is not known in a later part; its byte is
                lengths.append(self._length_at(line, begin))
        return {
            "begins": np.array(begins, np.int64),
            "sizes": np.array(sizes, np.int64),
            "lengths": np.array(lengths, np.int64),
        }

    def _length_at(self, line: bytes, begin: int) -> int:
        try:
            return self._tokens_of(line, 0).size
        except StoreError as error:
            told = str(error).replace(f"{self.path}: line 1: ", "")
            raise StoreError(f"{self.path}: the line at byte {begin}: {told}") from error

    def _lines(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(first byte, line without its end) of each line that begins in [start, stop) and is not blank."""
        size = self._file.size_bytes
        at, rest = max(start - 1, 0), b""
        skipping = start > 0  # the line that runs into this part belongs to the one before
        begin = at
        while at < size and (begin < stop or skipping):
            chunk = np.empty(min(_CHUNK_BYTES, size - at), np.uint8)
            self._file.read_into(chunk, np.array([at]), np.array([chunk.size]))
            at += chunk.size
            rest += chunk.tobytes()
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if skipping:
                    skipping = False
                elif begin < stop and line.strip():
                    yield begin, line
                begin += len(line) + 1
            if len(rest) > _LONGEST_LINE_BYTES:
                raise StoreError(
                    f"{self.path}: the line at byte {begin} is longer than {_LONGEST_LINE_BYTES} bytes"
                )
        if rest.strip() and not skipping and begin < stop and at >= size:
            yield begin, rest
