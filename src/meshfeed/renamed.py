"""Keyword arguments that had another name, or another place, in the last version."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from meshfeed.machine import Machine

P = ParamSpec("P")
R = TypeVar("R")

_MOVED = "_moved_settings"
_OF_MACHINE = {each.name for each in fields(Machine)}


def renamed(**new_of_old: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that still takes the old names of its keyword arguments, with a DeprecationWarning.

    new_of_old: old name -> new name. The function raises TypeError if it is given both.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            for old in new_of_old.keys() & given.keys():
                new = new_of_old[old]
                if new in given:
                    raise TypeError(f"{old}= is the old name of {new}=; leave {old}= out")
                _warn(f"{old}= is called {new}= now; meshfeed 0.5 refuses the old name")
                given[new] = given.pop(old)
            return function(*args, **given)

        return call

    return decorate


def moved(**new_of_old: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """For an `__init__` that still takes arguments which a Feed has now, with a DeprecationWarning.

    new_of_old: old name -> that of a Feed or its Machine. `moved_settings` finds the values; an attribute of
    the object that has the new name gets its value.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(init)
        def call(*args: P.args, **given: P.kwargs) -> None:
            settings = {new: given.pop(old) for old, new in new_of_old.items() if old in given}
            for old, new in new_of_old.items():
                if new in settings:
                    where = f"machine=mf.Machine({new}=...)" if new in _OF_MACHINE else f"{new}=..."
                    _warn(f"{old}= is an argument of the Feed now, {where}; meshfeed 0.5 refuses it here")
            init(*args, **given)
            if settings:
                own = {new: value for new, value in settings.items() if hasattr(args[0], new)}
                for name, value in {**own, _MOVED: settings}.items():
                    object.__setattr__(args[0], name, value)

        return call

    return decorate


def moved_settings(objects: Iterable[object]) -> dict[str, Any]:
    """The settings that objects were made with by old spellings, by their new names."""
    found: dict[str, Any] = {}
    for each in objects:
        found |= getattr(each, _MOVED, {})
    return found


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=3)
