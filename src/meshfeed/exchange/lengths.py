"""Which member has which items, and their sizes: exact integers, gathered once a step.

Each member reports its own items in one message. A *schema* describes an item's keys: names, types, and the
dimensions that items share.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Self

import numpy as np

from meshfeed.arrays import Bools, Longs
from meshfeed.errors import PeerError, StoreError
from meshfeed.exchange.dtypes import entry_bytes
from meshfeed.exchange.membership import Membership
from meshfeed.intervals import numbered
from meshfeed.order import Draws

LENGTH, VALID, REST, SCHEMA = 0, 1, 2, 3
NO_ROWS = np.zeros((0, 4), np.int64)
NO_BYTES = np.zeros(0, np.uint8)


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
        return tuple(entry_bytes(dtype, shape) for _, dtype, shape in self.split)


# usually equal for all members and steps
@lru_cache(maxsize=64)
def _text_of(schemas: tuple[Schema, ...]) -> bytes:
    text = json.dumps([[schema.split, schema.rest] for schema in schemas], separators=(",", ":"))
    # so that many different schemas take little beside the 32 bytes of each item
    return zlib.compress(text.encode(), 1)


@lru_cache(maxsize=64)
def _schemas_of(text: bytes) -> tuple[Schema, ...]:
    return tuple(
        Schema(
            tuple((name, dtype, tuple(shape)) for name, dtype, shape in split),
            tuple((name, dtype, ndim) for name, dtype, ndim in rest),
        )
        for split, rest in json.loads(zlib.decompress(text))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One member's items of a step.

    Attributes:
        first: number of its first item of this step, counted from the start of its iterator.
        rows: length, loss-bearing tokens, bytes of unsplit keys, schema of each item; int64 [n, 4].
        schemas: those that the last column refers to.
        owns: whether it has an iterator.
        ended: whether the iterator is exhausted.
        content: a digest of each declared split key, from some of its numbers; 0 where no item has it.
            Empty if nobody compares them.
    """

    first: int = 0
    rows: Longs
    schemas: tuple[Schema, ...] = ()
    owns: bool = True
    ended: bool = False
    content: tuple[int, ...] = ()

    def equals(self, other: MemberReport) -> bool:
        """Whether both give the same items."""
        same = np.array_equal(self.rows, other.rows) and self.schemas == other.schemas
        return same and self.digest == other.digest and are_alike(self.content, other.content)

    @property
    def digest(self) -> str:
        """Equal for members that give the same items: lengths, loss-bearing tokens, end."""
        measured = np.ascontiguousarray(self.rows[:, [LENGTH, VALID]]).tobytes()
        text = f"{self.first} {self.ended} {zlib.crc32(measured):x}"
        return f"{zlib.crc32(text.encode()):08x}"


