"""A portion's fields as a table: what was read, as stored, and runs.

Along a run, a field counts up, keeps one value, or follows the tokens that were read. `FieldTable.built`
expands a table on the CPU. A GPU needs only the tokens as stored, 2 or 4 bytes each, and short tables; with
`widened` it makes the wide fields itself. Both make the same bits.

The fields of a pack that follow from the plan alone are here, too, for all rules that pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from meshfeed.arrays import Allocate, Array, Arrays, Columns, Longs
from meshfeed.intervals import together
from meshfeed.roles import Field
from meshfeed.sequence.runs import Portion, Runs

_NO_COLUMNS: Mapping[str, Array] = {}
_FEW = 32  # runs, between which a loop pads in less time than arrays of gaps take


@dataclass(frozen=True, slots=True)
class RunField:
    """A field as runs: token `runs.at + i` has the value `runs.start + step * i`, for i < `runs.size`.

    Tokens outside all runs are padding.

    Attributes:
        field: gives name, dtype and padding.
        runs: ascending and apart; the rows of the field count as one.
        step: 1 to count up along a run, 0 to keep one value.
        column: the column that these values are indices into; None if the field has the values themselves.
        is_kept: whether the same object is in the tables of other steps, so that its tensor may be kept.
    """

    field: Field
    runs: Runs
    step: int
    column: str | None = None
    is_kept: bool = False

    def write(self, out: Array, columns: Mapping[str, Array] = _NO_COLUMNS) -> None:
        """Fill the field, in any shape. columns: with the one that it follows."""
        out = out.reshape(-1)
        column = None if self.column is None else columns[self.column].reshape(-1)
        runs, first, covered = self.runs, self.runs.start, int(self.runs.size.sum())
        if column is not None and 2 * covered < out.size:
            out[:] = self.field.pad
            runs.copy(column, out)
            return
        if column is not None:
            runs.copy(column, out)
        elif not self.step and (first[:1] == first).all():
            out[:] = first[0] if first.size else self.field.pad
        elif out.dtype.kind in "iu":
            some = runs.size > 0
            _count(out, runs.at[some], first[some], self.step)
        else:
            for at, value, size in zip(runs.at.tolist(), first.tolist(), runs.size.tolist()):
                out[at : at + size] = value + self.step * np.arange(size)
        if covered == out.size:
            return
        if runs.at.size > _FEW:
            runs.gaps(out.size).fill(self.field.pad, out)
            return
        ends = (runs.at + runs.size).tolist()
        for start, stop in zip([0, *ends], [*runs.at.tolist(), out.size]):
            if start < stop:
                out[start:stop] = self.field.pad


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of a portion.

    Attributes:
        shape: rows and tokens of each field, over all microbatches of the portion.
        columns: name -> real numbers as read, in any shape; indices count them as one row.
        fields: those that cp splits.
        ready: the other fields of each microbatch.
    """

    shape: tuple[int, int]
    columns: Mapping[str, Array]
    fields: Sequence[RunField]
    ready: Sequence[Arrays]

    def built(self, allocate: Allocate) -> list[Arrays]:
        """The fields of each microbatch."""
        made: list[Arrays] = [{} for _ in self.ready]
        for each in self.fields:
            out = allocate(self.shape, each.field.dtype)
            each.write(out, self.columns)
            for arrays, part in zip(made, np.split(out, len(made))):
                arrays[each.field.name] = part
        return [arrays | more for arrays, more in zip(made, self.ready)]

    def cut(self) -> FieldTable:
        """The same with no more of each column than the fields take, one run after the other."""
        columns, fields = dict[str, Array](), list(self.fields)
        for name, column in self.columns.items():
            mine = [i for i, each in enumerate(fields) if each.column == name]
            start, size = (
                np.concatenate([getattr(fields[i].runs, of) for i in mine]) for of in ("start", "size")
            )
            begins, ends = together(start, start + size)
            sizes = ends - begins
            before = np.cumsum(sizes) - sizes
            columns[name] = out = column.reshape(-1)
            if (total := int(sizes.sum())) == column.size:
                continue
            columns[name] = out = np.empty(total, column.dtype)
            Runs(before, begins, sizes).copy(column.reshape(-1), out)
            for i in mine:
                runs = fields[i].runs
                # an empty run may be outside of all: it takes nothing from anywhere
                within = np.searchsorted(begins, runs.start, side="right") - 1
                moved = runs.start + (before - begins)[within] if begins.size else runs.start
                fields[i] = replace(fields[i], runs=Runs(runs.at, moved, runs.size))
        return replace(self, columns=columns, fields=fields)


def table_of(
    shape: tuple[int, int],
    columns: Columns | None,
    names: Sequence[str],
    fields: Sequence[RunField],
    ready: Sequence[Arrays],
) -> FieldTable:
    """The table of the named ones of some fields. Without columns, fields that follow one are left out."""
    made, used = list[RunField](), dict[str, Array]()
    for each in fields:
        if each.field.name in names and (columns or each.column is None):
            made.append(each)
            if columns and each.column:
                used[each.column] = np.asarray(columns[each.column])
    return FieldTable(shape, used, made, ready)


