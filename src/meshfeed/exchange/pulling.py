"""Pulling from a user's iterator, step by step, and knowing where it stood after each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshfeed.deliver import Cause
from meshfeed.errors import StateError
from meshfeed.exchange.census import ERROR, Report
from meshfeed.exchange.items import Given, elements_of, encode, nothing
from meshfeed.exchange.keys import Keys

_MOST_BYTES = 2048


@dataclass(frozen=True, slots=True)
class _Pulled:
    """What was pulled for a step. state: of the iterator thereafter. taken: items so far."""

    given: Given
    state: Any
    taken: int
    ended: bool


class Puller:
    """One rank's iterator. Steps that were pulled ahead and not handed out are kept for the next run.

    Args:
        source: an iterable of items or lists of items; None gives none.
        pulls: elements per step.
    """

    def __init__(self, source: Iterable[Any] | None, keys: Keys, pulls: int) -> None:
        self._source, self._keys, self._pulls = source, keys, pulls
        self._iterator: Iterator[Any] | None = None
        self._pulled: dict[int, _Pulled] = {}
        self._taken, self._ended = 0, False

    @property
    def owns(self) -> bool:
        """Whether there is an iterator."""
        return self._source is not None

    def pull(self, step: int, rank: int, wanted: frozenset[str], handed_out: int) -> Given:
        """What this rank gives to a step; an error of the iterator as a report that tells it.

        wanted: see `encode`. handed_out: the first step that the loop has not been handed; those before the
        one before it are forgotten.
        """
        for old in [old for old in self._pulled if old < min(handed_out, step) - 1]:
            del self._pulled[old]
        if step not in self._pulled:
            if step - 1 not in self._pulled:  # a loop that is ahead of its first step has not been handed it
                self._keep(step - 1, nothing())
            try:
                self._keep(step, self._next(rank, wanted))
            except Exception as error:
                return _failed(error, rank, step, self._taken)
        return self._pulled[step].given

    def restart(self, step: int) -> None:
        """All iterators have ended before a step: whoever iterates again begins it with them anew."""
        self._pulled.pop(step, None)
        self._iterator, self._ended = None, False

    def state(self, step: int) -> dict[str, Any]:
        """Where the iterator stood before a step: its own state, items taken, whether it had ended."""
        after = self._pulled.get(step - 1)
        if after is None:
            return {"iterator": _state_of(self._source), "taken": self._taken, "ended": self._ended}
        return {"iterator": after.state, "taken": after.taken, "ended": after.ended}

    def load(self, saved: Mapping[str, Any]) -> int:
        """Stand where a state was taken; returns its step. Raises StateError."""
        try:
            version, step, taken, ended = (saved[name] for name in ("version", "step", "taken", "ended"))
            state = saved["iterator"]
        except (KeyError, TypeError) as bad:
            raise StateError(
                f"not a state of an exchange ({bad!r}); pass what state_dict() returned"
            ) from bad
        counts = version, step, taken
        if any(type(count) is not int or count < 0 for count in counts) or version != 1:
            raise StateError(f"state with version, step, taken = {counts}; this meshfeed reads version 1")
        if state is not None:
            if not hasattr(self._source, "load_state_dict"):
                raise StateError(
                    f"the state holds an iterator's own, but {type(self._source).__name__} has no "
                    f"load_state_dict; give the same kind of iterator"
                )
            self._source.load_state_dict(state)  # type: ignore
        self._iterator, self._pulled = None, {}
        self._taken, self._ended = taken, bool(ended)
        return step

    def _keep(self, step: int, given: Given) -> None:
        self._pulled[step] = _Pulled(given, _state_of(self._source), self._taken, self._ended)

    def _next(self, rank: int, wanted: frozenset[str]) -> Given:
        if self._source is None:
            return nothing()
        if self._iterator is None:
            self._iterator = iter(self._source)
        items: list[Mapping[str, Any]] = []
        for _ in range(self._pulls):
            try:
                items += elements_of(next(self._iterator)) if not self._ended else []
            except StopIteration:
                self._ended = True
        first, self._taken = self._taken, self._taken + len(items)
        return encode(items, self._keys, first=first, ended=self._ended, wanted=wanted, rank=rank)


def _state_of(source: Any) -> Any:
    return source.state_dict() if hasattr(source, "state_dict") else None


def _failed(error: Exception, rank: int, step: int, taken: int) -> Given:
    cause = Cause.of(error)
    if not cause.text.startswith("rank "):
        text = f"rank {rank}: its iterator failed at step {step}, after {taken} items: {cause.text}"
        cause = Cause(cause.kind, text, cause.ranks)
    told = cause.encode(_MOST_BYTES)
    return Given(Report(status=ERROR, rows=np.zeros((0, 4), np.int64), cause=told), ())
