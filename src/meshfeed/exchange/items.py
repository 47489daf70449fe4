"""Items of a user's iterator -> bytes."""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, cast

import numpy as np
import torch

from meshfeed.arrays import Array, Bytes, Longs
from meshfeed.deliver import Digester, ErrorRecord, wire
from meshfeed.errors import MeshfeedError, StoreError
from meshfeed.exchange.dtypes import BYTES, CARRIED
from meshfeed.exchange.keys import ANY, USUAL, Keys
from meshfeed.exchange.lengths import (
    LENGTH,
    NO_BYTES,
    NO_ROWS,
    REST,
    SCHEMA,
    VALID,
    MemberReport,
    Schema,
    columns_of,
    mixed,
)
from meshfeed.exchange.values import NAME_OF_TYPE, num_nonzero, value_of, whole_value_of
from meshfeed.intervals import numbered
from meshfeed.roles import Field
from meshfeed.sequence.table import COMPUTED

_Rest = tuple[tuple[str, str, int], ...]  # of a Schema
Digested = Literal["none", "some", "all"]
_WIDE = 16  # numbers of a token's entry in its digest
_SAMPLED = 64  # tokens of an item in its digest: all of them would cost as much as a checksum of the batch


@dataclass(frozen=True, slots=True)
class Given:
    """The items that one rank gives to a step.

    Attributes:
        report: the lengths and schemas that all members need.
        columns: their bytes: the unsplit keys of all items, one item after the other; then each split key
            that any item has, by name, of all items that have it; uint8.
        error: why there are none, for all ranks; its cause is this rank's own exception.
        digests: of all bytes of each declared key. Empty if nobody compares them.
    """

    report: MemberReport
    columns: tuple[Bytes, ...] = (NO_BYTES,)
    error: MeshfeedError | None = None
    digests: tuple[int, ...] = ()

    def message(self) -> wire.Message:
        """What the other members must know."""
        return wire.error_message(self.error) if self.error else wire.encode(columns_of([self.report]))


def encode(
    items: Iterable[Mapping[str, Any]],
    keys: Keys,
    *,
    first: int = 0,
    ended: bool = False,
    wanted: frozenset[str] | None = None,
    rank: int = 0,
    digested: Digested = "some",
) -> Given:
    """Measure items and encode them as bytes.

    first: number of the first item. ended: whether these are the last. wanted: the declared keys that any
    receiver needs; None for all. rank: the rank that gives them, for error messages. digested: what to
    digest of each declared key, because another rank may give the same items.
    Raises StoreError naming rank, item and key if the length key is missing, keys differ in their number of
    tokens, a type is not the declared one or that of the other items, or a value cannot be sent.
    """
    given = _Items(list(items), keys, f"rank {rank}: item", first)
    declared = keys.by_name()
    names = [name for name in given.names() if wanted is None or name in wanted or name not in declared]
    tokens = given.tokens()
    split = {
        name: tokens if name == keys.length else given.column(name, declared[name], tokens.sizes)
        for name in names
        if name in declared and declared[name].split
    }
    split = {name: column for name, column in split.items() if column.dtype != ANY}
    rest_bytes, kinds, rest = given.rest([name for name in names if name not in split])
    rows = np.zeros((len(given.items), 4), np.int64)
    rows[:, LENGTH] = rows[:, VALID] = tokens.sizes
    rows[:, REST] = rest_bytes
    if keys.valid is not None:
        rows[:, VALID] = given.num_valid(keys.valid, tokens.sizes)
    rows[:, SCHEMA], schemas = _schemas_of(split, kinds)
    columns = [_bytes_of(column.values) for column in split.values()]
    content = digests = ()
    if digested != "none":
        for field in keys.declared:
            if field.split and field.name not in split:
                split[field.name] = given.column(field.name, field, tokens.sizes)
        content = _content(split, keys)
    if digested == "all":
        digests = given.digests(split)
    report = MemberReport(first=first, rows=rows, schemas=schemas, ended=ended, content=content)
    return Given(report, (rest, *columns), digests=digests)


