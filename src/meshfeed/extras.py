"""Optional packages: those in meshfeed's metadata, and the command that installs missing ones.

The command names the packages themselves, since meshfeed is installed from a checkout or a wheel.
"""

from __future__ import annotations

import re
from importlib import metadata

_REQUIREMENT = re.compile(
    r"^([\w.-]+)(?:\[[^]]*\])?[^;]*?(?:>=([\w.]+))?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?$"
)


def requirements() -> dict[str, list[tuple[str, str]]]:
    """Extra -> its packages, each with its minimum version; "" for required packages."""
    needed: dict[str, list[tuple[str, str]]] = {}
    for text in _metadata():
        found = _REQUIREMENT.match(text)
        if found is not None:
            needed.setdefault(found[3] or "", []).append((found[1], found[2] or "0"))
    return needed


def version_of(package: str) -> str | None:
    """The installed version; None if the package is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install(extra: str) -> str:
    """The command that installs the missing packages of an extra, or all if none is missing."""
    packages = requirements().get(extra, [])
    wanted = [each for each in packages if version_of(each[0]) is None] or packages
    if not wanted:  # meshfeed is imported from source without being installed
        return f"in a checkout of meshfeed, pip install '.[{extra}]'"
    return " ".join(["pip install", *(f"'{name}>={least}'" for name, least in wanted)])


def _metadata() -> list[str]:
    try:
        return metadata.requires("meshfeed") or []
    except metadata.PackageNotFoundError:
        return []
