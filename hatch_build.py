"""Compiles each loops.c of src/meshfeed for a wheel or an editable install, where there is a C compiler.

Without one, the wheel is a pure one. The libraries need only libc. Their wheel is tagged for the glibc whose
symbols it uses, 2.28 at least, and for no version of Python. CC names the compiler, of another machine too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "src/meshfeed"
SOURCES = [PACKAGE / name / "loops.c" for name in ("native", "multimodal", "integrations/megatron")]
_HEADER = PACKAGE / "native/heap.h"
# The same bits on every machine: no fast math, no fused multiply-add, no processor's own instructions.
# Without errno, a square root is one instruction and needs no libm.
FLAGS = (
    "-std=c11",
    "-O3",
    "-fno-fast-math",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-s",
)
_OLDEST_GLIBC = 28
_LINUX_NAMES = {"arm": "armv7l", "powerpc": "ppc", "powerpc64": "ppc64", "powerpc64le": "ppc64le"}


class Hook(BuildHookInterface):
    """Puts each library beside its source for an editable install, else into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            compile_in_place()
            return
        self._folder = tempfile.TemporaryDirectory()
        libraries = [compiled(source, Path(self._folder.name)) for source in SOURCES]
        made = [each for each in libraries if each is not None]
        if len(made) < len(SOURCES):
            return
        for source, library in zip(SOURCES, made):
            build_data["force_include"][str(library)] = (
                f"meshfeed/{source.parent.relative_to(PACKAGE)}/{library.name}"
            )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(made)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def library_name(source: Path, machine: str) -> str:
    """What meshfeed.native looks for on a machine; another name for every version of the source."""
    digest = hashlib.sha256(_HEADER.read_bytes() + source.read_bytes()).hexdigest()
    return f"loops-{digest[:16]}-{machine}.so"


def machine_of(triplet: str) -> str:
    """The machine of a compiler's triplet, as Linux and `platform.machine` call it."""
    machine = triplet.partition("-")[0]
    return _LINUX_NAMES.get(machine, machine)


def compile_in_place() -> list[Path]:
    """Compile each library beside its source, and remove older ones."""
    made: list[Path] = []
    for source in SOURCES:
        library = compiled(source, source.parent)
        if library is not None:
            machine = library.stem.rpartition("-")[2]
            for old in source.parent.glob(f"loops-*-{machine}.so"):
                if old != library:
                    old.unlink(missing_ok=True)
            made.append(library)
    return made


def compiled(source: Path, folder: Path) -> Path | None:
    """Compile a library into a folder; None where there is no compiler, or another libc."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if platform.libc_ver()[0] != "glibc" or shutil.which(compiler[0]) is None:
        return None
    try:
        machine = machine_of(_run([*compiler, "-dumpmachine"], source.parent))
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            made = Path(scratch) / library_name(source, machine)
            _run([*compiler, *FLAGS, "-o", str(made), source.name], source.parent)
            return made.replace(folder / made.name)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "")
        print(f"meshfeed is installed without its compiled loops: {error}\n{said}", file=sys.stderr)
        return None


def platform_of(libraries: list[Path]) -> str:
    """The wheel's platform tag: the newest glibc whose symbols the libraries use, and the machine."""
    held = b"".join(library.read_bytes() for library in libraries)
    used = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", held)}
    machine = libraries[0].stem.rpartition("-")[2]
    return f"manylinux_2_{max(used | {_OLDEST_GLIBC})}_{machine}"


def _run(words: list[str], folder: Path) -> str:
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    print(*compile_in_place() or ["no C compiler: NumPy's versions of the loops are used"])
