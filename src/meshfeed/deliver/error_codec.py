"""Errors as bytes: class, message, the ranks at fault, and where: path, rank, step, byte range.

Decoding creates classes of `meshfeed.errors` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from meshfeed import errors
from meshfeed.errors import DeliveryError, MeshfeedError, PeerError, VerifyError

_UNREADABLE = "a rank failed; its error message cannot be decoded"
_WHERE = ("path", "rank", "step", "range")


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error without its traceback.

    Attributes:
        kind: name of its class in `meshfeed.errors`; any other name means DeliveryError.
        text: its message.
        ranks: the ranks at fault, of a PeerError or VerifyError.
        where: its attributes path, rank, step and range, as far as they are known.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The record of an error. A class from outside meshfeed is named in the text."""
        known = errors.class_of(error)
        if known is None or not isinstance(error, MeshfeedError):
            return cls(DeliveryError.__name__, f"{type(error).__name__}: {error}")
        ranks = error.ranks if isinstance(error, PeerError | VerifyError) else ()
        where = {name: getattr(error, name) for name in _WHERE if getattr(error, name) is not None}
        return cls(known.__name__, str(error), tuple(ranks), where)

    def exception(self) -> MeshfeedError:
        kind = vars(errors).get(self.kind)
        if not (isinstance(kind, type) and issubclass(kind, MeshfeedError)):
            kind = DeliveryError
        if issubclass(kind, PeerError | VerifyError):
            return kind(self.text, self.ranks, **self.where)
        return kind(self.text, **self.where)

    def encode(self, max_bytes: int) -> bytes:
        """JSON of at most `max_bytes`. A long text, or a list of thousands of ranks, is truncated;
        a long path is left out."""
        text, ranks, where = self.text, self.ranks, dict(self.where)
        if len(json.dumps(where)) > max_bytes // 4:
            where.pop("path", None)
        while len(ranks_in_words(ranks)) > max_bytes // 2:
            ranks = ranks[: len(ranks) // 2]
        while True:
            record = [self.kind, text, ranks_in_words(ranks), where]
            encoded = json.dumps(record, ensure_ascii=False).encode(errors="replace")
            if len(encoded) <= max_bytes or not text:
                return encoded
            text = text[: len(text) - max((len(encoded) - max_bytes) // 4, 1)]

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Decode a record. Accepts any bytes: reporting an error must not fail."""
        try:
            record: Any = json.loads(encoded.decode(errors="replace"))
            kind, text, ranks, given = record
            where = {name: given[name] for name in _WHERE if name in given}
            if "range" in where:
                where["range"] = tuple(where["range"])
            return cls(str(kind), str(text), tuple(ranks_of_words(ranks)), where)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls(DeliveryError.__name__, _UNREADABLE)


def runs_of(ranks: Sequence[int]) -> list[list[int]]:
    """(0, 1, 2, 3, 8) -> [[0, 3], [8, 8]]: the first and last rank of each run."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def ranks_in_words(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 3, 8) -> "0:3-8": short even for thousands of ranks, and unique."""
    return "-".join(str(a) if a == b else f"{a}:{b}" for a, b in runs_of(ranks))


def ranks_of_words(words: str) -> list[int]:
    """The ranks that `ranks_in_words` wrote."""
    runs = [run.partition(":") for run in words.split("-") if run]
    return [rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1)]
