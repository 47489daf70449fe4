"""Pulls items from a user's iterator step by step and records its state after each step."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset

from meshfeed.deliver import ErrorRecord
from meshfeed.errors import RecipeError, StateError, StoreError
from meshfeed.exchange.items import Digested, Given, elements_of, encode, failed, nothing
from meshfeed.exchange.keys import Keys
from meshfeed.feed.nested import changed
from meshfeed.state import sealed, unsealed

_ARRAYS: list[Any] = [
    np.array(()).__reduce__()[0],
    np.int64().__reduce__()[0],
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]
"""What torch.load(weights_only=True) needs for arrays and numbers of NumPy."""


@dataclass(frozen=True, slots=True)
class _Pulled:
    """The items of a step, and the iterator's state after it; see `ItemSource.state`."""

    given: Given
    state: Any
    taken: int
    pulled: int
    ended: bool


class ItemSource:
    """One rank's iterator. Steps pulled ahead and not handed out are kept for the next run.

    Args:
        source: an iterable of items or lists of items; None for a rank without one.
        pulls: elements per step.

    Attributes:
        busy: held while a producer uses the iterator.
    """

    def __init__(self, source: Iterable[Any] | None, keys: Keys, pulls: int) -> None:
        self._source, self._keys, self.pulls = source, keys, pulls
        self.busy = threading.Lock()
        self._pulling = threading.RLock()  # a run that was stopped may still wait for the iterator
        self._iterator: Iterator[Any] | None = None
        self._error = ""  # that it raised last, if it gave nothing since: a generator is at its end then
        self._pulled: dict[int, _Pulled] = {}
        # elements of an unfinished step; a retry begins with them
        self._waiting: list[Any] = []
        self._last = _Pulled(nothing(), None, 0, 0, False)
        self._end: int | None = None  # the step before which all have ended, and the loop does not know yet
        self._restarted: int | None = None  # the one before which they had, when they were restarted

    @property
    def owns(self) -> bool:
        """Whether there is an iterator."""
        return self._source is not None

    def pull(
        self, step: int, rank: int, wanted: frozenset[str], handed_out: int, *, digested: Digested = "some"
    ) -> Given:
        """The items that this rank gives to a step. If the iterator fails, the report carries its error.

        wanted, digested: see `encode`. handed_out: the first step not handed to the loop; steps before
        `handed_out` - 1 are discarded.
        """
        with self._pulling:
            for old in [old for old in self._pulled if old < handed_out - 1]:
                del self._pulled[old]
            if step not in self._pulled:
                if step - 1 not in self._pulled:  # keep the state before a run's first step
                    self._pulled[step - 1] = self._now()
                try:
                    self._last = self._pulled[step] = self._next(rank, wanted, digested)
                except Exception as error:
                    return _failed(error, rank, step, self._last.taken + _items_in(self._waiting))
                self._waiting = []
            return self._pulled[step].given

    def ends_before(self, step: int) -> None:
        """All iterators have ended before `step`."""
        self._end = step

    def handed_end(self, next_step: int) -> None:
        """The loop has received the end: iterating again restarts the iterators, from a state taken now, too.

        Not earlier: a rank that reads ahead meets the end before others, and a loop may break before it.
        next_step: the first that was not handed out: a virtual stage may lag behind one that is at its end.
        """
        if (step := self._end) is None or next_step < step:
            return
        self._pulled.pop(step, None)
        self._iterator, self._last = None, replace(self._last, pulled=0, ended=False)
        self._end, self._restarted = None, step
        last = self._pulled.get(step - 1, self._last)
        self._pulled[step - 1] = replace(self._now(), given=last.given)

    def state(self, step: int, owner: str) -> dict[str, Any]:
        """The step, and the position of the iterator before it.

        owner: whose iterator it is; "" without one. iterator: its own state. taken: items so far. pulled:
        elements since its start. ended: whether it had ended. Raises StateError for a state of the iterator
        that is neither JSON nor made of tensors, arrays, numbers and texts.
        """
        after = self._pulled.get(step - 1) or self._now()
        own = {"step": step, "taken": after.taken, "pulled": after.pulled, "ended": after.ended}
        return sealed({**own, "owner": owner, "iterator": _in_text(after.state)})

    def checked(self, saved: Mapping[str, Any], owner: str) -> dict[str, Any]:
        """What `state` had. Raises StateError for anything else, or if this iterator cannot resume there."""
        told = unsealed(saved, ("step", "taken", "pulled", "ended", "owner", "iterator"))
        if self.owns and told["owner"] != owner:
            raise StateError(
                f"the state is that of {told['owner'] or 'a rank without an iterator'}, and this is {owner}; "
                f"save each rank's state and load it there (torch.distributed.checkpoint keeps one object "
                f"for each key: use keys with the rank's number)"
            )
        for name in ("step", "taken", "pulled"):
            if type(told[name]) is not int or told[name] < 0:
                raise StateError(f"state has {name} {told[name]!r}; it is a whole number from 0")
        state = told["iterator"] = _of_text(told["iterator"])
        if state is not None and not hasattr(self._source, "load_state_dict"):
            raise StateError(
                f"the state holds the state of an iterator, but {type(self._source).__name__} has no "
                f"load_state_dict; give the same kind of iterator"
            )
        if state is None and self._source is not None and not self._has_kept(told):
            self._check_reaches(told["taken"], told["pulled"])
        return told

    def _has_kept(self, saved: Mapping[str, Any]) -> bool:
        """Whether all steps pulled since a state are kept, so the iterator need not go back to it."""
        after = self._pulled.get(saved["step"] - 1)
        there = after is not None and (after.taken, after.pulled) == (saved["taken"], saved["pulled"])
        before_end = self._restarted is None or saved["step"] < self._restarted
        return there and before_end and not _is_indexed(self._source)

    def _check_reaches(self, taken: int, pulled: int) -> None:
        """Check that an iterator without a state of its own can continue after `pulled` elements."""
        source: Any = self._source
        kind, last = type(source).__name__, self._last
        if _is_indexed(source):
            if len(source) < pulled:
                raise StateError(
                    f"the state was taken after {pulled} elements, and this {kind} has {len(source)}; give "
                    f"the same data"
                )
        elif not isinstance(source, Iterator) or _has_state(source):
            if pulled:
                raise StateError(
                    f"the state was taken after {pulled} elements of an iterator without a state_dict, and "
                    f"this {kind} would start from the beginning; give an iterator that is already at that "
                    f"position, or one with state_dict and load_state_dict"
                )
        elif (self._iterator or self._restarted is not None) and (taken, pulled) != (last.taken, last.pulled):
            raise StateError(
                f"the state was taken after {taken} items, and this {kind}, which cannot be reset, has given "
                f"{last.taken}; give a new Exchange an iterator that is already at that position, or one "
                f"with state_dict and load_state_dict"
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Resume at a checked state. No thread may be pulling."""
        if saved["iterator"] is None and self._has_kept(saved):
            return
        if saved["iterator"] is not None:
            self._source.load_state_dict(saved["iterator"])  # type: ignore
        self._iterator, self._pulled, self._waiting = None, {}, []
        self._end = self._restarted = None
        self._last = _Pulled(nothing(), None, saved["taken"], saved["pulled"], bool(saved["ended"]))

    def _now(self) -> _Pulled:
        """The iterator's state after the last step that was kept."""
        return replace(self._last, given=nothing(), state=_state_of(self._source))

    def _next(self, rank: int, wanted: frozenset[str], digested: Digested) -> _Pulled:
        taken, pulled, ended = self._last.taken, self._last.pulled, self._last.ended
        if self._source is None:
            return self._now()
        if self._iterator is None:
            self._iterator, self._error = _iterator_of(self._source, pulled + len(self._waiting)), ""
        while len(self._waiting) < self.pulls and not ended:
            try:
                element = next(self._iterator)
            except StopIteration:
                if self._error:
                    raise StoreError(f"it ended with {self._error}; give a new Exchange another") from None
                ended = True
            except BaseException as error:
                self._error = repr(error)
                if _is_indexed(self._source):
                    self._iterator = None  # a retry begins with this element
                raise
            else:
                self._error = ""
                may_change = self.pulls > 1 and not isinstance(self._source, (list, tuple))
                self._waiting.append(_own(element) if may_change else element)
        items = [item for element in self._waiting for item in elements_of(element)]
        given = encode(
            items, self._keys, first=taken, ended=ended, wanted=wanted, rank=rank, digested=digested
        )
        taken, pulled = taken + len(items), pulled + len(self._waiting)
        return _Pulled(given, _state_of(self._source), taken, pulled, ended)


def _is_indexed(source: Any) -> bool:
    """Whether it is a list or an indexed dataset, without a state of its own."""
    if isinstance(source, IterableDataset):  # its __getitem__ raises
        return False
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not _has_state(source)


def _has_state(source: Any) -> bool:
    return hasattr(source, "state_dict") or hasattr(source, "load_state_dict")


def _iterator_of(source: Any, at: int) -> Iterator[Any]:
    """An iterator over the elements; of an indexed source, from `at` on. Raises RecipeError for other
    types."""
    if _is_indexed(source) and (at or not hasattr(source, "__iter__")):
        return (source[index] for index in range(at, len(source)))
    if callable(source) and not hasattr(source, "__iter__"):
        name: str = getattr(source, "__name__", type(source).__name__)
        raise RecipeError(f"{name} is a function, not an iterator; pass what it returns: {name}(...)")
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise RecipeError(f"{type(source).__name__} is not an iterable of items; pass an iterator or a list")
    return iter(cast(Iterable[Any], source))


def _state_of(source: Any) -> Any:
    """A copy of its state: many iterators return a dict that they keep changing."""
    return copy.deepcopy(source.state_dict()) if hasattr(source, "state_dict") else None


def _in_text(state: Any) -> Any:
    """An iterator's state as JSON: itself, or else what torch.save makes of it, in a list."""
    with contextlib.suppress(RecursionError):
        if _is_json(state) and not isinstance(state, list):
            return state
    file = io.BytesIO()
    try:
        torch.save(state, file)
        made = [base64.b64encode(file.getvalue()).decode()]
        _of_text(made)
    except Exception as bad:  # whatever its classes raise
        raise StateError(
            f"the iterator's state_dict() gives what torch.load(weights_only=True) does not read ({bad!r}); "
            f"let it give tensors, arrays, numbers and texts"
        ) from bad
    return made


def _is_json(value: Any) -> bool:
    """Whether JSON gives it back as it is, with the very types."""
    if type(value) is dict:
        entries = cast(dict[Any, Any], value)
        return all(type(name) is str and _is_json(each) for name, each in entries.items())
    if type(value) is list:
        return all(map(_is_json, cast(list[Any], value)))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _of_text(told: Any) -> Any:
    if not isinstance(told, list):
        return told
    try:
        (text,) = cast(list[Any], told)
        with torch.serialization.safe_globals(_ARRAYS):
            return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as bad:  # of a hostile text, anything
        raise StateError(f"the iterator's state cannot be read ({bad!r}); load another checkpoint") from bad


def _own(element: Any) -> Any:
    """An element with copies of its arrays, as an iterator may fill the same ones again for the next."""
    if isinstance(element, Mapping):
        item = cast(Mapping[Any, Any], element)
        return {key: changed(value, _copied) for key, value in item.items()}
    if isinstance(element, Sequence) and not isinstance(element, (str, bytes)):
        return [_own(item) for item in cast(Sequence[Any], element)]
    return element


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, (np.ndarray, bytearray)) else leaf


def _items_in(elements: Iterable[Any]) -> int:
    """How many items these are, up to the first invalid element."""
    count = 0
    with contextlib.suppress(StoreError):
        for element in elements:
            count += len(elements_of(element))
    return count


def _failed(error: Exception, rank: int, step: int, taken: int) -> Given:
    record = ErrorRecord.of(error)
    if not record.text.startswith("rank "):
        text = f"rank {rank}: its iterator failed at step {step}, after {taken} items: {record.text}"
        record = replace(record, text=text, where={**record.where, "rank": rank, "step": step})
    return failed(error, record)
