"""Writes a Megatron token store, byte for byte as Megatron's own builder does."""

from __future__ import annotations

import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Bools, Longs
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import LocalFile, typed_errors
from meshfeed.files.local.durable import sync
from meshfeed.files.sums import BLOCK_BYTES, SUFFIX, Summer, Sums
from meshfeed.store.checksums import refuse_block_bytes
from meshfeed.store.index import DTYPES, HEADER, MAGIC, VERSION
from meshfeed.store.pair import Pair
from meshfeed.whole import path_text, whole

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_LENGTH = 2**31 - 1
_PIECE_BYTES = 1 << 24
_SMALL_VOCABULARY = 65500  # Megatron's bound, somewhat below 2**16


def best_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The token dtype that Megatron chooses for a vocabulary: uint16 below 65,500 ids, else int32."""
    small = vocab_size is not None and vocab_size < _SMALL_VOCABULARY
    return np.dtype(np.uint16 if small else np.int32)


class IndexedWriter:
    """Writes `prefix`.bin, `prefix`.idx, and checksums of both in `prefix`.sums, which Megatron ignores.

        with IndexedWriter("corpus", best_dtype(50257)) as writer:
            writer.add_document(tokens)

    They appear complete at a clean end of `with`. Until then the bytes are in temporary files beside them,
    which an exception removes. Memory grows only by 4 bytes per checksum.

    Attributes:
        prefix: path without .bin or .idx; its directory must exist.
        dtype: of the tokens: u1, i1, i2, i4, i8, u2, f4 or f8.
        modes: whether to keep a mode per sequence (multimodal stores).
        overwrite: whether existing files may be replaced.
        checksum_bytes: bytes per checksum, a power of two from 4 KiB to 64 MiB; None writes no checksums. A
            cache rounds its blocks up to a multiple of it.
        num_tokens, num_sequences, num_documents: added so far.

    All methods raise StoreError.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        *,
        modes: bool = False,
        overwrite: bool = False,
        checksum_bytes: int | None = BLOCK_BYTES,
    ) -> None:
        self.prefix = path_text(OptionError, prefix=prefix)
        self.dtype = _dtype_of(dtype)
        self.modes = modes
        self.overwrite = overwrite
        self.checksum_bytes = whole(checksum_bytes)
        self.num_tokens = self.num_sequences = self.num_documents = 0
        self._ended_sequences = 0
        self._files: _Files | None = None
        if self.checksum_bytes is not None:
            refuse_block_bytes(self.prefix, self.checksum_bytes)
        if self.dtype not in _CODES:
            names = ", ".join(known.name for known in _CODES)
            raise StoreError(
                f"{self.prefix}: dtype {self.dtype.name} has no code in this format; use {names}"
            )

    def __enter__(self) -> Self:
        if self._files is not None:
            raise StoreError(f"{self.prefix}: this writer is already writing; make one for each store")
        self.num_tokens = self.num_sequences = self.num_documents = self._ended_sequences = 0
        self._refuse_existing()
        with typed_errors(Path(self.prefix).parent):
            self._files = _Files(self.prefix, self.checksum_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        files = self._writing()
        self._files = None
        with typed_errors(files.data_path), files.removed_at_exit:
            if kind is None:
                self._publish(files)

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Add a document of one sequence; tokens [n], n >= 0, that `dtype` can hold."""
        self._refuse_within()
        self.add_sequence(tokens)
        self.end_document()

    def add_documents(self, tokens: Array, lengths: Longs) -> None:
        """Add documents of one sequence each: tokens back to back [sum], lengths int64 [n]."""
        self._refuse_within()
        if lengths.min(initial=0) < 0 or tokens.shape != (int(lengths.sum()),):
            raise StoreError(
                f"{self._place()}: tokens of shape {tokens.shape} for lengths of {lengths.sum()} in all"
            )
        first = self.num_sequences + 1
        self._write(self._exact(tokens, lengths), lengths, 0)
        self._end_documents(np.arange(first, self.num_sequences + 1))

    def add_sequence(self, tokens: npt.ArrayLike, mode: int = 0) -> None:
        """Add a sequence to the current document; tokens [n], n >= 0, that `dtype` can hold.

        Whole numbers are kept exactly or refused, never wrapped; fractions round to a float `dtype`.
        mode: -128 to 127; refused unless 0 if the store keeps no modes.
        """
        array = self._exact(tokens)
        if not -128 <= mode <= 127 or (mode and not self.modes):
            raise StoreError(f"{self._place()}: mode {mode}; modes are -128..127 and need modes=True")
        self._write(array, np.array([array.size]), mode)

    def end_document(self) -> None:
        """End the current document: the sequences since the last end, possibly none."""
        self._end_documents(np.array([self.num_sequences]))

    def _write(self, array: Array, lengths: Longs, mode: int) -> None:
        files = self._writing()
        with typed_errors(files.data_path):
            tokens_bytes = array.view(np.uint8).data
            files.data.write(tokens_bytes)
            if files.summer is not None:
                files.summer.update(tokens_bytes)
            files.index.write(lengths.astype("<i4").tobytes())
            sizes = lengths.astype(np.int64) * self.dtype.itemsize
            begins = self.num_tokens * self.dtype.itemsize + sizes.cumsum() - sizes
            files.pointers.write(begins.astype("<i8").tobytes())
            if self.modes:
                files.modes.write(struct.pack("<b", mode) * lengths.size)
        self.num_sequences += lengths.size
        self.num_tokens += array.size

    def _end_documents(self, ends: Longs) -> None:
        files = self._writing()
        with typed_errors(files.index_path):
            files.documents.write(ends.astype("<i8").tobytes())
        self.num_documents += ends.size
        self._ended_sequences = self.num_sequences

    def _refuse_within(self) -> None:
        if self._ended_sequences != self.num_sequences:
            raise StoreError(
                f"{self.prefix}: add_document within a document of "
                f"{self.num_sequences - self._ended_sequences} sequences; call end_document first"
            )

    def _writing(self) -> _Files:
        if self._files is None:
            raise StoreError(f"{self.prefix}: not writing; add to it inside `with`")
        return self._files

    def _place(self, later: int = 0) -> str:
        """Names the next sequence for messages; later: that many sequences on, each a document of its own."""
        return f"{self.prefix}: sequence {self.num_sequences + later} (document {self.num_documents + later})"

    def _refuse_existing(self) -> None:
        for suffix in (".bin", ".idx", SUFFIX):
            target = Path(self.prefix + suffix)
            with typed_errors(target):
                if target.is_dir() or (target.exists() and not self.overwrite):
                    raise StoreError(
                        f"{target}: exists already; take another path or pass overwrite=True (--overwrite)"
                    )

    def _exact(self, tokens: npt.ArrayLike, lengths: Longs | None = None) -> Array:
        """The tokens in `dtype`, contiguous, or a StoreError that names the first that does not fit.

        lengths: of several documents, int64 [n]; None for one sequence.
        """
        try:
            array = np.asarray(tokens)
        except (TypeError, ValueError) as error:
            raise StoreError(f"{self._place()}: no array of tokens: {error}") from error
        if np.ma.is_masked(tokens):
            raise StoreError(f"{self._place()}: an array with masked entries; give array.filled(...)")
        if array.ndim != 1 or array.size > _MAX_LENGTH:
            raise StoreError(f"{self._place()}: shape {array.shape}; give [n], n < 2**31")
        if array.dtype.kind == "f" and not isinstance(tokens, np.ndarray):
            # NumPy turns a list of integers without a common integer dtype into floats.
            for i, (given, kept) in enumerate(zip(cast(Sequence[Any], tokens), array.tolist())):
                if isinstance(given, int) and given != kept:
                    raise StoreError(
                        f"{self._place()}: token {i} is {given}, which NumPy would round to {kept}"
                    )
        # NumPy calls int64 -> float64 safe, although it rounds.
        may_round = self.dtype.kind == "f" and array.dtype.kind in "iu"
        if not array.size or (not may_round and np.can_cast(array.dtype, self.dtype, "safe")):
            return np.ascontiguousarray(array, self.dtype)
        kinds = "iu" if self.dtype.kind in "iu" else "iuf"
        if array.dtype.kind not in kinds:
            raise StoreError(f"{self._place()}: {array.dtype.name} values for {self.dtype.name} tokens")
        with np.errstate(all="ignore"):
            held = np.ascontiguousarray(array, self.dtype)
            unfit = np.flatnonzero(_differ(array, held))
        if unfit.size:
            i = int(unfit[0])
            ends = np.array([array.size]) if lengths is None else lengths.cumsum()
            later = int(ends.searchsorted(i, side="right"))
            at = i - int(ends[later - 1] if later else 0)
            raise StoreError(
                f"{self._place(later)}: token {at} is {array[i]}, which {self.dtype.name} cannot hold; "
                f"choose a wider dtype"
            )
        return held

    def _publish(self, files: _Files) -> None:
        if self._ended_sequences != self.num_sequences:
            raise StoreError(
                f"{self.prefix}: the last {self.num_sequences - self._ended_sequences} sequences belong to "
                f"no document; call end_document before leaving"
            )
        with typed_errors(files.index_path):
            written = files.data.tell(), files.index.tell()
            if written != (self.num_tokens * self.dtype.itemsize, HEADER.size + 4 * self.num_sequences):
                raise StoreError(f"{self.prefix}: an earlier write failed half-way; write the store again")
            self._finish_index(files)
            _to_disk(files.data)
            _to_disk(files.index)
            sums = self._sums(files)
            files.sums.write(b"" if sums is None else sums.encode())
            _to_disk(files.sums)
        self._refuse_existing()
        data, index, guard = (Path(f"{self.prefix}{suffix}") for suffix in (".bin", ".idx", SUFFIX))
        # At no moment is an index beside a .bin or checksums of another store.
        with typed_errors(index):
            index.unlink(missing_ok=True)
            guard.unlink(missing_ok=True)
            files.data_path.replace(data)
            try:
                if sums is not None:
                    files.sums_path.replace(guard)
                files.index_path.replace(index)
            except OSError:
                data.unlink()
                guard.unlink(missing_ok=True)
                raise
            sync(data.parent)

    def _sums(self, files: _Files) -> Sums | None:
        if files.summer is None or self.checksum_bytes is None:
            return None
        files.index.seek(0)
        index = Summer(self.checksum_bytes)
        while piece := files.index.read(_PIECE_BYTES):
            index.update(piece)
        written = Pair(self.prefix, LocalFile(files.index_path), LocalFile(files.data_path))
        return Sums(written.fingerprint, (files.summer.sums(), index.sums()))

    def _finish_index(self, files: _Files) -> None:
        index = files.index
        for more in (files.pointers, files.documents, files.modes):
            more.seek(0)
            shutil.copyfileobj(more, index)
        index.seek(0)
        code = _CODES[self.dtype]
        index.write(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))


def _differ(given: Array, held: Array) -> Bools:
    """Which values another dtype cannot hold: whole numbers exactly, fractions up to rounding."""
    if given.dtype.kind == "f":
        return np.isfinite(given) & ~np.isfinite(held)  # infinities are values of every float dtype
    if held.dtype.kind == "f":  # integers beyond its mantissa may fall between two floats
        beyond = np.abs(held) > 2.0 ** (np.finfo(held.dtype.type).nmant + 1)
    else:
        beyond = (held < 0) != (given < 0)
    return beyond | (held.astype(given.dtype) != given)


def _to_disk(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


class _Files:
    """The open temporary files of one store; `removed_at_exit` removes those with a name."""

    def __init__(self, prefix: str, checksum_bytes: int | None) -> None:
        mark = secrets.token_hex(4)
        self.data_path = Path(f"{prefix}.bin.{mark}.tmp")
        self.index_path = Path(f"{prefix}.idx.{mark}.tmp")
        self.sums_path = Path(f"{prefix}{SUFFIX}.{mark}.tmp")
        self.summer = None if checksum_bytes is None else Summer(checksum_bytes)
        with ExitStack() as stack:
            self.data: IO[bytes] = self._named(stack, self.data_path)
            self.index: IO[bytes] = self._named(stack, self.index_path)
            self.sums: IO[bytes] = self._named(stack, self.sums_path)
            directory = self.data_path.parent
            self.pointers: IO[bytes] = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            self.documents: IO[bytes] = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            self.modes: IO[bytes] = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            self.index.write(bytes(HEADER.size))
            self.documents.write(struct.pack("<q", 0))
            self.removed_at_exit = stack.pop_all()

    @staticmethod
    def _named(stack: ExitStack, path: Path) -> IO[bytes]:
        stream = path.open("x+b", buffering=1 << 20)
        stack.callback(path.unlink, missing_ok=True)
        return stack.enter_context(stream)


def _dtype_of(given: npt.DTypeLike) -> np.dtype[Any]:
    try:
        return np.dtype(given).newbyteorder("<")
    except (TypeError, ValueError) as error:
        raise OptionError(f"dtype={given!r} is not a dtype, such as 'uint16'") from error
