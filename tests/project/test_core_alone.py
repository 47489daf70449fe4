"""The core stands alone, with NumPy and torch: it is imported without the rings around it, and passes its tests."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import meshfeed
import quick
import world
from soak import only_soak

SOURCE, TESTS = Path(meshfeed.__file__).parent, Path(__file__).parents[1]
OUTER = ("cli", "formats", "integrations", "prepare", "processors", "report", "sinks", "__main__.py")
AROUND = (
    "datasets",
    "exchange",
    "losses",
    "masked",
    "multimodal",
    "parts",
    "remote",
    "simulation",
    "testing",
)
LAID_OUT = ("outer", "project")
"""Folders of tests that are not of the core alone."""
INSTALLED = ("numpy", "torch", "pytest", "pytest-timeout", "hypothesis")

STORAGE = {f"services.{name}" for name in ("azure", "faults", "hub", "nginx", "s3", "unhedged")}
"""Servers of remote storage, which obstore reads."""

BLOCKER = """
import sys

class WithoutBlocked:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [WithoutBlocked(finder) for finder in sys.meta_path]
"""


MODULES = """
import importlib
import meshfeed
import pytest

def test_every_module_is_imported_where_there_is_no_outer_circle():
    assert meshfeed.__file__.startswith(HERE)
    for name in CORE:
        importlib.import_module(name)
    for name in NONE:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
"""
"""What all others prove hangs on this."""


@cache
def needed(name: str) -> frozenset[str]:
    """A distribution and all that it requires, without extras."""
    found = {name}
    for text in metadata.requires(name) or []:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            try:
                found |= needed(re.sub(r"[-_.]+", "-", wanted.name).lower())
            except metadata.PackageNotFoundError:
                continue
    return frozenset(found)


def blocked() -> list[str]:
    """Modules of every other installed distribution."""
    allowed = set[str]().union(*(needed(name) for name in INSTALLED))
    return [
        module
        for module, owners in metadata.packages_distributions().items()
        if module != "meshfeed" and not {re.sub(r"[-_.]+", "-", each).lower() for each in owners} & allowed
    ]


def modules_of(path: Path) -> set[str]:
    """What a test file imports, by its whole name."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files_of_the_core() -> list[Path]:
    """Tests, and what they share."""
    return [each for each in sorted(TESTS.rglob("*.py")) if each.relative_to(TESTS).parts[0] not in LAID_OUT]


def reached(path: Path, helpers: dict[str, Path]) -> set[str]:
    """What a test file and the files that it shares with others import."""
    seen, ahead, found = set[Path](), [path], set[str]()
    while ahead:
        if (file := ahead.pop()) not in seen:
            seen.add(file)
            found |= (imported := modules_of(file))
            ahead += [helpers[name] for name in imported if name in helpers]
    return found


def of_numpy_and_torch_alone(paths: Iterable[Path]) -> list[Path]:
    """Tests that need no other package: not those with oracles, and with storage that obstore reads."""
    files = files_of_the_core()
    helpers = {each.stem: each for each in files}
    helpers |= {f"services.{each.stem}": each for each in files if each.parent.name == "services"}
    others = set(blocked())
    alone: list[Path] = []
    for path in paths:
        names = reached(path, helpers)
        needs_more = {name.partition(".")[0] for name in names} & others or names & STORAGE
        if not needs_more:
            alone.append(path)
    return alone


def test_tests_of_the_core_import_the_core_alone() -> None:
    outer = tuple(f"meshfeed.{name.removesuffix('.py')}" for name in OUTER)
    for path in files_of_the_core():
        wrong = [name for name in modules_of(path) if name.startswith(outer)]
        assert not wrong, f"{path.relative_to(TESTS)} imports {wrong}: it belongs in tests/outer"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the core, its metadata and its tests, and nothing of the outer circle."""
    folder = tmp_path_factory.mktemp("alone")
    ignored = shutil.ignore_patterns("__pycache__", *OUTER)
    shutil.copytree(
        SOURCE,
        folder / "src" / "meshfeed",
        ignore=lambda where, names: (
            ignored(where, names) if Path(where) == SOURCE else {"__pycache__"} & set(names)
        ),
    )
    shutil.copytree(TESTS, folder / "tests", ignore=shutil.ignore_patterns("__pycache__", *LAID_OUT))
    shutil.copytree(
        TESTS.parent / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(TESTS.parent / "pyproject.toml", folder)
    ours = metadata.distribution("meshfeed")
    about = folder / "src" / f"meshfeed-{ours.version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(ours.read_text("METADATA") or "")
    points = (ours.read_text("entry_points.txt") or "").splitlines()
    outer = tuple(f"meshfeed.{name}" for name in OUTER)
    kept = [line for line in points if not line.partition("=")[2].strip().startswith(outer)]
    (about / "entry_points.txt").write_text("\n".join(kept))
    core = [
        ".".join(path.relative_to(folder / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in (folder / "src" / "meshfeed").rglob("*.py")
    ]
    none = [f"meshfeed.{name.removesuffix('.py')}" for name in OUTER]
    none += ["obstore", "rich", "pyarrow", "tokenizers"]
    (folder / "tests" / "test_modules.py").write_text(
        f"HERE, CORE, NONE = {str(folder)!r}, {core}, {none}\n{MODULES}"
    )
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(f"BLOCKED = {set(blocked())!r}\n{BLOCKER}")
    return folder


def alone(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python that has the copy, NumPy and torch; so have all that it starts."""
    path = os.pathsep.join(str(folder / name) for name in ("hook", "src", "tests"))
    left_out = (quick.SHARED, world.SHARED, "MESHFEED_SOAK")  # its tests were soaked already
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = own | {
        "PYTHONPATH": path,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_core_is_imported_where_nothing_else_can_be() -> None:
    around = {f"meshfeed.{name.removesuffix('.py')}" for name in (*OUTER, *AROUND)}
    modules = (
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(SOURCE.rglob("*.py"))
    )
    core = [name for name in modules if ".".join(name.split(".")[:2]) not in around | {"meshfeed._examples"}]
    assert {"meshfeed.feed.feed", "meshfeed.store.dataset", "meshfeed.sequence.rule"} <= set(core)
    code = f"BLOCKED = {around | set(blocked())!r}\n{BLOCKER}\nimport importlib\n"
    code += f"for name in {core}:\n    importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]


@only_soak  # the contracts of imports, and the test above, say that they can
def test_the_core_passes_its_own_tests(copied: Path) -> None:
    tests = [path for path in files_of_the_core() if path.name.startswith("test_")]
    chosen = [path.relative_to(TESTS).as_posix() for path in of_numpy_and_torch_alone(tests)]
    words = [f"tests/{name}" for name in ("test_modules.py", *chosen)]
    done = alone(copied, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", *words)
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
