"""Text, or lists of tokens -> documents of one column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from meshfeed.arrays import Array
from meshfeed.errors import PrepareError, StoreError
from meshfeed.formats.tokens import TokenColumn, Where
from meshfeed.prepare.inputs.records import Columns
from meshfeed.store.format import tokenizer_name
from meshfeed.store.indexed_writer import best_dtype
from meshfeed.store.loss_columns import ATTENTION_MASK, LOSS_COLUMNS
from meshfeed.store.tokenizer import BYTES, END, Tokenizer, TokenizerFile, tokenizer_file

TRAINED = "tokenizer.json"
"""File name of a tokenizer that was trained for a job."""
TEXT = "text"
"""The default column of text."""
DTYPES = ("uint8", "uint16", "int32")


@dataclass(frozen=True)
class TextColumn:
    """Which column of a record holds its text, and the tokenizer of it, one of `tokenizer.KNOWN`.

    Raises StoreError for a tokenizer that cannot be read, or a package that is missing.
    """

    name: str | None
    tokenizer: str

    @property
    def digest(self) -> str:
        """Identifies everything that determines the tokens of a record."""
        return f"{self.name or TEXT} {self._file.digest}"

    @cached_property
    def encoder(self) -> Tokenizer:
        return self._file.load()

    @cached_property
    def _file(self) -> TokenizerFile:
        return tokenizer_file(self.tokenizer)

    def encoded(self, values: Sequence[Any], where: Where) -> list[Array]:
        """The tokens of each text, whole numbers [n]. Raises StoreError naming the first bad value."""
        return self.encoder.encode([_text(value, where(i)) for i, value in enumerate(values)])


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        found = "null" if value is None else type(value).__name__
        raise StoreError(
            f"{where}: {found} where text belongs; name the right column (--column), or fix the file"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"{where}: text is not Unicode: {error}; fix or remove it") from error
    return value


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Text, or lists of tokens, as documents of one column.

    Attributes:
        column: of text in a record, with its tokenizer, or of lists of tokens.
        columns: of the output: name -> dtype.
        digest: of everything that decides it.
        end: the token after each document; None for none.
    """

    column: TextColumn | TokenColumn
    columns: Mapping[str, np.dtype[Any]]
    digest: str
    end: int | None
    beside: ClassVar[Mapping[str, np.dtype[Any]]] = {}

    def encode(self, values: Sequence[Any], where: Where) -> list[Mapping[str, Array]]:
        """Each value's columns, [n] each. Raises StoreError, with its `where`, for an invalid value."""
        dtype = self.columns["tokens"]
        end = np.array([] if self.end is None else [self.end], dtype)
        found = self.column.encoded(values, where)
        most = np.iinfo(dtype).max
        for i, tokens in enumerate([] if isinstance(self.column, TextColumn) else found):  # of text, all fit
            if tokens.max(initial=0) > most:
                raise StoreError(
                    f"{where(i)}: token {tokens.max()}, which {dtype.name} cannot hold; use a wider --dtype"
                )
        return [{"tokens": np.concatenate((tokens, end), dtype=dtype, casting="unsafe")} for tokens in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text, or lists of tokens.

    Attributes:
        tokenizer: of text, as `store.tokenizer.KNOWN` says; None where the column is lists of tokens.
        train_bpe: instead of a tokenizer: the size of the vocabulary of one to train on the inputs.
        column: of JSON lines and Parquet; None for "text", or, of token lists, "tokens" or "input_ids".
        eod: the token that ends each document, as text or number; True for the tokenizer's own.
        dtype: of the tokens: "uint8", "uint16" or "int32"; "auto" for the narrowest that Megatron reads and
            that holds them all, or bytes.
    """

    tokenizer: str | None = None
    train_bpe: int | None = None
    column: str | None = None
    eod: str | bool = False
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", tokenizer_name(self.tokenizer))

    @property
    def columns(self) -> Columns:
        is_text = self.tokenizer is not None or self.train_bpe is not None
        if is_text:
            return Columns((self.column or TEXT,))
        refused = tuple(name for name in LOSS_COLUMNS if name != ATTENTION_MASK)
        return Columns(TokenColumn(self.column).names, refused, masks=(ATTENTION_MASK,))

    def request(self) -> dict[str, Any]:
        """Everything that decides the tokens, as JSON values. Raises StoreError, PrepareError."""
        shared = {"kind": "text", "column": self.column, "eod": self.eod, "dtype": self.dtype}
        if self.train_bpe is None:
            return shared | {"tokenizer": absolute(self.tokenizer), "digest": self.encoder().digest}
        if self.tokenizer is not None:
            raise PrepareError("both a tokenizer and one to train; give one of them")
        return shared | {"train_bpe": self.train_bpe}

    def encoder(self, trained: Path | None = None) -> TextEncoder:
        """The encoder. trained: the file of a tokenizer that was trained for the job.

        Raises PrepareError for a tokenizer that lacks the token to end with, or has more tokens than the
        dtype holds; StoreError for one that cannot be loaded.
        """
        tokenizer = self.tokenizer if self.train_bpe is None else str(trained)
        column = TokenColumn(self.column) if tokenizer is None else TextColumn(self.column, tokenizer)
        loaded = column.encoder if isinstance(column, TextColumn) else None
        digest = column.digest
        if self.eod is True and loaded is not None:  # tokenizer_config.json beside the tokenizer may name it
            digest += f" end {loaded.end}"
        end = END if self.eod is True and self.train_bpe is not None else self.eod
        end = None if end is False else _end(column, end)
        vocab_size = max(0 if loaded is None else loaded.vocab_size, 0 if end is None else end + 1)
        if self.dtype == "auto":
            dtype = best_dtype(None if loaded is None else vocab_size)
            if loaded is not None and vocab_size <= 256:
                dtype = np.dtype(np.uint8)
        elif self.dtype not in DTYPES:
            raise PrepareError(f"--dtype {self.dtype}: unknown; use auto, {', '.join(DTYPES)}")
        else:
            dtype = np.dtype(self.dtype)
            most = np.iinfo(dtype).max + 1
            if vocab_size > most:
                raise PrepareError(
                    f"{tokenizer or f'eod={self.eod!r}'}: {vocab_size} tokens, of which {dtype} holds "
                    f"{most}; use a wider --dtype, or auto"
                )
        return TextEncoder(column, {"tokens": dtype}, digest, end)


def absolute(name: str | None) -> str | None:
    """The absolute path of a file or folder, for workers in other directories; other names unchanged."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


def _end(column: TextColumn | TokenColumn, eod: str | bool) -> int:
    if isinstance(column, TokenColumn):
        if isinstance(eod, str) and eod.isdecimal():
            return int(eod)
        raise PrepareError(
            'lists of tokens need the number of the token that ends a document: eod="0" (--eod-token 0)'
        )
    tokenizer = column.encoder
    if eod is True:
        end = 256 if column.tokenizer == BYTES else tokenizer.end
        if end is None:
            raise PrepareError(
                f"{column.tokenizer}: does not say which token ends a document; name it by eod= (--eod-token)"
            )
        return end
    text = str(eod)
    end = int(text) if text.isdecimal() else tokenizer.id_of(text)  # digits are tokens of most, too
    if end is None or end >= tokenizer.vocab_size:
        raise PrepareError(f"{column.tokenizer}: has no token {eod!r} to end documents with; look at its own")
    return end
