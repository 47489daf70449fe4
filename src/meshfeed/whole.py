"""Arguments as users give them: whole numbers of any library, other numbers, paths, values of a kind."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

_TAKES_ONE = re.compile(r"\bint\b|TokenId")


def whole(given: Any) -> Any:
    """An integer of any library as an int; anything else as it is, truth values too."""
    try:
        return given if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return given


def is_whole(given: Any, least: int = 1) -> bool:
    """Whether it is a 64-bit int of Python from `least` on, no truth value; ask what `whole` gives."""
    return type(given) is int and least <= given < 1 << 63


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


def whole_numbers(
    kind: type[Exception], least: int, /, *, optional: Sequence[str] = (), **given: Any
) -> tuple[Any, ...]:
    """Arguments as ints; `optional` ones may be None. Raises `kind` for no whole number, or one too small."""
    made = tuple(map(whole, given.values()))
    for name, value, was in zip(given, made, given.values()):
        if not is_whole(value, least) and not (value is None and name in optional):
            size = " of 64 bits" if type(value) is int and value > least else ""
            raise kind(f"{name}={was!r}: give a whole number{size}, {least} or more")
    return made


def is_number(given: Any) -> bool:
    """Whether it is a finite number of any library from 0 on, and no truth value."""
    try:
        return not isinstance(given, (bool, str, bytes)) and 0 <= float(given) < math.inf
    except (TypeError, ValueError, OverflowError):
        return False


def real(given: Any) -> float | None:
    """A number of any library as an int, since counts are whole, or as a float; None for what is none."""
    number = whole(given)
    try:
        if isinstance(given, (bool, str, bytes)) or str(getattr(given, "dtype", "")).endswith("bool"):
            return None
        return number if type(number) is int else float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch: of several elements
        return None


def of_kind(error: type[Exception], kind: type, /, **given: Any) -> None:
    """Raise `error` for an argument that is no `kind`."""
    for name, value in given.items():
        if not isinstance(value, kind):
            raise error(f"{name} is {_a(type(value))}, {value!r}; give {_a(kind)}")


def path_text(error: type[Exception], /, **given: Any) -> str:
    """One argument as the text of a path. Raises `error` for what is none."""
    ((name, value),) = given.items()
    try:
        found = os.fspath(value)
    except TypeError:
        found = None
    if not isinstance(found, str) or not found or "\0" in found:
        raise error(f"{name}={value!r}: give the path of a file or folder")
    return found


def _a(kind: type) -> str:
    name = kind.__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
