"""Pulling from a user's iterator, step by step, and knowing where it stood after each."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
        self._waiting: list[
            Any
        ] = []  # elements of a step that is not kept yet; its next try begins with them
        self._taken, self._ended = 0, False
        self._anew: tuple[int, _Pulled] | None = None

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
                self._pulled[step - 1] = self._now(nothing())
            try:
                self._pulled[step] = self._now(self._next(rank, wanted))
            except Exception as error:
                return _failed(error, rank, step, self._taken)
            self._taken, self._waiting = self._pulled[step].taken, []
        return self._pulled[step].given

    def restart(self, step: int) -> None:
        """All iterators have ended before a step: whoever iterates again begins it with them anew."""
        self._pulled.pop(step, None)
        self._iterator, self._ended = None, False
        self._anew = step, self._now(nothing())

    def handed_end(self) -> None:
        """The loop has been handed the end: a state taken now is that of the iterators begun anew.

        Not before: who runs ahead has met the end sooner than others, and their states must agree.
        """
        if self._anew is not None:
            step, now = self._anew
            last = self._pulled.get(step - 1, now)
            self._pulled[step - 1] = replace(now, given=last.given)

    def state(self, step: int) -> dict[str, Any]:
        """Where the iterator stood before a step: its own state, items taken, whether it had ended."""
        after = self._pulled.get(step - 1)
        if after is None:
            return {"iterator": _state_of(self._source), "taken": self._taken, "ended": self._ended}
        return {"iterator": after.state, "taken": after.taken, "ended": after.ended}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raises StateError for what `state` of such an iterator did not give."""
        try:
            version, step, taken, _ = (saved[name] for name in ("version", "step", "taken", "ended"))
            state = saved["iterator"]
        except (KeyError, TypeError) as bad:
            raise StateError(
                f"not a state of an exchange ({bad!r}); pass what state_dict() returned"
            ) from bad
        counts = version, step, taken
        if any(type(count) is not int or count < 0 for count in counts) or version != 1:
            raise StateError(f"state with version, step, taken = {counts}; this meshfeed reads version 1")
        if state is not None and not hasattr(self._source, "load_state_dict"):
            raise StateError(
                f"the state holds an iterator's own, but {type(self._source).__name__} has no "
                f"load_state_dict; give the same kind of iterator"
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Stand where a checked state was taken. Nobody may be pulling."""
        if saved["iterator"] is not None:
            self._source.load_state_dict(copy.deepcopy(saved["iterator"]))  # type: ignore
        self._iterator, self._pulled, self._waiting, self._anew = None, {}, [], None
        self._taken, self._ended = saved["taken"], bool(saved["ended"])

    def _now(self, given: Given) -> _Pulled:
        """Where the iterator stands, having given this since the last step that was kept."""
        return _Pulled(given, _state_of(self._source), self._taken + len(given.encoded), self._ended)

    def _next(self, rank: int, wanted: frozenset[str]) -> Given:
        if self._source is None:
            return nothing()
        if self._iterator is None:
            self._iterator = iter(self._source)
        while len(self._waiting) < self._pulls and not self._ended:
            try:
                self._waiting.append(next(self._iterator))
            except StopIteration:
                self._ended = True
        items = [item for element in self._waiting for item in elements_of(element)]
        return encode(items, self._keys, first=self._taken, ended=self._ended, wanted=wanted, rank=rank)


def _state_of(source: Any) -> Any:
    """Its own copy: many iterators hand out the very dict that they go on changing."""
    return copy.deepcopy(source.state_dict()) if hasattr(source, "state_dict") else None


def _failed(error: Exception, rank: int, step: int, taken: int) -> Given:
    cause = Cause.of(error)
    if not cause.text.startswith("rank "):
        text = f"rank {rank}: its iterator failed at step {step}, after {taken} items: {cause.text}"
        cause = Cause(cause.kind, text, cause.ranks)
    told = cause.encode(_MOST_BYTES)
    return Given(Report(status=ERROR, rows=np.zeros((0, 4), np.int64), cause=told), ())
