"""The compact form of a portion's fields: what was read, as stored, and runs.

Along a run, a field counts up, keeps one value, or follows the tokens that were read. So a GPU needs only the
tokens as stored, 2 or 4 bytes each, and short tables. It makes the wide fields itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshfeed.columns import Array, Arrays
from meshfeed.roles import Field
from meshfeed.sequence.runs import Longs, Runs


@dataclass(frozen=True, slots=True)
class RunField:
    """A field as runs: token `runs.at + i` has the value `runs.start + step * i`, for i < `runs.size`.

    Tokens outside all runs are padding.

    Attributes:
        field: gives name, dtype and padding.
        runs: ascending and apart; the rows of the field count as one.
        step: 1 to count up along a run, 0 to keep one value.
        column: the column that these values are indices into; None if the field has the values themselves.
    """

    field: Field
    runs: Runs
    step: int
    column: str | None = None


@dataclass(frozen=True, slots=True)
class Compact:
    """The fields of a portion in compact form.

    Attributes:
        shape: rows and tokens of each field, over all microbatches of the portion.
        columns: name -> real numbers as stored, in any shape; indices count them as one row.
        fields: the fields to widen.
        ready: the other fields of each microbatch, all small.
    """

    shape: tuple[int, int]
    columns: Mapping[str, Array]
    fields: Sequence[RunField]
    ready: Sequence[Arrays]


def widened(compact: Compact, copy: Callable[[Array], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `compact.fields`, each [rows, tokens]; on every device equal to those of `build`.

    copy: array -> tensor on the device; called once for each column, and once for all tables.
    """
    tables = _Tables(compact, copy)
    columns = {name: _Column(array, copy) for name, array in compact.columns.items()}
    made: dict[str, torch.Tensor] = {}
    for each in compact.fields:
        runs = each.runs
        run, along = tables.place(runs.at)
        padding = along >= tables.of(runs.size)[run]
        value = tables.of(runs.start)[run]
        if each.step:
            value += along
        if each.column is not None:
            value = columns[each.column].values_at(value.masked_fill_(padding, 0))
        value.masked_fill_(padding, each.field.pad)
        made[each.field.name] = _converted(value, each.field.dtype).view(compact.shape)
    return made


class _Tables:
    """The arrays of all runs on the device, moved there by one copy; arrays that fields share, once.

    Each gets a run of size 0 in front, which holds the padding before the first run.
    """

    def __init__(self, compact: Compact, copy: Callable[[Array], torch.Tensor]) -> None:
        arrays: dict[int, Longs] = {}
        for runs in (each.runs for each in compact.fields):
            arrays |= {id(array): array for array in (runs.at, runs.size, runs.start)}
        if arrays:
            flat = np.concatenate(
                [part for array in arrays.values() for part in ((0,), array)], dtype=np.int64
            )
            parts = copy(flat).split([array.size + 1 for array in arrays.values()])
            self._parts = dict(zip(arrays, parts))
            self._token = torch.arange(compact.shape[0] * compact.shape[1], device=parts[0].device)
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, array: Longs) -> torch.Tensor:
        """An array of some runs on the device."""
        return self._parts[id(array)]

    def place(self, at: Longs) -> tuple[torch.Tensor, torch.Tensor]:
        """The run that each token belongs to, and how far along; int64 [rows * tokens] each."""
        if id(at) not in self._places:
            run = torch.bucketize(self._token, self.of(at), right=True) - 1
            self._places[id(at)] = run, self._token - self.of(at)[run]
        return self._places[id(at)]


class _Column:
    """A column on the device. Unsigned integers go as signed ones: few operations of torch take them."""

    def __init__(self, array: Array, copy: Callable[[Array], torch.Tensor]) -> None:
        flat = np.ascontiguousarray(array).reshape(-1) if array.size else np.zeros(1, array.dtype)
        self._is_float, self._mask = flat.dtype.kind == "f", None
        if flat.dtype.name in ("uint16", "uint32"):
            self._mask = np.iinfo(flat.dtype).max
        if flat.dtype.kind == "u" and flat.itemsize > 1:
            flat = flat.view(f"i{flat.itemsize}")
        self._values = copy(flat)

    def values_at(self, index: torch.Tensor) -> torch.Tensor:
        """The values at some indices; int64, or the column's own floating-point type."""
        values = self._values[index]
        if self._is_float:
            return values
        return values.long() if self._mask is None else values.long().bitwise_and_(self._mask)


def _converted(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Values in a field's type, wrapped around like NumPy's."""
    if dtype in ("uint16", "uint32", "uint64"):
        return values.to(getattr(torch, dtype.removeprefix("u"))).view(getattr(torch, dtype))
    return values.to(getattr(torch, dtype))
