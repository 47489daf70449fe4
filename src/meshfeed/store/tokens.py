"""A column of documents -> tokens: lists of whole numbers as they are, or text through a tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.store.indexed_writer import best_dtype

TOKEN_COLUMNS = ("tokens", "input_ids")
"""Columns of token lists, the first that is there, where none is named."""
BYTES = "bytes"

Where = Callable[[int], str]
"""Which of some values -> what a message calls it: file, and line or row."""


@dataclass(frozen=True)
class Column:
    """Which column of a record is its tokens, and how.

    Attributes:
        name: of the column; None for "text" where there is a tokenizer, else the first of TOKEN_COLUMNS.
        tokenizer: None for a column of token lists. "bytes" for the UTF-8 bytes of a text, or the path of a
            `tokenizers` JSON file, here, to encode it with, without special tokens.

    Raises StoreError for a tokenizer that cannot be read, or a package that is missing.
    """

    name: str | None = None
    tokenizer: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to look for; the first that is there counts."""
        if self.name is not None:
            return (self.name,)
        return TOKEN_COLUMNS if self.tokenizer is None else ("text",)

    @property
    def is_text(self) -> bool:
        """Whether the column is text."""
        return self.tokenizer is not None

    @cached_property
    def digest(self) -> str:
        """All that decides the tokens of a record."""
        how = self.tokenizer
        if how not in (None, BYTES):
            how = hashlib.blake2b(self._file, digest_size=16).hexdigest()
        return f"{','.join(self.names)} {how}"

    def check(self) -> None:
        """Load the tokenizer, where there is one."""
        if self.tokenizer not in (None, BYTES):
            _ = self._encoder

    def dtype(self, most: int) -> np.dtype[Any]:
        """The type of the tokens, where the greatest is `most`."""
        if self.tokenizer == BYTES:
            return np.dtype("u1")
        if self.tokenizer is not None:
            return best_dtype(int(self._encoder.get_vocab_size())).newbyteorder("<")
        return np.dtype("<u2" if most < 1 << 16 else "<i4" if most < 1 << 31 else "<i8")

    def encoded(self, values: Sequence[Any], where: Where) -> list[Array]:
        """The tokens of each value, whole numbers [n]. Raises StoreError naming the first that has none."""
        if not self.is_text:
            return [_whole_numbers(value, where, i) for i, value in enumerate(values)]
        texts = [_utf8(value, where, i) for i, value in enumerate(values)]
        if self.tokenizer == BYTES:
            return [np.frombuffer(text, np.uint8) for text in texts]
        found = self._encoder.encode_batch_fast(list(values), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]

    @cached_property
    def _file(self) -> bytes:
        path = cast(str, self.tokenizer)
        with typed_errors(path):
            return Path(path).read_bytes()

    @cached_property
    def _encoder(self) -> Any:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as missing:
            raise StoreError(
                f"{self.tokenizer}: a tokenizer needs the package tokenizers: pip install 'meshfeed[tables]'"
            ) from missing
        try:
            made = tokenizers.Tokenizer.from_buffer(self._file)
        except StoreError:
            raise
        except Exception as error:  # the package raises Exception itself
            raise StoreError(
                f"{self.tokenizer}: no tokenizer: {error}; give a JSON file as `tokenizers` saves it"
            ) from error
        made.no_padding()
        made.no_truncation()
        return made

    def __getstate__(self) -> dict[str, Any]:
        # The file too: the process that it goes to may stand elsewhere, and must not read another.
        kept = ("name", "tokenizer", "_file")
        return {key: value for key, value in self.__dict__.items() if key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _utf8(value: Any, where: Where, i: int) -> bytes:
    if not isinstance(value, str):
        raise StoreError(f"{where(i)}: {_called(value)} where text belongs; {_HINT}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"{where(i)}: text that is no Unicode: {error}; write it anew") from error


def _whole_numbers(value: Any, where: Where, i: int) -> Array:
    if not isinstance(value, list):
        raise StoreError(f"{where(i)}: {_called(value)} where a list of tokens belongs; {_HINT}")
    tokens = cast(list[Any], value)
    if set(map(type, tokens)) <= {int}:
        with contextlib.suppress(OverflowError):
            array = np.array(tokens, np.int64)
            if not array.size or array.min() >= 0:
                return array
    at, token = next((at, t) for at, t in enumerate(tokens) if type(t) is not int or not 0 <= t < 1 << 63)
    raise StoreError(f"{where(i)}: token {at} is {token!r}; tokens are whole numbers from 0 below 2**63")


_HINT = "name the right column= and, for text, a tokenizer=, or mend the file"


def _called(value: Any) -> str:
    return "null" if value is None else type(value).__name__
