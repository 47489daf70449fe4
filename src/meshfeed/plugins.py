"""What installed packages register under an entry-point group, meshfeed's own included."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from meshfeed.errors import OptionError

STORES = "meshfeed.stores"
TOKENIZERS = "meshfeed.tokenizers"
RULES = "meshfeed.rules"


@cache
def registered(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, ordered by name; nothing is imported.

    Raises OptionError if there are none, not even meshfeed's own.
    """
    found = sorted(entry_points(group=group), key=lambda each: each.name)
    if not found:
        raise OptionError(
            f"nothing is registered under {group}, not even by meshfeed: install meshfeed again, as "
            f"pip install -e . does in a checkout"
        )
    return tuple(found)


def named(group: str, name: str) -> Any:
    """What an entry point of a group names. Raises OptionError if there is none, or it cannot be imported."""
    points = {point.name: point for point in registered(group)}
    if name not in points:
        raise OptionError(f"{group}: nothing is registered as {name!r}; known: {', '.join(points)}")
    return loaded(points[name])


def remote_storage() -> Any:
    """The package `remote`, which reads objects: imported where a process first needs one."""
    return import_module("meshfeed.remote")


def loaded(point: EntryPoint) -> Any:
    """What an entry point names. Raises OptionError if it cannot be imported."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        package = "an installed package" if point.dist is None else point.dist.name
        raise OptionError(
            f"{point.group}: {point.name!r} of {package} cannot be imported: {error}; repair or remove "
            f"that package"
        ) from error
