"""Samples: the items of user-defined datasets, with any fields.

In rows, the fields of a microbatch's items are stacked. Packed, their per-token fields are concatenated like
those of `Documents`, and context parallelism splits them. The dataset's values are sent; of split fields,
only the held slices.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Allocate, Array, Arrays, Columns, Longs
from meshfeed.datasets.mapped import NUMBERS, Item, Mapped, Refused
from meshfeed.errors import PlanError, RecipeError, StoreError
from meshfeed.mixture import Store
from meshfeed.order import Draws, EpochIndex, LeavesOut
from meshfeed.recipe import EpochTokens, Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rule import FindsDocuments
from meshfeed.sequence.runs import Located, Portion, Runs, places_among
from meshfeed.sequence.table import COMPUTED, PLAN_FIELDS, FieldTable, RunField, table_of_pack

Value = Array | bytes

ANY = "any"
"""The dtype of a field of any type: an array of numbers, or bytes."""


@dataclass(frozen=True, init=False, repr=False)
class Samples(FindsDocuments, LeavesOut):
    """A sequence is an item of a `Mapped`.

    Each argument is a name, a `Field`, or a dict of name -> dtype for several fields. What is no `Field` goes
    to all stages, unsplit; a plain name with its own dtype. A field's dtype is the NumPy name of its numbers,
    "bytes" or "any"; a value of another type is refused, never converted. Other keys of an item are ignored.

    In rows (`micro_batch_size` items): a field is [rows, ...] if its shapes agree in the microbatch, else a
    list of one array per item; byte strings are a list of bytes. A microbatch that the batch does not fill
    has fewer rows; without any row, each field is [].

    Packed (the stores have lengths, the Feed a `Packing`): a field with split=True has one number per token,
    [1, tokens of this cp rank], padded with its `pad`; any other is a list with one value per sequence of the
    pack. In addition there are position_ids, sequence_ids, padding_mask, cu_seqlens, cu_seqlens_padded and
    max_seqlen, as in `Documents`. Nothing is shifted: labels are an ordinary field.

    Tokens are counted by the stores' lengths; an item without a length counts as 1. `Mapped(valid=...)` gives
    the loss-bearing tokens, by default all. They are known for whole items: if the packing splits an item,
    its pieces share them; a truncated item is refused.

    Args:
        fields: at least one, with distinct names.
        packed: whether items are packed.

    Raises RecipeError for invalid fields.
    """

    declared: tuple[Field, ...]
    _packed: bool

    def __init__(self, *fields: Field | str | Mapping[str, str], packed: bool = False) -> None:
        declared = tuple(each for given in fields for each in _declared(given))
        _check(declared, packed)
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "_packed", packed)

    def __repr__(self) -> str:
        fields = [
            f"{f.name}: {f.dtype} {'+'.join(f.stages)}{f' split pad={f.pad:g}' * f.split}"
            for f in self.declared
        ]
        return f"Samples({', '.join(fields)}, packed={self.packed})"

    @property
    def packed(self) -> bool:
        return self._packed

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.declared + (PLAN_FIELDS if self.packed else ())

    @property
    def has_dummy_rows(self) -> bool:
        """False: a dataset does not say what a field without loss is, nor how large items are."""
        return False

    def num_sequences(self, store: Store) -> int:
        """Items in the store.

        Raises RecipeError unless it is a `Mapped`, with lengths if packed; and where a pack would lose what
        an item without tokens has.
        """
        if not isinstance(store, Mapped):
            raise RecipeError(f"Samples reads a mf.Mapped(dataset); {store!r} is not one")
        if self.packed and not store.has_lengths:
            raise RecipeError(f"Samples(packed=True) plans with lengths: give {store!r} its lengths=")
        beside = [field.name for field in self.declared if not field.split]
        if self.packed and beside and store.first_empty is not None:
            raise RecipeError(
                f"Samples(packed=True): item {store.first_empty} of {store!r} has no token by its lengths=, "
                f"so no pack would hold its {beside[0]!r}; give it a token, or leave it out of the dataset"
            )
        return store.num_documents

    def num_documents(self, store: Store) -> int:
        return self.num_sequences(store)

    def without(self, recipe: Recipe, draws: Draws, excluded: Mapping[int, Longs]) -> Located:
        """Excluded items have no token: no pack holds them. A microbatch of rows has fewer rows."""
        stored = self.lengths(recipe, draws)
        stored[places_among(draws, excluded)] = 0
        return Located(draws.source, draws.epoch, draws.index, np.zeros_like(stored), stored)

    def epoch_tokens(self, recipe: Recipe, source: int) -> EpochTokens:
        """By the store's lengths. Raises RecipeError for a store without."""
        store = cast(Mapped, recipe.sources[source])
        if not store.has_lengths:
            raise RecipeError(
                f"{self!r}: the tokens of {store!r} are not known beforehand; give it lengths=, or count in "
                f"sequences: Mixture(by='proportion')"
            )
        return super().epoch_tokens(recipe, source)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each item; 1 if the store has no lengths; int64 [n]."""
        if isinstance(draws, Located):
            return draws.stored
        lengths = np.zeros(len(draws), np.int64)
        for store, mine in _by_source(recipe, draws):
            lengths[mine] = store.lengths(draws.index[mine])
        return lengths

    @cached_property
    def can_weigh(self) -> bool:
        return any(field.name == "loss_mask" for field in self.fields)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Loss-bearing tokens of each piece; int64 [n]. Raises PlanError if they are unknown."""
        whole = self.lengths(recipe, draws)
        valid, stops = lengths.copy(), starts + lengths
        for store, mine in _by_source(recipe, draws):
            if not store.has_valid:
                continue
            of_item, size = store.valid_tokens(draws.index[mine]), np.maximum(whole[mine], 1)
            # 5 of 9 tokens in pieces of 3 3 3: up to each cut 0 1 3 5, hence 1 2 2; one piece of none
            ends = np.where(whole[mine], stops[mine], 1)
            valid[mine] = of_item * ends // size - of_item * starts[mine] // size
        self._refuse_truncated(recipe, draws, starts, stops, whole)
        return valid

    def _refuse_truncated(
        self, recipe: Recipe, draws: Draws, starts: Longs, stops: Longs, whole: Longs
    ) -> None:
        """Pieces of an item are adjacent; a piece that ends early without a successor was truncated."""
        goes_on = np.zeros(len(draws), np.bool_)
        goes_on[:-1] = starts[1:] == stops[:-1]
        for store, mine in _by_source(recipe, draws):
            cut = mine[(stops[mine] < whole[mine]) & ~goes_on[mine]]
            if store.has_valid and cut.size:
                raise PlanError(
                    f"{store}: item {draws.index[cut[0]]} is cut from {whole[cut[0]]} to "
                    f"{stops[cut[0]]} tokens, but valid= counts whole items only; truncate in the dataset, "
                    f"or set oversize='split' or 'drop'"
                )

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Bytes of the split columns; those of the others are unknown."""
        tokens = int(portion.read().sizes.sum())
        return tokens * sum(np.dtype(field.dtype).itemsize for field in self.declared if field.split)

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Let the stores' workers start."""
        for portion in portions:
            for store, mine in _by_source(recipe, portion.draws):
                store.announce(_places(portion.draws, mine))

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The declared fields of the portion's items; see the class for what is refused."""
        draws = portion.draws
        items: list[Item] = [{}] * len(draws)
        for store, mine in _by_source(recipe, draws):
            for place, item in zip(mine.tolist(), store.fetch(_places(draws, mine))):
                items[place] = item
        whole = self.lengths(recipe, draws)
        columns: dict[str, Array | list[Array] | list[bytes]] = {}
        for field in self.declared:
            values = [_value(recipe, draws, i, field, item) for i, item in enumerate(items)]
            _refuse_mixed(recipe, draws, field, values)
            if field.split:
                arrays = cast(list[Array], values)
                for i, array in enumerate(arrays):
                    _check_length(recipe, draws, i, field, array, int(whole[i]))
                columns[field.name] = _held_tokens(portion, field, arrays, allocate)
            else:
                columns[field.name] = _stacked(values)
        return columns

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        wanted = [field for field in self.declared if field.name in names and columns is not None]
        held = columns or {}
        if self.packed:
            split = [RunField(field, portion.runs(), 1, field.name) for field in wanted if field.split]
            ready: Arrays = {
                field.name: _copies(held[field.name], 0, len(portion.draws))
                for field in wanted
                if not field.split
            }
            return table_of_pack(portion, columns, names, split, ready)
        made: list[Arrays] = []
        for m, draws in enumerate(map(portion.draws_of, portion.microbatches)):
            start, stop = m * portion.rows, m * portion.rows + len(draws)
            made.append({f.name: _row_values(held[f.name], start, stop, allocate) for f in wanted})
        return FieldTable((0, 0), {}, [], made)