def nothing() -> Given:
    """The items of a rank without an iterator."""
    return Given(MemberReport(rows=NO_ROWS, owns=False))


def failed(error: Exception, record: ErrorRecord) -> Given:
    """No items, because of an error on this rank. record: what all ranks raise."""
    for_all = record.exception()
    for_all.__cause__ = error
    return Given(nothing().report, error=for_all)


def elements_of(element: Any) -> list[Mapping[str, Any]]:
    """An iterator's element as a list of items. Raises StoreError for anything but an item or a list of
    them."""
    if isinstance(element, Mapping):
        return [cast(Mapping[str, Any], element)]
    if isinstance(element, Sequence) and all(issubclass(kind, Mapping) for kind in set(map(type, element))):
        return list(cast(Sequence[Mapping[str, Any]], element))
    raise StoreError(
        f"the iterator gave {type(element).__name__}; give a dict of key -> array, or a list of them"
    )


@dataclass(frozen=True, slots=True)
class _TokenValues:
    """A key with one entry per token, of all items.

    Attributes:
        dtype: of all values; ANY if no item has the key.
        sizes: tokens of each item, -1 where it lacks the key; int64 [n].
        values: one item after the other; [tokens, ...].
    """

    dtype: str
    sizes: Longs
    values: Array


@dataclass(frozen=True, slots=True)
class _Items:
    """The items of a step, read key by key. where, first: the name and number of the first, for errors."""

    items: Sequence[Mapping[str, Any]]
    keys: Keys
    where: str
    first: int

    def wrong(self, at: int, what: object) -> StoreError:
        return StoreError(f"{self.where} {self.first + at}: {what}")

    def names(self) -> list[str]:
        """The keys of all items, sorted. Raises StoreError for one that is not a str."""
        names = set[Any]().union(*self.items)
        if odd := {name for name in names if not isinstance(name, str)}:
            at, item = next(each for each in enumerate(self.items) if not odd.isdisjoint(each[1]))
            raise self.wrong(at, f"keys {list(item)} are not all of type str; use names")
        return sorted(names)

    def tokens(self) -> _TokenValues:
        """The key that gives the length. Raises StoreError if an item lacks it or the key that marks loss."""
        for name in filter(None, (self.keys.length, self.keys.valid)):
            for at, item in enumerate(self.items):
                if item.get(name) is None:
                    there = sorted(str(each) for each, value in item.items() if value is not None)
                    raise self.wrong(
                        at, f"key {name!r} is missing, the item has only {there}; give it in every item"
                    )
        return self.column(self.keys.length, self.keys.by_name()[self.keys.length], None)

    def num_valid(self, name: str, lengths: Longs) -> list[int]:
        """Loss-bearing tokens of each item, by its key of this name."""
        values: list[Any] = [item[name] for item in self.items]
        for at, value in enumerate(values):
            if (size := math.prod(np.shape(value))) != lengths[at]:
                raise self._not_per_token(at, name, f"{size} entries", lengths)
        return [*map(num_nonzero, values)]

    def column(self, name: str, field: Field, lengths: Longs | None) -> _TokenValues:
        """A key with one entry per token. lengths: tokens of each item; None for the key that gives them."""
        values: list[Any] = [item.get(name) for item in self.items]
        at = [index for index, value in enumerate(values) if value is not None]
        found = _joined([values[index] for index in at], None if lengths is None else lengths[at])
        dtype, sizes, joined = found or self._one_by_one(name, values, at, lengths)
        if at and field.dtype not in (ANY, dtype):
            raise self.wrong(at[0], f"key {name!r} is {dtype}, declared {field.dtype}; make them equal")
        if at and dtype not in CARRIED and not field.pads(dtype):
            raise self.wrong(
                at[0],
                f"key {name!r} is {dtype}, which has no {field.pad:g}, its pad; give another type or pad",
            )
        of_all = np.full(len(values), -1)
        of_all[at] = sizes
        return _TokenValues(dtype, of_all, joined)

    def _one_by_one(
        self, name: str, values: Sequence[Any], at: Sequence[int], lengths: Longs | None
    ) -> tuple[str, Longs, Array]:
        """Type, sizes and values of a key in the items `at`, of any kind."""
        arrays: list[Array] = []
        kinds: list[tuple[str, list[int]]] = []
        for index in at:
            dtype, array = self.value(index, name, values[index])
            if lengths is None and array.ndim != 1:
                raise self._not_a_length(index, array.shape)
            if dtype == BYTES or not array.ndim:
                raise self._not_per_token(
                    index, name, "bytes" if dtype == BYTES else "a single number", lengths
                )
            if lengths is not None and array.shape[0] != lengths[index]:
                raise self._other_length(index, name, array.shape, lengths)
            arrays.append(array)
            kinds.append((dtype, list(array.shape[1:])))
            if kinds[-1] != kinds[0]:
                raise self.wrong(index, mixed(name, kinds[-1], kinds[0], f"item {self.first + at[0]}"))
        sizes = np.array([array.shape[0] for array in arrays], np.int64)
        return kinds[0][0] if kinds else ANY, sizes, np.concatenate(arrays) if arrays else NO_BYTES

    def rest(self, names: Sequence[str]) -> tuple[list[int], list[_Rest], Bytes]:
        """The keys that are not split: bytes and kinds of each item, and the bytes."""
        declared, length = self.keys.by_name(), self.keys.length
        num_bytes: list[int] = [0] * len(self.items)
        kinds: list[_Rest] = [()] * len(self.items)
        pieces = [NO_BYTES]
        for at, item in enumerate(self.items if names else ()):
            own: list[tuple[str, str, Array]] = []
            for name in names:
                if (value := item.get(name)) is None:
                    continue
                dtype, array = self.value(at, name, value, whole=name not in USUAL)
                field = declared.get(name)
                if name in COMPUTED:
                    near = difflib.get_close_matches(name, declared)
                    raise self.wrong(
                        at,
                        f"key {name!r} is computed from lengths; leave it out or rename it"
                        + (", or declare it in Keys, split" if name == "position_ids" else "")
                        + (f" (Keys has {near[0]!r})" if near else ""),
                    )
                if field is not None and field.dtype not in (ANY, dtype):
                    raise self.wrong(at, f"key {name!r} is {dtype}, declared {field.dtype}; make them equal")
                if field is None and name in USUAL and array.shape[:1] == np.shape(item[length])[:1]:
                    raise self.wrong(
                        at,
                        f"key {name!r} has one entry per token but is not declared, so it would not be "
                        f"split; add Field(name={name!r}, dtype={dtype!r}, split=True) to Keys, or the plain "
                        f"name for a list",
                    )
                own.append((name, dtype, array))
            if own:
                dims = np.array([n for _, _, array in own for n in array.shape], np.int64)
                mine = [dims.view(np.uint8), *(_bytes_of(array) for _, _, array in own)]
                pieces += mine
                num_bytes[at] = sum(map(len, mine))
                kinds[at] = tuple((name, dtype, array.ndim) for name, dtype, array in own)
        return num_bytes, kinds, np.concatenate(pieces)

    def digests(self, split: Mapping[str, _TokenValues]) -> tuple[int, ...]:
        """Of all bytes of each declared key. split: those with one entry per token."""
        digester = Digester([field.name for field in self.keys.declared])
        for name, column in split.items():
            if column.dtype != ANY:
                digester.add([{name: column.sizes}, {name: column.values}])
        for field in self.keys.declared:
            if not field.split and any(num_bytes := (rest := self.rest([field.name]))[0]):
                digester.add([{field.name: np.array(num_bytes)}, {field.name: rest[2]}])
        return tuple(digester.digests().tolist())

    def value(self, at: int, name: str, value: Any, *, whole: bool = False) -> tuple[str, Array]:
        """`value_of` a key of an item. whole: it is not split, and may be nested."""
        try:
            return whole_value_of(name, value) if whole else value_of(name, value)
        except StoreError as error:
            raise self.wrong(at, error) from None

    def _not_a_length(self, at: int, shape: tuple[int, ...]) -> StoreError:
        return self.wrong(
            at,
            f"key {self.keys.length!r} has shape {tuple(shape)}, but the key that gives the length has one "
            f"dimension; give a dict for each sequence (do not collate), or name a key with one number per "
            f"token as Keys(..., length=...)",
        )

    def _other_length(self, at: int, name: str, shape: tuple[int, ...], lengths: Longs) -> StoreError:
        has = f"{shape[0]} tokens"
        if shape[-1] == lengths[at]:
            has += f" (shape {tuple(shape)}: move the last axis to the front, x.movedim(-1, 0))"
        return self._not_per_token(at, name, has, lengths)

    def _not_per_token(self, at: int, name: str, has: str, lengths: Longs | None) -> StoreError:
        if lengths is None:
            return self.wrong(
                at,
                f"key {name!r} has {has}, but the key that gives the length has one number per token; "
                f"tokenize text in the iterator",
            )
        needs = f"{self.keys.length!r} {lengths[at]} tokens"
        return self.wrong(at, f"key {name!r} has {has}, {needs}; make them equal")


