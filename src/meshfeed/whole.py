"""Whole numbers as users give them: of Python, NumPy, torch or any other library."""

from __future__ import annotations

import operator
import re
from dataclasses import fields
from typing import Any

_TAKES_ONE = re.compile(r"\bint\b")


def whole(given: Any) -> Any:
    """An integer of any library as an int; anything else as it is, truth values too."""
    try:
        return given if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return given


def is_whole(given: Any, least: int = 1) -> bool:
    """Whether it is an int of Python from `least` on, and no truth value; ask for what `whole` gives."""
    return type(given) is int and given >= least


def settle(options: Any) -> None:
    """Make integers of any library ints in a frozen dataclass, and in its tuples, before they are checked.

    Else a length of np.int64(8) would make another fingerprint than 8.
    """
    for each in fields(options):
        given = getattr(options, each.name, None)  # one that is derived may come later
        if given is None or type(given) is int or not _TAKES_ONE.search(str(each.type)):
            continue
        made = tuple(map(whole, given)) if type(given) is tuple else whole(given)
        object.__setattr__(options, each.name, made)


def whole_numbers(kind: type[Exception], least: int, /, **given: Any) -> tuple[Any, ...]:
    """Arguments as ints, None as it is. Raises `kind` for anything but whole numbers from `least` on."""
    made = tuple(map(whole, given.values()))
    for name, value, was in zip(given, made, given.values()):
        if value is not None and not is_whole(value, least):
            raise kind(f"{name}={was!r}: give a whole number, {least} or more")
    return made
