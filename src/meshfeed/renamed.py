"""Keyword arguments that had another name in the last version."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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
                warnings.warn(
                    f"{old}= is called {new}= now; the next version refuses the old name",
                    DeprecationWarning,
                    stacklevel=2,
                )
                given[new] = given.pop(old)
            return function(*args, **given)

        return call

    return decorate
