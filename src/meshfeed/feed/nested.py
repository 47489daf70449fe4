"""Values that hold tensors inside: dicts, lists, tuples, namedtuples, dataclasses and SimpleNamespaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

Children = Sequence[tuple[Any, Any]]
"""(key, index or attribute name, value) of everything that a value holds."""


def children_of(value: Any) -> Children | None:
    """What a value holds; None if it is none of the kinds above, such as a tensor or a number."""
    kind = type(value)
    if kind is dict:
        return list(cast(dict[Any, Any], value).items())
    if kind in (list, tuple) or is_named(kind):
        return list(enumerate(value))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        names += [name for name in getattr(value, "__dict__", {}) if name not in names]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return list(vars(value).items()) if kind is SimpleNamespace else None


def made_of(kind: type, children: Children) -> Any:
    """The value of a kind that holds this. A dataclass's `__init__` and `__post_init__` are not called."""
    if kind is dict:
        return dict(children)
    if kind in (list, tuple):
        return kind(value for _, value in children)
    if is_named(kind):
        return kind(*(value for _, value in children))
    made = SimpleNamespace() if kind is SimpleNamespace else object.__new__(kind)
    for name, value in children:
        object.__setattr__(made, name, value)
    return made


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same value with `change(leaf)` in place of each leaf: of whatever holds nothing itself."""
    children = children_of(value)
    if children is None:
        return change(value)
    return made_of(type(value), [(key, changed(child, change)) for key, child in children])


def leaves_of(value: Any) -> Iterator[Any]:
    """Everything in a value that holds nothing itself, in order."""
    children = children_of(value)
    if children is None:
        yield value
    for _, child in children or ():
        yield from leaves_of(child)


def is_named(kind: type) -> bool:
    """Whether a type is a namedtuple."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
