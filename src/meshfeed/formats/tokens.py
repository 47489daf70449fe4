"""The tokens of documents from one column: lists of whole numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Array
from meshfeed.errors import OptionError, StoreError
from meshfeed.store.loss_columns import LABELS

TOKEN_COLUMNS = ("tokens", "input_ids")
"""The default columns of token lists; the first that exists is used."""

Where = Callable[[int], str]
"""Index of a value -> its file, and line or row, for messages."""


@dataclass(frozen=True)
class TokenColumn:
    """Which column of a record holds its tokens.

    Attributes:
        name: of the column; None for the first of TOKEN_COLUMNS.
        of_loss: whether it is one of LOSS_COLUMNS: labels are int32, masks float32.
    """

    name: str | None = None
    of_loss: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to look for; the first that exists is used."""
        return TOKEN_COLUMNS if self.name is None else (self.name,)

    @property
    def digest(self) -> str:
        """Identifies everything that determines the tokens of a record."""
        return f"{','.join(self.names)}{' of loss' * self.of_loss}"

    def holds(self, arrow: Any, kind: Any) -> bool:
        """Whether lists of an Arrow type can be the column."""
        types, is_mask = arrow.types, self.of_loss and self.name != LABELS
        fit = [types.is_integer, *[types.is_floating, types.is_boolean] * is_mask]
        return any(is_kind(kind) for is_kind in fit)

    @property
    def belongs(self) -> str:
        """What a column of the wrong type should be; ends a message."""
        if self.of_loss:
            return f"lists of {'whole ' * (self.name == LABELS)}numbers belong; {_LOSS_HINT}"
        return "lists of whole numbers belong; name the right column= and, for text, a tokenizer="

    def dtype(self, most: int) -> np.dtype[Any]:
        """Dtype of the tokens; `most` is the largest."""
        if self.of_loss:
            return np.dtype(np.int32 if self.name == LABELS else np.float32)
        return np.dtype("uint16" if most < 1 << 16 else "int32" if most < 1 << 31 else "int64")

    def encoded(self, values: Sequence[Any], where: Where) -> list[Array]:
        """The tokens of each value, whole numbers [n]. Raises StoreError naming the first bad value."""
        read = self._numbers if self.of_loss else _whole_numbers
        return [read(value, where, i) for i, value in enumerate(values)]

    def of_dtype(self, numbers: Array, where: Where) -> Array:
        """Numbers of a loss column in its dtype, [n]. where: names one. Raises StoreError unless they fit."""
        dtype = self.dtype(0)
        given = numbers if numbers.dtype.kind in "iufb" else numbers.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            made = given.astype(dtype)
        wrong = (made != given) if dtype.kind == "i" else ~np.isfinite(made)
        if wrong.any():
            at = int(wrong.argmax())
            belongs = "a whole number of 32 bits" if dtype.kind == "i" else "a finite number"
            raise StoreError(f"{where(at)}: {self.name} {given[at]}, where {belongs} belongs; {_LOSS_HINT}")
        return made

    def _numbers(self, value: Any, where: Where, i: int) -> Array:
        if not isinstance(value, list):
            raise StoreError(
                f"{where(i)}: {self.name!r} is {_called(value)}, where a list of numbers belongs; "
                f"{_LOSS_HINT}"
            )
        numbers = cast(list[Any], value)
        strange = next((each for each in numbers if type(each) not in (int, float, bool)), None)
        if strange is not None or None in numbers:
            raise StoreError(f"{where(i)}: {self.name!r} has {strange!r}, where numbers belong; {_LOSS_HINT}")
        return self.of_dtype(np.array(numbers, np.float64), lambda _: where(i))


PAIRS = (
    "'chosen' and 'rejected' are a pair, not one document: train on pairs by mf.Mapped(dataset) and "
    "mf.Samples(..., packed=True), see Pairs in docs/datasets.md and in docs/finetuning.md"
)


def hint_for(names: Sequence[str], there: Iterable[str], *, has_text: bool) -> str:
    """Advice if none of the columns `names` is `there`. has_text: whether there is text in "text"."""
    if {"chosen", "rejected"} <= {*there}:
        return PAIRS
    if has_text and TOKEN_COLUMNS[0] in names:
        return 'to read its text, name a tokenizer: tokenizer="tokenizer.json" (--tokenizer)'
    return "name it by column= (--column)"


def refuse_null_row(rows: Any, where: Where) -> None:
    """Raises StoreError for a null among the rows of an Arrow array of token lists."""
    if rows.null_count:
        raise StoreError(f"{where(_first_null(rows))}: null where a list of tokens belongs; {_NULL_HINT}")


def refuse_null_token(values: Any, where: Where) -> None:
    """Raises StoreError for a null in an Arrow array of tokens. where: names the row of a token."""
    if values.null_count:
        raise StoreError(f"{where(_first_null(values))}: a null among its tokens; leave it out")


def refuse_unfit(numbers: Array, where: Where) -> None:
    """Raises StoreError for whole numbers that are not tokens. where: names the row of a number."""
    wide = numbers.itemsize == 8  # as int64, unsigned numbers from 2**63 on are negative
    unfit = (numbers.view(numbers.dtype.str.replace("u", "i")) if wide else numbers) < 0
    if unfit.any():
        bad = int(unfit.argmax())
        raise StoreError(f"{where(bad)}: token {numbers[bad]}; {_TOKENS_ARE}")


def _first_null(array: Any) -> int:
    return int(array.is_null().to_numpy(zero_copy_only=False).argmax())


def _whole_numbers(value: Any, where: Where, i: int) -> Array:
    if not isinstance(value, list):
        error = OptionError if isinstance(value, str) else StoreError
        raise error(f"{where(i)}: {_called(value)} where a list of tokens belongs; {_HINT}")
    tokens = cast(list[Any], value)
    if set(map(type, tokens)) <= {int}:
        with contextlib.suppress(OverflowError):
            array = np.array(tokens, np.int64)
            if not array.size or array.min() >= 0:
                return array
    at, token = next((at, t) for at, t in enumerate(tokens) if type(t) is not int or not 0 <= t < 1 << 63)
    raise StoreError(f"{where(i)}: token {at} is {token!r}; {_TOKENS_ARE}")


_HINT = "name the right column= (--column) and, for text, a tokenizer=, or fix the file"
_NULL_HINT = "leave the row out, or name another column= (--column)"
_LOSS_HINT = "repair it, or leave the column out of use: ignore= (--ignore)"
_TOKENS_ARE = "tokens are whole numbers from 0 below 2**63"


def _called(value: Any) -> str:
    return "null" if value is None else type(value).__name__