def _count(row: Array, at: Longs, first: Longs, by: int) -> None:
    """From each index `at` on, count from `first` in steps of `by`; int64 [m], `at` ascending."""
    row[:] = by
    # as differences, summed in place: no loop over runs, and no allocation of this size
    reached = by * at
    reached[1:] = first[:-1] + by * (at[1:] - at[:-1] - 1)
    row[at] = first - reached
    np.cumsum(row, out=row, dtype=row.dtype)


TOKEN_FIELDS = (
    Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    Field(name="labels", dtype="int64", stages=("last",), split=True),
    Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=False),
)
"""Fields of tokens that predict the next one."""

PLAN_FIELDS = (
    Field(name="position_ids", dtype="int64", split=True, stored=False),
    Field(name="sequence_ids", dtype="int32", split=True, pad=-1, stored=False),
    Field(name="padding_mask", dtype="bool", split=True, pad=1, stored=False),
    Field(name="cu_seqlens", dtype="int32", stored=False),
    Field(name="cu_seqlens_padded", dtype="int32", stored=False),
    Field(name="max_seqlen", dtype="int32", stored=False),
)
"""Fields of a pack computed from lengths alone; see `Documents` for their shapes."""

RUN_FIELDS = ("own_cu_seqlens", "continues")
"""Names of the fields that a pack has on every stage under cp_split="pack_contiguous", beside PLAN_FIELDS.

own_cu_seqlens int32 [pieces + 1]: where sequences, padded, begin in this rank's run, then its end.
continues bool []: whether the first piece continues a sequence of the rank before.
"""

COMPUTED = frozenset((*RUN_FIELDS, *(field.name for field in PLAN_FIELDS)))
"""Names of all that a pack has beside what is stored: nothing stored can have one of them."""

_APART = 64  # tokens: each pack begins at a multiple of 64 bytes, whatever a token takes


def fields_of_plan(portion: Portion, names: Sequence[str], allocate: Allocate) -> Arrays:
    """The named PLAN_FIELDS of a portion's one pack."""
    return fields_of_packs([portion], names, allocate)[0]


def fields_of_packs(portions: Sequence[Portion], names: Sequence[str], allocate: Allocate) -> list[Arrays]:
    """The named PLAN_FIELDS of each portion's one pack. One pass makes those of all of them."""
    made = [lengths_of_plan(portion, names) for portion in portions]
    places, num_tokens = places_of(portions)
    for same in zip(*(runs_of_plan(portion, names) for portion in portions)):
        field = same[0].field
        out = allocate((num_tokens,), field.dtype)
        RunField(field, runs_at(places, [each.runs for each in same]), same[0].step).write(out)
        for arrays, portion, place in zip(made, portions, places):
            arrays[field.name] = out[place : place + portion.num_tokens].reshape(1, portion.num_tokens)
    return made