def are_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether no key that both have differs, by `MemberReport.content`."""
    return all(a == b or not a or not b for a, b in zip(one, other))


def columns_of(reports: Sequence[MemberReport]) -> dict[str, Any]:
    """Reports as columns, for a message: four arrays, since many small pieces would cost more."""
    texts = [_text_of(each.schemas) for each in reports]
    counts = [
        (each.first, each.owns, each.ended, len(each.content), len(each.rows), len(text))
        for each, text in zip(reports, texts)
    ]
    return {
        "counts": np.array(counts, np.int64),
        "content": np.array([*chain.from_iterable(each.content for each in reports)], np.int64),
        "rows": np.concatenate([each.rows for each in reports]),
        "schemas": np.frombuffer(b"".join(texts), np.uint8),
    }


def reports_of(columns: Mapping[str, Any]) -> list[MemberReport]:
    """The reports of a message."""
    reports: list[MemberReport] = []
    rows, texts, content = columns["rows"], columns["schemas"].tobytes(), columns["content"].tolist()
    row = at = key = 0
    for first, owns, ended, num_keys, num_rows, size in columns["counts"].tolist():
        report = MemberReport(
            first=first,
            rows=rows[row : row + num_rows],
            schemas=_schemas_of(texts[at : at + size]),
            owns=bool(owns),
            ended=bool(ended),
            content=tuple(content[key : key + num_keys]),
        )
        reports.append(report)
        row, at, key = row + num_rows, at + size, key + num_keys
    return reports


@dataclass(frozen=True, kw_only=True)
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
        ended: whether all iterators are exhausted.
    """

    lengths: Longs
    valid: Longs
    rest_bytes: Longs
    schema: Longs
    schemas: tuple[Schema, ...]
    draws: Draws
    holders: tuple[tuple[int, ...], ...]
    short: tuple[int, ...]
    ended: bool

    def __len__(self) -> int:
        return self.lengths.size

    @cached_property
    def token_bytes(self) -> Longs:
        """Bytes of one token of each item, over all split keys; int64 [n]."""
        each = np.array([sum(schema.entry_bytes) for schema in self.schemas], np.int64)
        return each[self.schema]

    def held_by(self, member: int) -> Bools:
        """Whether a member holds each item; bool [n]."""
        return np.array([member in held for held in self.holders])[self.draws.source]

    @cached_property
    def split_keys(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type, and shape of one token's entry, of each split key."""
        return {name: (dtype, shape) for schema in self.schemas for name, dtype, shape in schema.split}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The type of each key that any item has."""
        rest = {name: dtype for schema in self.schemas for name, dtype, _ in schema.rest}
        return rest | {name: dtype for name, (dtype, _) in self.split_keys.items()}

    @classmethod
    def of(cls, reports: Sequence[MemberReport], membership: Membership) -> Self:
        """Combine the members' reports.

        Raises PeerError if members of one data-parallel rank report different items, StoreError if a key has
        different types in different items, RoleError if no member has an iterator.
        """
        holders = membership.holders([report.owns for report in reports])
        given = {dp_rank: reports[members[0]] for dp_rank, members in enumerate(holders) if members}
        for members in filter(None, holders):
            _refuse_different(reports, members, membership)
        schemas: dict[Schema, int] = {}
        numbers = [[schemas.setdefault(each, len(schemas)) for each in one.schemas] for one in given.values()]
        columns = np.concatenate([report.rows for report in given.values()]).T.copy()
        of, turn = numbered(np.array([len(report.rows) for report in given.values()]))
        first = np.array([report.first for report in given.values()])
        before = np.cumsum([0, *map(len, numbers)])
        gathered = cls(
            lengths=columns[LENGTH],
            valid=columns[VALID],
            rest_bytes=columns[REST],
            schema=np.array([*chain(*numbers)], np.int64)[before[of] + columns[SCHEMA]],
            schemas=tuple(schemas),
            draws=Draws(np.array(list(given), np.int32)[of], np.zeros(of.size, np.int64), first[of] + turn),
            holders=holders,
            short=tuple(dp_rank for dp_rank, report in given.items() if report.ended),
            ended=all(report.ended for report in given.values()),
        )
        _refuse_mixed(gathered, membership)
        return gathered

    def item(self, index: int, membership: Membership) -> str:
        """An item, for error messages."""
        dp_rank = int(self.draws.source[index])
        rank = membership.ranks[self.holders[dp_rank][0]]
        return f"rank {rank}: item {self.draws.index[index]}"


def _refuse_different(
    reports: Sequence[MemberReport], members: tuple[int, ...], membership: Membership
) -> None:
    first, *others = members
    differ = [membership.ranks[member] for member in others if not reports[member].equals(reports[first])]
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
                    f"{gathered.item(here, membership)}: "
                    f"{mixed(name, kind, other, gathered.item(there, membership))}"
                )


def mixed(name: str, kind: object, other: object, where: str) -> str:
    """What is wrong with a key of two kinds. where: the item of the other kind."""
    return f"key {name!r} is {kind}, but {other} in {where}; give it one type in all items of a step"
