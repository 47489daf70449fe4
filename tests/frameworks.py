"""Run the tests of every framework with its newest version, and write the table of versions in docs/frameworks.md.

    make frameworks                              # in an environment of its own, .frameworks/
    make frameworks FRAMEWORK_SOURCES=folder     # and with the checkouts in that folder: torchtitan, Megatron-LM, ...
    make frameworks ROWS=torchtitan,verl         # only these: rows of one name, installed or from a checkout

A checkout's path goes in front of what is installed. Its tests get its folder from `services.needs.checkout`, and are
skipped elsewhere. A row that did not run keeps its line in the table; if any test fails, the table stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- versions: made by make frameworks -->\n", "<!-- end of versions -->"


@dataclass(frozen=True)
class Row:
    """A version of a framework, and its tests.

    Attributes:
        name: what the table calls it.
        tests: patterns of files below tests/; or what such files import, after "import ".
        package: the installed distribution whose version is shown, or several with spaces.
        checkout: its folder in FRAMEWORK_SOURCES, if it is tested from there.
        path: the folder to import from: of the checkout, or of the environment.
        beside: another checkout that it imports, if its tests do.
    """

    name: str
    tests: tuple[str, ...]
    package: str = ""
    checkout: str = ""
    path: str = ""
    beside: str = ""

    @property
    def selected_by(self) -> set[str]:
        """What ROWS= may call it."""
        return {self.name.partition(",")[0], *self.package.split(), *self.checkout.split()}


def _from(checkout: str, pattern: str, path: str = "", name: str = "", beside: str = "") -> Row:
    return Row(
        name or checkout, (f"outer/integrations/{pattern}",), checkout=checkout, path=path, beside=beside
    )


MEGATRON = ("import megatron",)
LIGHTNING = ("outer/integrations/test_lightning_*.py", "outer/integrations/test_loop_pages.py")
TITAN = ("outer/integrations/test_torchtitan_*.py", "outer/integrations/test_titan_lives.py")
TRANSFORMERS = ("outer/integrations/test_transformers_*.py", "outer/integrations/test_accelerate_*.py")
IMAGES = ("outer/integrations/test_vlm_trainers.py",)
ROWS = (
    Row("megatron-core, pinned", MEGATRON, "megatron-core", path="pinned"),
    Row("megatron-core", MEGATRON, "megatron-core"),
    Row("torchtitan", TITAN, "torchtitan"),
    Row("torchft", ("outer/integrations/test_torchft*.py",), "torchft"),
    Row("lightning", LIGHTNING + IMAGES, "lightning"),
    Row("transformers", TRANSFORMERS + IMAGES, "transformers"),
    Row("accelerate", TRANSFORMERS + IMAGES, "accelerate"),
    Row("datasets", ("outer/formats/test_arrow.py",), "datasets"),
    Row("huggingface_hub", ("outer/formats/test_hub.py",), "huggingface_hub"),
    Row("wandb and tensorboard", ("outer/metrics/test_boards.py",), "wandb tensorboard"),
    _from("Megatron-LM", "test_megatron_*peers.py", name="Megatron-LM's own tests"),
    _from("torchtitan", "test_torchtitan_*.py", name="torchtitan, main"),
    _from("Megatron-Bridge", "test_bridge*.py", path="src", beside="Megatron-LM"),
    _from("Automodel", "test_automodel*.py", name="NeMo Automodel"),
    _from("verl", "test_verl*.py"),
    _from("slime", "test_slime*.py"),
    _from("NeMo-RL", "test_nemo_rl*.py"),
)


def main() -> None:
    """Run the rows, print them, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where the environment is")
    parser.add_argument("--packages", action="store_true", help="only print what the rows have installed")
    parser.add_argument("--rows", default="", help="names of frameworks, with commas; all if empty")
    args = parser.parse_args()
    if args.packages:
        print(*sorted(packages()))
        return
    if args.folder is None:
        parser.error("name the folder of the environment")
    only = {name.strip() for name in args.rows.split(",") if name.strip()}
    names = set[str]().union(*(row.selected_by for row in ROWS))
    if only - names:
        parser.error(f"no row {', '.join(sorted(only - names))}: choose from {', '.join(sorted(names))}")
    found: dict[str, tuple[str, str]] = {}
    failed: list[str] = []
    for row in ROWS:
        if only and not only & row.selected_by:
            continue
        place = _place_of(row, args.folder)
        files = files_of(row)
        if place is None or not files:
            print(f"== {row.name}: {'no checkout' if place is None else 'no tests'}", flush=True)
            continue
        version = _version_of(row, place)
        print(f"== {row.name} {version}: {len(files)} files", flush=True)
        counts = run(files, _imports_of(row, place), args.folder)
        if counts["failed"] or not counts["passed"]:
            failed.append(row.name)
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        found[row.name] = version, f"{counts['passed']}{skipped}"
        print(f"   {counts['passed']} passed{skipped}, {counts['failed']} failed", flush=True)
    print(table(found))
    if not found:
        raise SystemExit("nothing ran: set FRAMEWORK_SOURCES to the folder with the checkouts")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")
    PAGE.write_text(with_table(PAGE.read_text(), found))


