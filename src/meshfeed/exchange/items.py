"""Items of a user's iterator -> bytes; arrays -> tensors of any torch type."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from meshfeed.columns import Array
from meshfeed.deliver import ErrorRecord, wire
from meshfeed.errors import MeshfeedError, StoreError
from meshfeed.exchange.dtypes import BYTES, CARRIED, carrier
from meshfeed.exchange.keys import ANY, RESERVED, USUAL, Keys
from meshfeed.exchange.lengths import LENGTH, VALID, Bytes, Longs, Report, Schema, columns_of
from meshfeed.roles import Field
from meshfeed.store import NUMBERS, Refused
from meshfeed.store.mapped import plain

_Kinds = tuple[tuple[tuple[str, str, tuple[int, ...]], ...], tuple[tuple[str, str, int], ...]]  # of a Schema
# rows of a Report, schemas, digest, bytes
_Measured = tuple[Longs, tuple[Schema, ...], int, tuple[Bytes, ...]]
_NOTHING = np.zeros(0, np.uint8)
_SAMPLED = 64  # numbers of an item in its digest: all of them would cost as much as a checksum of the batch
# complex types go through `plain`, which resolves torch's lazy conjugation
_NAME_OF_TYPE = {
    getattr(torch, name): name
    for name in (*NUMBERS, *CARRIED)
    if hasattr(torch, name) and "complex" not in name
}
_CARRIER_OF_TYPE = {name: getattr(torch, carrier(name)) for name in CARRIED}


@dataclass(frozen=True, slots=True)
class Given:
    """The items that one rank gives to a step.

    Attributes:
        report: the lengths and schemas that all members need.
        columns: their bytes: the unsplit keys of all items, one item after the other; then the same of the
            first split key of each item's schema, of the second, and so on; uint8.
        error: why there are none, for all ranks; its cause is this rank's own exception.
    """

    report: Report
    columns: tuple[Bytes, ...] = (_NOTHING,)
    error: MeshfeedError | None = None

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
) -> Given:
    """Measure items and encode them as bytes.

    first: number of the first item. ended: whether these are the last. wanted: the declared keys that any
    receiver needs; None for all. rank: the rank that gives them, for error messages.
    Raises StoreError naming rank, item and key if the length key is missing, keys differ in their number of
    tokens, or a type is not the declared one or cannot be sent.
    """
    listed, declared = list(items), keys.by_name()
    joined = _joined(listed, keys, declared, wanted)
    if joined is None:
        joined = _one_by_one(listed, keys, declared, wanted, first=first, rank=rank)
    rows, schemas, content, columns = joined
    return Given(Report(first=first, rows=rows, schemas=schemas, ended=ended, content=content), columns)


def nothing() -> Given:
    """The items of a rank without an iterator."""
    return Given(Report(rows=np.zeros((0, 4), np.int64), owns=False))


def failed(error: Exception, record: ErrorRecord) -> Given:
    """No items, because of an error on this rank. record: what all ranks raise."""
    told = record.exception()
    told.__cause__ = error
    return Given(nothing().report, error=told)


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


def _joined(
    items: Sequence[Mapping[str, Any]],
    keys: Keys,
    declared: Mapping[str, Field],
    wanted: frozenset[str] | None,
) -> _Measured | None:
    """What `_one_by_one` gives, in a fraction of its time: torch joins the values of each key.

    None unless all items have the same keys, all of them split, and each value is a tensor in host memory.
    None also if one is wrong, since only `_one_by_one` can name it.
    """
    names = items[0].keys() if items else set[str]()
    if keys.length not in names or keys.valid is not None or not names <= declared.keys():
        return None
    if any(item.keys() != names for item in items):
        return None
    sent = [name for name in sorted(names) if wanted is None or name in wanted]
    columns = {name: [item[name] for item in items] for name in (keys.length, *sent)}
    if not all(map(_can_join, columns.values())):
        return None
    sizes = np.array([[value.shape[0] for value in column] for column in columns.values()], np.int64)
    try:
        joined = {name: value_of(name, torch.cat(column)) for name, column in columns.items()}
    except (RuntimeError, StoreError):  # entries of several shapes, or of a type that cannot be sent
        return None
    tokens, lengths = joined[keys.length][1], sizes[0]
    if tokens.ndim != 1 or (sizes != lengths).any():
        return None
    if any(not declared[name].split or declared[name].dtype not in (ANY, joined[name][0]) for name in sent):
        return None
    rows = np.zeros((len(items), 4), np.int64)
    rows[:, LENGTH] = rows[:, VALID] = lengths
    schema = Schema(tuple((name, joined[name][0], joined[name][1].shape[1:]) for name in sent), ())
    flat = (np.ascontiguousarray(joined[name][1]).reshape(-1).view(np.uint8) for name in sent)
    return rows, (schema,), zlib.crc32(_some_of_each(tokens, lengths)), (_NOTHING, *flat)


def _can_join(values: Sequence[Any]) -> bool:
    """Whether all are plain tensors in host memory, of one type and number of dimensions."""
    if set(map(type, values)) != {torch.Tensor}:
        return False
    kinds = {(value.dtype, value.dim(), value.layout, value.is_cpu) for value in values}
    _, dimensions, *stored = kinds.pop()
    return not kinds and dimensions > 0 and stored == [torch.strided, True]


def _one_by_one(
    items: Sequence[Mapping[str, Any]],
    keys: Keys,
    declared: Mapping[str, Field],
    wanted: frozenset[str] | None,
    *,
    first: int,
    rank: int,
) -> _Measured:
    """Rows of the report, schemas, digest and bytes of items of any kind."""
    rows: list[tuple[int, int, int, int]] = []
    schemas: dict[_Kinds, int] = {}
    orders: dict[tuple[str, ...], list[tuple[str, Field | None]]] = {}  # most items have the same keys
    pieces: list[list[Bytes]] = []
    content = 0
    for number, item in enumerate(items, first):
        try:
            names = tuple(item)
            order = orders.get(names) or orders.setdefault(names, _order_of(names, declared, wanted))
            tokens, valid, kinds, own = _encoded(item, keys, order)
        except StoreError as error:
            raise StoreError(f"rank {rank}: item {number}: {error}") from None
        pieces.append(own)
        content = zlib.crc32(_some_of(tokens), content)
        rows.append((tokens.size, valid, own[0].size, schemas.setdefault(kinds, len(schemas))))
    table = np.array(rows, np.int64).reshape(len(rows), 4)
    columns = (
        np.concatenate([_NOTHING, *(own[k] for own in pieces if k < len(own))])
        for k in range(max(map(len, pieces), default=1))
    )
    return table, tuple(Schema(*kinds) for kinds in schemas), content, tuple(columns)


def _order_of(
    names: tuple[str, ...], declared: Mapping[str, Field], wanted: frozenset[str] | None
) -> list[tuple[str, Field | None]]:
    """The keys of an item that are sent, and how they are declared."""
    if not all(isinstance(name, str) for name in names):
        raise StoreError(f"keys {list(names)} are not all of type str; use names")
    unwanted = frozenset[str]() if wanted is None else declared.keys() - wanted
    return [(name, declared.get(name)) for name in sorted(names) if name not in unwanted]


def _encoded(
    item: Mapping[str, Any], keys: Keys, order: Sequence[tuple[str, Field | None]]
) -> tuple[Array, int, _Kinds, list[Bytes]]:
    """Tokens, loss-bearing tokens, schema, and bytes: of the unsplit keys, and of each split one."""
    for name in (keys.length, keys.valid):
        if name is not None and item.get(name) is None:
            there = sorted(str(each) for each, value in item.items() if value is not None)
            raise StoreError(f"key {name!r} is missing, the item has only {there}; give it in every item")
    length_value = value_of(keys.length, item[keys.length])
    if length_value[1].ndim != 1:
        raise StoreError(
            f"key {keys.length!r} has shape {length_value[1].shape}, but the key that gives the length has "
            f"one dimension; give a dict for each sequence (do not collate), or name a key with one number "
            f"per token as Keys(..., length=...)"
        )
    length = length_value[1].size
    split: list[tuple[str, str, tuple[int, ...]]] = []
    rest: list[tuple[str, str, int]] = []
    entries: list[Bytes] = []
    dims: list[int] = []
    others: list[Bytes] = []
    for name, field in order:
        value = item[name]
        if value is None:
            continue
        if name in RESERVED:
            raise StoreError(f"key {name!r} is computed from lengths; leave it out or rename it")
        dtype, array = length_value if name == keys.length else value_of(name, value)
        if field is not None and field.dtype not in (ANY, dtype):
            raise StoreError(f"key {name!r} is {dtype}, declared {field.dtype}; make them equal")
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # copies a view such as x[::2] or x.T
        if field is not None and field.split:
            if dtype == BYTES or array.shape[:1] != (length,):
                has = f"{array.shape[0]} tokens" if array.ndim else "a single number"
                has = "bytes" if dtype == BYTES else has
                raise StoreError(f"key {name!r} has {has}, {keys.length!r} {length} tokens; make them equal")
            split.append((name, dtype, array.shape[1:]))
            entries.append(flat)
        elif field is None and name in USUAL and array.shape[:1] == (length,):
            raise StoreError(
                f"key {name!r} has one entry per token but is not declared, so it would not be split; add "
                f"Field(name={name!r}, dtype={dtype!r}, split=True) to Keys, or the plain name for a list"
            )
        else:
            rest.append((name, dtype, array.ndim))
            dims += array.shape
            others.append(flat)
    whole = np.concatenate([np.array(dims, np.int64).view(np.uint8), *others]) if others else _NOTHING
    valid = length if keys.valid is None else num_nonzero(item[keys.valid])
    return length_value[1], valid, (tuple(split), tuple(rest)), [whole, *entries]


def value_of(name: str, value: Any) -> tuple[str, Array]:
    """(type, array that holds the bits) of a value. Raises StoreError for values that cannot be sent."""
    if isinstance(value, torch.Tensor):
        dtype = _NAME_OF_TYPE.get(value.dtype)
        if dtype is not None and value.layout == torch.strided:
            carried = _CARRIER_OF_TYPE.get(dtype)
            bits = value if carried is None else value.detach().resolve_neg().view(carried)
            return dtype, bits.numpy(force=True)
        value = value.detach().cpu()
    elif isinstance(value, np.ndarray) and value.dtype.name in CARRIED:  # from the ml_dtypes package
        return value.dtype.name, value.view(carrier(value.dtype.name))
    made = plain(value)
    if isinstance(made, Refused):
        raise StoreError(f"key {name!r} {made.why}")
    return (BYTES, np.frombuffer(made, np.uint8)) if isinstance(made, bytes) else (made.dtype.name, made)


def _some_of(tokens: Array) -> bytes:
    """Evenly spaced numbers of an item, including the last one."""
    return tokens[:: -max(tokens.size // _SAMPLED, 1)].tobytes()


def _some_of_each(tokens: Array, sizes: Longs) -> bytes:
    """`_some_of` each of the items that lie in `tokens` one after the other. sizes: of each; int64 [n]."""
    step = np.maximum(sizes // _SAMPLED, 1)
    counts = -(-sizes // step)
    turn = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return tokens[np.repeat(np.cumsum(sizes) - 1, counts) - turn * np.repeat(step, counts)].tobytes()


def num_nonzero(value: Any) -> int:
    """Number of nonzero entries."""
    if isinstance(value, np.ndarray):  # torch refuses negative strides
        return int(np.count_nonzero(value))
    return int(torch.count_nonzero(torch.as_tensor(value)))


def tensor_of(array: Array, dtype: str) -> torch.Tensor:
    """The tensor of type `dtype` whose bits an array holds."""
    return viewed_as(torch.from_numpy(array), dtype)


def viewed_as(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The same bits viewed as a type that NumPy lacks."""
    return tensor.view(getattr(torch, dtype)) if dtype in CARRIED else tensor


def bits_of(value: float, dtype: str) -> Any:
    """A NumPy scalar with the bits of a number of type `dtype`."""
    if dtype not in CARRIED:
        return np.array(value).astype(dtype)
    return torch.tensor([value], dtype=getattr(torch, dtype)).view(getattr(torch, carrier(dtype))).numpy()[0]
