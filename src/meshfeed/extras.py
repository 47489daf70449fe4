"""Optional packages: those in meshfeed's metadata, their tested versions, and what installs missing ones.

The command names the packages themselves, since meshfeed is installed from a checkout or a wheel.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")


class Requirement(NamedTuple):
    """A package and its tested versions.

    Attributes:
        name: on the package index.
        least: the oldest version; "0" if any is good.
        below: the first version that is not tested; "" if there is no such bound.
    """

    name: str
    least: str
    below: str

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" + (f",<{self.below}" if self.below else "")


def requirements() -> dict[str, list[Requirement]]:
    """Extra -> its packages; "" for required packages."""
    needed: dict[str, list[Requirement]] = {}
    for text in _metadata():
        asked, _, marker = text.partition(";")
        name, extra = _NAME.match(asked), _EXTRA.search(marker)
        if name is not None:
            # Version specifiers come in any order: 'lightning<2.7,>=2.4'.
            least, below = (re.search(rf"{sign}\s*([\w.]+)", asked) for sign in (">=", "<(?!=)"))
            found = Requirement(name[0], least[1] if least else "0", below[1] if below else "")
            needed.setdefault(extra[1] if extra else "", []).append(found)
    return needed


def untested(extra: str) -> list[tuple[str, bool]]:
    """Packages of an extra that are newer than those tested: (a message, whether the major version is)."""
    found: list[tuple[str, bool]] = []
    for package in requirements().get(extra, []):
        version = version_of(package.name)
        if version is None or not package.below or numbers(version) < numbers(package.below):
            continue
        is_major = numbers(version)[0] > numbers(package.below)[0] or len(numbers(package.below)) == 1
        found.append((f"{package.name} {version} is not tested with meshfeed, '{package}' is", is_major))
    return found


def numbers(version: str) -> list[int]:
    """The numbers of a version, which compare as versions do: 2.13.0+cpu -> [2, 13], as 2.13 is the same."""
    found = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    while len(found) > 1 and found[-1] == 0:
        found.pop()
    return found


def version_of(package: str) -> str | None:
    """The installed version; None if the package is missing."""
    from importlib import metadata  # which a fetcher need not import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install(extra: str) -> str:
    """The command that installs the missing packages of an extra, or all if none is missing."""
    packages = requirements().get(extra, [])
    wanted = [each for each in packages if version_of(each.name) is None] or packages
    if not wanted:  # meshfeed is imported from source without being installed
        return f"in a checkout of meshfeed, pip install '.[{extra}]'"
    return " ".join(["pip install", *(f"'{each}'" for each in wanted)])


def _metadata() -> list[str]:
    from importlib import metadata

    try:
        return metadata.requires("meshfeed") or []
    except metadata.PackageNotFoundError:
        return []