def packages() -> set[str]:
    """The distributions that rows show, of which `make frameworks` installs the newest."""
    return {package for row in ROWS for package in row.package.split()}


def files_of(row: Row) -> list[Path]:
    """The test files of a row; those that need a checkout are for checkouts alone."""
    found = sorted(_matching(row.tests))
    return [path for path in found if row.checkout or "import checkout" not in path.read_text()]


def run(files: Sequence[Path], first: Sequence[Path], folder: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped. first: folders to import from before all others."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    paths = [str(path) for path in (*first, ROOT / "src", os.environ.get("PYTHONPATH")) if path]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--numprocesses=2",
        "--dist=loadfile",
        "--no-loadscope-reorder",
    ]
    command += ["--durations=0", "--durations-min=1000", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    )
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    (suite,) = ET.parse(report).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    bad = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"passed": total - skipped - bad, "failed": bad, "skipped": skipped}


def table(found: dict[str, tuple[str, str]]) -> str:
    """Markdown: framework, version, tests passed."""
    lines = [f"| {name} | {version} | {passed} |" for name, (version, passed) in found.items()]
    return "\n".join(["| framework | version | tests passed |", "|---|---|---|", *lines]) + "\n"


def with_table(page: str, found: dict[str, tuple[str, str]]) -> str:
    """The page with these rows made again, in the order of ROWS."""
    before, _, rest = page.partition(BEGIN)
    kept, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page has no {BEGIN.strip()} ... {END}")
    told = {
        cells[0]: (cells[1], cells[2]) for cells in re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", kept, re.M)
    }
    told |= found
    return (
        before + BEGIN + table({row.name: told[row.name] for row in ROWS if row.name in told}) + end + after
    )


def _place_of(row: Row, folder: Path) -> Path | None:
    """The folder that a row imports from; None if a checkout is missing."""
    if not row.checkout:
        return folder / row.path
    sources = os.environ.get("FRAMEWORK_SOURCES")
    checkouts = [Path(sources or "", name) for name in (row.checkout, row.beside) if name]
    there = sources and all(checkout.is_dir() for checkout in checkouts)
    return (checkouts[0] / row.path).resolve() if there else None


def _imports_of(row: Row, place: Path) -> list[Path]:
    """The folders that a row imports from before all others."""
    beside = [Path(os.environ["FRAMEWORK_SOURCES"], row.beside).resolve()] if row.beside else []
    return [place, *beside] if row.path or row.checkout else []


def _version_of(row: Row, place: Path) -> str:
    """Of a package its version, of a checkout its commit and date."""
    if row.checkout:
        shown = ["git", "-C", str(place), "log", "-1", "--format=%h of %cs", "--abbrev=10"]
        return subprocess.run(shown, capture_output=True, text=True).stdout.strip() or "without a commit"
    where = [str(place)] if row.path else sys.path
    return ", ".join(
        next(found.version for found in distributions(name=package, path=where))
        for package in row.package.split()
    )


def _matching(tests: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    for test in tests:
        if test.startswith("import "):
            imports = re.compile(rf"^\s*(from|import) {test.removeprefix('import ')}\w*\b", re.M)
            found |= {path for path in TESTS.rglob("test_*.py") if imports.search(path.read_text())}
        else:
            found |= {*TESTS.glob(test)}
    return found


if __name__ == "__main__":
    main()