def places_of(portions: Sequence[Portion]) -> tuple[list[int], int]:
    """Where each portion's one pack begins in a field of all of them, and the field's tokens."""
    *others, last = [portion.num_tokens for portion in portions]
    places = [0, *accumulate(-(-tokens // _APART) * _APART for tokens in others)]
    return places, places[-1] + last


def runs_at(places: Sequence[int], runs: Sequence[Runs]) -> Runs:
    """The runs of several packs, each in a field of its own, in a field of all of them; see `places_of`."""
    if len(runs) == 1:
        return runs[0]
    at = np.concatenate([each.at + place for each, place in zip(runs, places)])
    start, size = (np.concatenate([getattr(r, name) for r in runs]) for name in ("start", "size"))
    return Runs(at, start, size)


def runs_of_plan(portion: Portion, names: Sequence[str]) -> list[RunField]:
    """The named PLAN_FIELDS that cp splits, as runs."""
    own, at = portion.own_tokens
    positions = Runs(at, own.start - portion.starts[own.sequence], own.sizes)
    if portion.pack.tail:  # the dummy has positions, too
        positions = runs_at((0, 0), (positions, portion.tail_tokens))
    runs_and_steps = {
        "position_ids": (positions, 1),
        "sequence_ids": (Runs(at, own.sequence.astype(np.int64), own.sizes), 0),
        "padding_mask": (Runs(at, np.zeros_like(at), own.sizes), 0),
    }
    made: list[RunField] = []
    for field in PLAN_FIELDS:
        if field.name in names and field.split:
            made.append(RunField(field, *runs_and_steps[field.name]))
    return made


def table_of_pack(
    portion: Portion,
    columns: Columns | None,
    names: Sequence[str],
    fields: Sequence[RunField],
    ready: Arrays | None = None,
) -> FieldTable:
    """The named fields of a portion's one pack, PLAN_FIELDS among them.

    fields: the others that are runs. columns: that these follow; if None, only fields without a column are
    made. ready: the named ones that are no runs.
    """
    every, ready = [*fields, *runs_of_plan(portion, names)], lengths_of_plan(portion, names) | (ready or {})
    return table_of((1, portion.num_tokens), columns, names, every, [ready])


def lengths_of_plan(portion: Portion, names: Sequence[str]) -> Arrays:
    """The named PLAN_FIELDS that are the same on every cp rank; under pack_contiguous RUN_FIELDS too."""
    pack = portion.pack
    cu_seqlens, padded = pack.cu_seqlens, pack.cu_seqlens_padded
    longest = (padded[1:] - padded[:-1]).max(initial=0)
    if pack.max_sequences is not None:
        # the dummy, then entries without a token
        more, longest = pack.max_sequences + 2 - padded.size, pack.num_tokens
        cu_seqlens, padded = (np.append(ends, [ends[-1] + pack.tail] * more) for ends in (cu_seqlens, padded))
    elif not len(portion.draws):
        longest = portion.idle_tokens * pack.cp_size
        cu_seqlens, padded = np.zeros(2, np.int32), np.array([0, longest])
    arrays: Arrays = {
        "cu_seqlens": np.array(cu_seqlens, np.int32),
        "cu_seqlens_padded": np.array(padded, np.int32),
        "max_seqlen": np.array(longest, np.int32),
    }
    arrays = {name: array for name, array in arrays.items() if name in names}
    return arrays | (_own_run(portion) if portion.split == "pack_contiguous" else {})


def _own_run(portion: Portion) -> Arrays:
    """The RUN_FIELDS of a portion's one pack."""
    most, pieces = portion.pack.max_sequences, [portion.own, portion.tail]
    sizes = np.concatenate([piece.sizes for piece in pieces])
    first = np.concatenate([piece.start for piece in pieces])[:1]
    if not sizes.size:  # all ranks together have one padded sequence without a token
        sizes, first = np.array([portion.num_tokens]), np.array([portion.pack.cp_rank])
    ends = np.zeros((sizes.size if most is None else most + 1) + 1, np.int32)
    np.cumsum(sizes, out=ends[1 : sizes.size + 1])
    ends[sizes.size :] = portion.num_tokens
    return {"own_cu_seqlens": ends, "continues": np.array(first[0] > 0)}


def widened(table: FieldTable, copy: Callable[[Array], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `table.fields`, each [rows, tokens]; on every device equal to those of `built`.

    copy: array -> tensor on the device; called once for each column, and once for all tables.
    """
    table = table.cut()
    tables = _Tables(table, copy)
    columns = {name: _Column(array, copy) for name, array in table.columns.items()}
    made: dict[str, torch.Tensor] = {}
    for each in table.fields:
        runs = each.runs
        run, along = tables.place(runs.at)
        padding = along >= tables.of(runs.size)[run]
        value = tables.of(runs.start)[run]
        if each.step:
            value += along
        if each.column is not None:
            value = columns[each.column].values_at(value.masked_fill_(padding, 0))
        value.masked_fill_(padding, each.field.pad)
        made[each.field.name] = _converted(value, each.field.dtype).view(table.shape)
    return made


class _Tables:
    """The arrays of all runs on the device, moved there by one copy; arrays that fields share, once.

    Each gets a run of size 0 in front, which holds the padding before the first run.
    """

    def __init__(self, table: FieldTable, copy: Callable[[Array], torch.Tensor]) -> None:
        arrays: dict[int, Longs] = {}
        for runs in (each.runs for each in table.fields):
            arrays |= {id(array): array for array in (runs.at, runs.size, runs.start)}
        if arrays:
            flat = np.concatenate(
                [part for array in arrays.values() for part in ((0,), array)], dtype=np.int64
            )
            parts = copy(flat).split([array.size + 1 for array in arrays.values()])
            self._parts = dict(zip(arrays, parts))
            self._token = torch.arange(table.shape[0] * table.shape[1], device=parts[0].device)
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
        self._is_float, self._mask = flat.dtype.kind in "fc", None
        if flat.dtype.name in ("uint16", "uint32"):
            self._mask = np.iinfo(flat.dtype).max
        if flat.dtype.kind == "u" and flat.itemsize > 1:
            flat = flat.view(f"i{flat.itemsize}")
        self._values = copy(flat)

    def values_at(self, index: torch.Tensor) -> torch.Tensor:
        """The values at some indices; int64, or the column's own type of fractions, complex too."""
        values = self._values[index]
        if self._is_float:
            return values
        return values.long() if self._mask is None else values.long().bitwise_and_(self._mask)


def _converted(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Values in a field's type, wrapped around like NumPy's."""
    if dtype in ("uint16", "uint32", "uint64"):
        return values.to(getattr(torch, dtype.removeprefix("u"))).view(getattr(torch, dtype))
    return values.to(getattr(torch, dtype))
