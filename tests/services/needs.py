"""What some tests need of the machine: skipped where it is missing, but not where it was promised."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from meshfeed import native

PROMISED = "MESHFEED_SERVICES"
"""Environment variable; "required" says that .ci/services has installed everything."""


def needs(*programs: str) -> None:
    """Skip the test where a program is missing; fail it where continuous integration promised it."""
    missing = [program for program in programs if program_path(program) is None]
    if missing:
        missing_thing(f"{', '.join(missing)} not installed (sudo .ci/services installs it)")


def needs_root() -> None:
    """Skip the test where this process may not make users, mounts or network namespaces."""
    if os.geteuid() != 0:
        missing_thing("it needs root (sudo make test)")


def needs_compiled() -> None:
    """Skip the test where the loops are not compiled: it compares them with NumPy's."""
    if not native.is_compiled():
        missing_thing("the loops are not compiled (no C compiler, or MESHFEED_NATIVE=0)")


def checkout(name: str) -> Path:
    """The checkout of a project that is on no index: a folder of FRAMEWORK_SOURCES; skip the test without it."""
    folder = Path(os.environ.get("FRAMEWORK_SOURCES", ""), name)
    if "FRAMEWORK_SOURCES" not in os.environ or not folder.is_dir():
        pytest.skip(f"it needs a checkout of {name} (make frameworks FRAMEWORK_SOURCES=folder)")
    return folder.resolve()


def package(name: str, extra: str) -> None:
    """Skip the test where a package is missing that is too large for every environment of tests."""
    if find_spec(name) is None:
        pytest.skip(f"it needs {name} (pip install '.[{extra}]')")


def wheel(name: str) -> None:
    """Skip the test where a package is missing that has no wheel for this Python or machine."""
    if find_spec(name) is None:
        missing_thing(f"{name} has no wheel for {platform.machine()} and Python {platform.python_version()}")


@contextlib.contextmanager
def small_disk(disk: Path, size: str) -> Generator[None]:
    """A disk of this size, such as "1m", at a path until the body ends."""
    needs_root()
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@contextlib.contextmanager
def immutable(folder: Path) -> Generator[None]:
    """Nobody, not even root, may change what lies in a folder until the body ends."""
    needs_root()
    if subprocess.run(["chattr", "-R", "+i", str(folder)], capture_output=True).returncode:
        missing_thing(f"files at {folder} cannot be made immutable")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-R", "-i", str(folder)], check=True)


def missing_thing(what: str) -> NoReturn:
    """Skip, or fail where it was promised."""
    if os.environ.get(PROMISED) == "required":
        pytest.fail(f"{what}, but {PROMISED}=required")
    pytest.skip(what)


def program_path(program: str) -> str | None:
    """Where a program is, in the folders of the administrator too."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
