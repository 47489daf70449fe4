"""What had another name, or another place, in the last version: keyword arguments, and names of packages."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar, cast

from meshfeed.machine import Machine

P = ParamSpec("P")
R = TypeVar("R")

Moved = tuple[tuple[str, Any], ...]
"""The settings that an object was made with by old spellings: (new name, value) of each."""

_MOVED = "_moved"
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

    new_of_old: old name -> that of a Feed or its Machine. The `__init__` gets their values as `_moved`, which
    its signature does not show. It keeps that as an attribute, so that `dataclasses.replace` gives it again.
    Raises OptionError for what a Machine refuses.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(init)
        def call(*args: P.args, **given: P.kwargs) -> None:
            settings: dict[str, Any] = {
                new: given.pop(old) for old, new in new_of_old.items() if old in given
            }
            for old, new in new_of_old.items():
                if new in settings:
                    where = f"machine=mf.Machine({new}=...)" if new in _OF_MACHINE else f"{new}=..."
                    _warn(f"{old}= is an argument of the Feed now, {where}; meshfeed 0.5 refuses it here")
            if settings:
                Machine(**{name: settings[name] for name in _OF_MACHINE & settings.keys()})
                given[_MOVED] = tuple({**dict(cast(Moved, given.get(_MOVED, ()))), **settings}.items())
            init(*args, **given)

        shown = inspect.signature(init)
        kept = [each for each in shown.parameters.values() if each.name != _MOVED]
        cast(Any, call).__signature__ = shown.replace(parameters=kept)
        return call

    return decorate


def moved_settings(objects: Iterable[object]) -> dict[str, Any]:
    """The settings that objects were made with by old spellings, by their new names.

    Of several workers or item_timeout_s, the largest: all objects of a feed share its Machine.
    """
    found: dict[str, Any] = {}
    for each in objects:
        for name, value in cast(Moved, getattr(each, _MOVED, ())):
            larger = name in found and name in ("workers", "item_timeout_s")
            found[name] = max(found[name], value) if larger else value
    return found


def moved_names(
    old: str, names_of_new: Mapping[str, Iterable[str]], **new_of_old: str
) -> Callable[[str], Any]:
    """The `__getattr__` of a package that still gives names which others have now, and warns.

    old: the package. names_of_new: another, or itself -> its names; imported when one is asked for.
    new_of_old: an old name -> the new one, of those that differ.
    """
    new_of_name = {name: new for new, names in names_of_new.items() for name in names}

    def found(name: str) -> Any:
        if (new := new_of_name.get(name)) is None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        renamed = new_of_old.get(name, name)
        warn_of_old(f"{old}.{name}", f"{new}.{renamed}")
        return getattr(importlib.import_module(new), renamed)

    return found


def warn_of_old(old: str, new: str) -> None:
    """Tell the caller of a function that it was asked for by an old name."""
    warnings.warn(f"{old} is {new} now; meshfeed 0.5 refuses the old name", DeprecationWarning, stacklevel=3)


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=3)
