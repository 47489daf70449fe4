"""Who has which items, and how large they are: exact integers, gathered once a step.

Each member reports on its own items in one message:

    0   eight int64: magic, status, items, number of the first, owns, ended, bytes of the text, content
    64  a row of int64 per item: length, loss-bearing tokens, bytes beside its tokens, schema
        text: its schemas as JSON, or the cause of an error

A *schema* is what an item's keys are: names, types and shapes, as far as items have them in common.
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
        """Bytes that one token has of each split key."""
        return tuple(int(np.prod(shape)) * item_bytes(dtype) for _, dtype, shape in self.split)

    @classmethod
    def from_json(cls, told: Any) -> Self:
        """Read what `json.dumps` of the two attributes gives."""
        split, rest = told
        return cls(
            tuple((str(name), str(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in split),
            tuple((str(name), str(dtype), int(ndim)) for name, dtype, ndim in rest),
        )


# All members tell the same, step after step.
@lru_cache(maxsize=64)
def _text_of(schemas: tuple[Schema, ...]) -> bytes:
    return json.dumps([[schema.split, schema.rest] for schema in schemas], separators=(",", ":")).encode()


@lru_cache(maxsize=64)
def _schemas_of(text: bytes) -> tuple[Schema, ...]:
    told: Any = json.loads(text)
    return tuple(Schema.from_json(each) for each in told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one member tells.

    Attributes:
        status: ITEMS; ERROR where it could not pull, and ends; END where its loop wants no more.
        first: number of its first item of this step, counted from the start of its iterator.
        rows: length, loss-bearing tokens, bytes beside tokens, schema of each item; int64 [n, 4].
        schemas: what the last column counts.
        owns: whether it has an iterator.
        ended: whether that has come to its end.
        content: a digest of what the items are, from some of the numbers of their length key.
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
        """What must be equal where others give the same items: lengths, loss-bearing tokens, content, end."""
        measured = np.ascontiguousarray(self.rows[:, [LENGTH, VALID]]).tobytes()
        told = f"{self.first} {self.ended} {self.content} {zlib.crc32(measured):x}"
        return f"{zlib.crc32(told.encode()):08x}"

    def encode(self) -> bytes:
        """The message."""
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
        """The report at the start of some bytes, and where it ends. Raises DeliveryError."""
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
                f"no report of lengths ({foreign}); is every rank of one version?"
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
    """The items of a step, those of data-parallel rank 0 first.

    Attributes:
        lengths, valid: tokens, and those that bear loss, of each item; int64 [n].
        rest_bytes: bytes of each item beside its split keys; int64 [n].
        schema: which of `schemas` each item has; int64 [n].
        schemas: without repetition.
        draws: where each item is from: data-parallel rank, 0, number in its iterator.
        holders: members that hold the items of each data-parallel rank.
        short: data-parallel ranks whose iterator could not fill its part of the step.
        num_owners: data-parallel ranks with an iterator.
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
        """Whether no iterator has more."""
        return len(self.short) == self.num_owners

    @property
    def token_bytes(self) -> Longs:
        """Bytes of one token of each item, all its split keys together; int64 [n]."""
        each = np.array([sum(schema.entry_bytes) for schema in self.schemas] or [0], np.int64)
        return each[self.schema]

    @classmethod
    def of(cls, reports: Sequence[Report], membership: Membership) -> Self:
        """Put the members' reports together.

        Raises PeerError where members of one data-parallel rank report different items, StoreError where a
        key is not of one type in all items, RoleError where no member has an iterator.
        """
        holders = membership.holders([report.owns for report in reports])
        schemas: dict[Schema, int] = {}
        parts: list[tuple[Longs, Longs, Longs, int]] = []
        for dp_rank, members in enumerate(holders):
            if not members:
                continue
            report = reports[members[0]]
            _refuse_different(reports, members, membership)
            places = np.array(
                [schemas.setdefault(schema, len(schemas)) for schema in report.schemas], np.int64
            )
            number = report.first + np.arange(len(report.rows))
            parts.append((report.rows, places[report.rows[:, SCHEMA]], number, dp_rank))
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

    def item(self, place: int, membership: Membership) -> str:
        """An item in words."""
        dp_rank = int(self.draws.source[place])
        rank = membership.ranks[self.holders[dp_rank][0]]
        return f"rank {rank}: item {self.draws.index[place]}"


def _refuse_different(reports: Sequence[Report], members: tuple[int, ...], membership: Membership) -> None:
    first, *others = members
    told = reports[first].encode()
    differ = [membership.ranks[member] for member in others if reports[member].encode() != told]
    if differ:
        raise PeerError(
            f"rank {membership.ranks[first]} and rank(s) {differ} are of one data-parallel rank, but their "
            f"iterators gave items of other lengths, keys or tokens; give all its ranks the same items, or "
            f"only one of them an iterator",
            differ,
        )


def _refuse_mixed(gathered: GatheredLengths, membership: Membership) -> None:
    seen: dict[str, tuple[Any, int]] = {}
    for place, schema in enumerate(gathered.schemas):
        kinds: list[tuple[str, Any]] = [(name, (dtype, list(shape))) for name, dtype, shape in schema.split]
        kinds += [(name, (dtype,)) for name, dtype, _ in schema.rest]
        for name, kind in kinds:
            other, at = seen.setdefault(name, (kind, place))
            if other != kind:
                here, there = (int(np.flatnonzero(gathered.schema == p)[0]) for p in (place, at))
                raise StoreError(
                    f"{gathered.item(here, membership)}: key {name!r} is {kind}, but {other} in "
                    f"{gathered.item(there, membership)}; give it one type in all items of a step"
                )
