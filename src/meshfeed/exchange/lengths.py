"""Which member has which items, and their sizes: exact integers, gathered once a step.

Each member reports its own items in one message:

    0   eight int64: magic, status, items, number of the first, owns, ended, bytes of the text, content
    64  a row of int64 per item: length, loss-bearing tokens, bytes of its unsplit keys, schema
        text: its schemas as JSON, or the cause of an error

A *schema* describes an item's keys: names, types, and the dimensions that items share.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import DeliveryError, PeerError, StoreError
from meshfeed.exchange.dtypes import item_bytes
from meshfeed.exchange.membership import Membership
from meshfeed.order import Draws

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]

ITEMS, ERROR, END = 0, 1, 2
LENGTH, VALID, REST, SCHEMA = 0, 1, 2, 3

_MAGIC = 0x5845534D
_HEADER = 64


@dataclass(frozen=True)
class Schema:
    """The keys of an item.

    Attributes:
        split: (name, dtype, shape of one token's entry) of keys with one entry per token.
        rest: (name, dtype, number of dimensions) of the others.
    """

    split: tuple[tuple[str, str, tuple[int, ...]], ...]
    rest: tuple[tuple[str, str, int], ...]

    @cached_property
    def entry_bytes(self) -> tuple[int, ...]:
        """Bytes of one token of each split key."""
        return tuple(int(np.prod(shape)) * item_bytes(dtype) for _, dtype, shape in self.split)

    @classmethod
    def from_json(cls, parsed: Any) -> Self:
        """A schema from parsed JSON of its two attributes."""
        split, rest = parsed
        return cls(
            tuple((str(name), str(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in split),
            tuple((str(name), str(dtype), int(ndim)) for name, dtype, ndim in rest),
        )


# usually equal for all members and steps
@lru_cache(maxsize=64)
def _text_of(schemas: tuple[Schema, ...]) -> bytes:
    return json.dumps([[schema.split, schema.rest] for schema in schemas], separators=(",", ":")).encode()


@lru_cache(maxsize=64)
def _schemas_of(text: bytes) -> tuple[Schema, ...]:
    parsed: Any = json.loads(text)
    return tuple(Schema.from_json(each) for each in parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One member's message about its items.

    Attributes:
        status: ITEMS; ERROR if it could not pull and ends; END if its loop has ended.
        first: number of its first item of this step, counted from the start of its iterator.
        rows: length, loss-bearing tokens, bytes of unsplit keys, schema of each item; int64 [n, 4].
        schemas: those that the last column refers to.
        owns: whether it has an iterator.
        ended: whether the iterator is exhausted.
        content: a digest of the items, from some of the numbers of their length key.
        cause: an encoded `deliver.ErrorRecord`, under ERROR.
    """

    status: int = ITEMS
    first: int = 0
    rows: Longs
    schemas: tuple[Schema, ...] = ()
    owns: bool = True
    ended: bool = False
    content: int = 0
    cause: bytes = b""

    @property
    def digest(self) -> str:
        """Equal for members that give the same items: lengths, loss-bearing tokens, content, end."""
        measured = np.ascontiguousarray(self.rows[:, [LENGTH, VALID]]).tobytes()
        text = f"{self.first} {self.ended} {self.content} {zlib.crc32(measured):x}"
        return f"{zlib.crc32(text.encode()):08x}"

    def encode(self) -> bytes:
        """The report as a message."""
        text = self.cause if self.status == ERROR else _text_of(self.schemas)
        head = [
            _MAGIC,
            self.status,
            len(self.rows),
            self.first,
            self.owns,
            self.ended,
            len(text),
            self.content,
        ]
        return np.array(head, np.int64).tobytes() + self.rows.astype(np.int64).tobytes() + text

    @classmethod
    def decode(cls, message: Bytes) -> tuple[Self, int]:
        """The report at the start of some bytes, and its size. Raises DeliveryError."""
        try:
            magic, status, count, first, owns, ended, size, content = (
                message[:_HEADER].view(np.int64).tolist()
            )
            start = _HEADER + 32 * count
            rows = np.frombuffer(message[_HEADER:start].tobytes(), np.int64).reshape(count, 4)
            text = message[start : start + size].tobytes()
            if magic != _MAGIC or min(count, size) < 0 or len(text) < size:
                raise ValueError(f"magic {magic:#x}, {count} items, {size} bytes of text")
            schemas = _schemas_of(text) if status != ERROR else ()
            if count and not (rows[:, SCHEMA].min() >= 0 and rows[:, SCHEMA].max() < len(schemas)):
                raise ValueError(f"{len(schemas)} schemas")
        except (ValueError, TypeError, RecursionError) as foreign:
            raise DeliveryError(
                f"not a report of lengths ({foreign}); do all ranks run one version?"
            ) from foreign
        cause = text if status == ERROR else b""
        return cls(
            status=status,
            first=first,
            rows=rows,
            schemas=schemas,
            owns=bool(owns),
            ended=bool(ended),
            content=content,
            cause=cause,
        ), start + size


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredLengths:
    """The items of a step, ordered by data-parallel rank.

    Attributes:
        lengths, valid: tokens and loss-bearing tokens of each item; int64 [n].
        rest_bytes: bytes of each item's unsplit keys; int64 [n].
        schema: index of each item's schema in `schemas`; int64 [n].
        schemas: the distinct schemas.
        draws: origin of each item: data-parallel rank, 0, number in its iterator.
        holders: members that hold the items of each data-parallel rank.
        short: data-parallel ranks whose iterator could not fill its part of the step.
        num_owners: number of data-parallel ranks with an iterator.
    """

    lengths: Longs
    valid: Longs
    rest_bytes: Longs
    schema: Longs
    schemas: tuple[Schema, ...]
    draws: Draws
    holders: tuple[tuple[int, ...], ...]
    short: tuple[int, ...]
    num_owners: int

    def __len__(self) -> int:
        return self.lengths.size

    @property
    def ended(self) -> bool:
        """Whether all iterators are exhausted."""
        return len(self.short) == self.num_owners

    @property
    def token_bytes(self) -> Longs:
        """Bytes of one token of each item, over all split keys; int64 [n]."""
        each = np.array([sum(schema.entry_bytes) for schema in self.schemas] or [0], np.int64)
        return each[self.schema]

    @classmethod
    def of(cls, reports: Sequence[Report], membership: Membership) -> Self:
        """Combine the members' reports.

        Raises PeerError if members of one data-parallel rank report different items, StoreError if a key has
        different types in different items, RoleError if no member has an iterator.
        """
        holders = membership.holders([report.owns for report in reports])
        schemas: dict[Schema, int] = {}
        parts: list[tuple[Longs, Longs, Longs, int]] = []
        for dp_rank, members in enumerate(holders):
            if not members:
                continue
            report = reports[members[0]]
            _refuse_different(reports, members, membership)
            schema_of = np.array(
                [schemas.setdefault(schema, len(schemas)) for schema in report.schemas], np.int64
            )
            number = report.first + np.arange(len(report.rows))
            parts.append((report.rows, schema_of[report.rows[:, SCHEMA]], number, dp_rank))
        rows = np.concatenate([part[0] for part in parts])
        gathered = cls(
            lengths=rows[:, LENGTH].copy(),
            valid=rows[:, VALID].copy(),
            rest_bytes=rows[:, REST].copy(),
            schema=np.concatenate([part[1] for part in parts]),
            schemas=tuple(schemas),
            draws=Draws(
                np.concatenate([np.full(len(part[0]), part[3], np.int32) for part in parts]),
                np.zeros(len(rows), np.int64),
                np.concatenate([part[2] for part in parts]),
            ),
            holders=holders,
            short=tuple(d for d, members in enumerate(holders) if members and reports[members[0]].ended),
            num_owners=len(parts),
        )
        _refuse_mixed(gathered, membership)
        return gathered

    @property
    def names(self) -> frozenset[str]:
        """The keys that any item has."""
        keys = [(*schema.split, *schema.rest) for schema in self.schemas]
        return frozenset(name for schema in keys for name, _, _ in schema)

    def item(self, index: int, membership: Membership) -> str:
        """An item, for error messages."""
        dp_rank = int(self.draws.source[index])
        rank = membership.ranks[self.holders[dp_rank][0]]
        return f"rank {rank}: item {self.draws.index[index]}"


def _refuse_different(reports: Sequence[Report], members: tuple[int, ...], membership: Membership) -> None:
    first, *others = members
    expected = reports[first].encode()
    differ = [membership.ranks[member] for member in others if reports[member].encode() != expected]
    if differ:
        raise PeerError(
            f"rank {membership.ranks[first]} and rank(s) {differ} have one data-parallel rank, but their "
            f"iterators gave items of different lengths, keys or tokens; give them the same items, or only "
            f"one of them an iterator",
            differ,
        )


def _refuse_mixed(gathered: GatheredLengths, membership: Membership) -> None:
    seen: dict[str, tuple[Any, int]] = {}
    for index, schema in enumerate(gathered.schemas):
        kinds: list[tuple[str, Any]] = [(name, (dtype, list(shape))) for name, dtype, shape in schema.split]
        kinds += [(name, (dtype,)) for name, dtype, _ in schema.rest]
        for name, kind in kinds:
            other, at = seen.setdefault(name, (kind, index))
            if other != kind:
                here, there = (int(np.flatnonzero(gathered.schema == p)[0]) for p in (index, at))
                raise StoreError(
                    f"{gathered.item(here, membership)}: key {name!r} is {kind}, but {other} in "
                    f"{gathered.item(there, membership)}; give it one type in all items of a step"
                )