def _declared(given: Any) -> Iterator[Field]:
    """The fields of one argument. Raises RecipeError for an argument without fields."""
    if isinstance(given, Field):
        yield given
    elif isinstance(given, str):
        yield Field(name=given, dtype=ANY)
    elif isinstance(given, Mapping) and all(
        isinstance(text, str) for each in cast(Mapping[Any, Any], given).items() for text in each
    ):
        yield from (Field(name=name, dtype=dtype) for name, dtype in cast(Mapping[str, str], given).items())
    else:
        raise RecipeError(
            f"Samples({reprlib.repr(given)}): give names, mf.Field(name=..., dtype=...), or a dict of "
            f"name -> dtype, as mf.Samples({{'image': 'float32', 'label': 'int64'}})"
        )


def _check(declared: tuple[Field, ...], packed: bool) -> None:
    names = [field.name for field in declared]
    if not names or len(set(names)) < len(names):
        raise RecipeError(f"Samples(fields {names}): at least one, and each name once")
    taken = COMPUTED & set(names) if packed else set[str]()
    if taken:
        raise RecipeError(f"Samples: {sorted(taken)} are computed from lengths when packed; use other names")
    for field in declared:
        if field.dtype not in NUMBERS | {ANY, "bytes"}:
            raise RecipeError(
                f"field {field.name!r}: dtype {field.dtype!r}; choose a number's, 'bytes' or 'any'"
            )
        if field.split and (not packed or field.dtype not in NUMBERS):
            raise RecipeError(
                f"field {field.name!r} is split: it needs Samples(packed=True) and the dtype of its numbers"
            )
        if field.split and not field.pads(field.dtype):
            raise RecipeError(
                f"field {field.name!r}: {field.dtype} has no {field.pad:g}, its pad; give another type or pad"
            )
        if not field.stored:
            raise RecipeError(f"field {field.name!r} is not stored, but all fields of Samples are")