def _joined(values: list[Any], lengths: Longs | None) -> tuple[str, Longs, Array] | None:
    """Type, sizes and values, joined by torch; None unless all are tensors of one kind in host memory.

    lengths: tokens that they must have, or None; None for the key that gives them, which has one number each.
    """
    if set(map(type, values)) != {torch.Tensor}:
        return None
    if len({value.dtype for value in values}) > 1:  # torch.cat would convert some
        return None
    try:
        joined = torch.cat(values)
    except RuntimeError:  # single numbers, entries of several shapes, several devices
        return None
    is_flat = joined.ndim == 1  # then all are: torch.cat leaves out flat empty tensors beside others alone
    if not is_flat and (lengths is None or len({value.ndim for value in values}) > 1):
        return None
    if joined.layout != torch.strided or not joined.is_cpu or joined.dtype not in NAME_OF_TYPE:
        return None
    name, array = value_of("", joined)
    sizes = np.array([value.numel() if is_flat else value.shape[0] for value in values])
    return (name, sizes, array) if lengths is None or np.array_equal(sizes, lengths) else None


def _schemas_of(split: Mapping[str, _TokenValues], rest: Sequence[_Rest]) -> tuple[Longs, tuple[Schema, ...]]:
    """The schema of each item, by index, and all of them."""
    kinds = tuple((name, column.dtype, column.values.shape[1:]) for name, column in split.items())
    has = np.array([column.sizes >= 0 for column in split.values()], bool).reshape(len(split), len(rest))
    if has.all() and not any(rest):
        return np.zeros(len(rest), np.int64), (Schema(kinds, ()),) if rest else ()
    number: dict[tuple[bytes, _Rest], int] = {}
    index = [number.setdefault((own.tobytes(), other), len(number)) for own, other in zip(has.T, rest)]
    return np.array(index, np.int64), tuple(
        Schema(tuple(compress(kinds, np.frombuffer(own, bool))), other) for own, other in number
    )


def _bytes_of(array: Array) -> Bytes:
    return array.ravel().view(np.uint8)  # copies a view such as x[::2] or x.T


def _content(split: Mapping[str, _TokenValues], keys: Keys) -> tuple[int, ...]:
    """See `MemberReport.content`."""
    columns = [split[field.name] for field in keys.declared if field.split]
    return tuple(zlib.crc32(_some_of_each(each)) for each in columns)


def _some_of_each(column: _TokenValues) -> bytes:
    """Of evenly spaced tokens of each item, including its last one, the first numbers."""
    sizes, values = np.maximum(column.sizes, 0), column.values
    step = np.maximum(sizes // _SAMPLED, 1)
    counts = -(-sizes // step)
    of, turn = numbered(counts)
    found = values[np.cumsum(sizes)[of] - 1 - turn * step[of]]
    return found.reshape(len(found), math.prod(found.shape[1:]))[:, :_WIDE].tobytes()
