"""Optional packages: which ones meshfeed's metadata names, and how to install those that are missing.

The hint names the packages themselves: meshfeed is installed from a checkout or a wheel, not from an index.
"""

from __future__ import annotations

import re
from importlib import metadata

_REQUIREMENT = re.compile(
    r"^([\w.-]+)(?:\[[^]]*\])?[^;]*?(?:>=([\w.]+))?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?$"
)


def requirements() -> dict[str, list[tuple[str, str]]]:
    """Extra -> its packages, each with its least version; "" for what meshfeed always needs."""
    needed: dict[str, list[tuple[str, str]]] = {}
    for text in _metadata():
        found = _REQUIREMENT.match(text)
        if found is not None:
            needed.setdefault(found[3] or "", []).append((found[1], found[2] or "0"))
    return needed


def version_of(package: str) -> str | None:
    """The version that is installed; None where none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install(extra: str) -> str:
    """The command that installs the packages of an extra that are missing, or all where none is."""
    packages = requirements().get(extra, [])
    wanted = [each for each in packages if version_of(each[0]) is None] or packages
    if not wanted:  # meshfeed is imported from its source without being installed
        return f"in a checkout of meshfeed, pip install '.[{extra}]'"
    return " ".join(["pip install", *(f"'{name}>={least}'" for name, least in wanted)])


def _metadata() -> list[str]:
    try:
        return metadata.requires("meshfeed") or []
    except metadata.PackageNotFoundError:
        return []