# -- what a dataset gave -----------------------------------------------------------------------------


def _value(recipe: Recipe, draws: Draws, i: int, field: Field, item: Item) -> Value:
    """A field of an item. Raises StoreError if it is missing or not of the declared type."""
    if field.name not in item:
        raise _bad(recipe, draws, i, f"has no {field.name!r}, only {sorted(item)}; give it in every item")
    value = item[field.name]
    if isinstance(value, Refused):
        raise _bad(recipe, draws, i, f"{field.name!r} {value.why}")
    if field.dtype not in (ANY, _type_of(value)):
        raise _bad(
            recipe, draws, i, f"{field.name!r} is {_type_of(value)}, declared {field.dtype}; make them equal"
        )
    return value


def _refuse_mixed(recipe: Recipe, draws: Draws, field: Field, values: list[Value]) -> None:
    for i, value in enumerate(values):
        if _type_of(value) != _type_of(values[0]):
            both = f"{_type_of(value)}, {_type_of(values[0])} in {_at(draws, 0)}"
            raise _bad(recipe, draws, i, f"{field.name!r} is {both}; give it one type in all items")


def _check_length(recipe: Recipe, draws: Draws, i: int, field: Field, array: Array, length: int) -> None:
    if array.shape != (length,):
        has = f"{array.size} tokens" if array.ndim == 1 else f"shape {list(array.shape)}"
        raise _bad(recipe, draws, i, f"{field.name!r} has {has}, lengths says {length}; make them equal")


def _bad(recipe: Recipe, draws: Draws, i: int, what: str) -> StoreError:
    source = int(draws.source[i])
    return StoreError(f"source {source}, {recipe.sources[source]}: {_at(draws, i)}: {what}")


def _type_of(value: Value) -> str:
    return "bytes" if isinstance(value, bytes) else value.dtype.name


def _at(draws: Draws, i: int) -> EpochIndex:
    return EpochIndex(int(draws.epoch[i]), int(draws.index[i]))


def _places(draws: Draws, mine: Longs) -> list[EpochIndex]:
    return [EpochIndex(e, i) for e, i in zip(draws.epoch[mine].tolist(), draws.index[mine].tolist())]


def _by_source(recipe: Recipe, draws: Draws) -> Iterator[tuple[Mapped, Longs]]:
    """(store, places of its draws), for each store that has any."""
    return ((cast(Mapped, recipe.sources[s]), mine) for s, mine, _ in draws.by_source())


# -- shapes ------------------------------------------------------------------------------------------


def _stacked(values: list[Value]) -> Array | list[Array] | list[bytes]:
    """One array if all shapes agree: a table entry for each small value would cost more than the value."""
    if not values or isinstance(values[0], bytes):
        return cast(list[bytes], values)
    arrays = cast(list[Array], values)
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays


def _copies(column: Any, start: int, stop: int) -> list[Array] | list[bytes]:
    """Copies of the values start..stop, independent of their buffer or dataset."""
    if stop > start and isinstance(column[start], bytes):
        return list(column[start:stop])
    return [np.array(column[i]) for i in range(start, stop)]


def _row_values(column: Any, start: int, stop: int, allocate: Allocate) -> Array | list[Array] | list[bytes]:
    if start == stop or isinstance(column[start], bytes):
        return list(column[start:stop])
    shapes = {np.shape(column[i]) for i in range(start, stop)}
    if len(shapes) > 1:
        return _copies(column, start, stop)
    out = allocate((stop - start, *shapes.pop()), column[start].dtype.name)
    for row, i in enumerate(range(start, stop)):
        out[row] = column[i]
    return out


def _held_tokens(portion: Portion, field: Field, arrays: list[Array], allocate: Allocate) -> Array:
    """The held slices of each item, concatenated; [held tokens]."""
    held = portion.read()
    tokens = allocate((int(held.sizes.sum()),), field.dtype)
    for i, array in enumerate(arrays):
        mine = np.flatnonzero(held.sequence == i)
        Runs(held.offsets[mine], held.start[mine], held.sizes[mine]).copy(array, tokens)
    return tokens
