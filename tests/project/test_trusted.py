"""The table of what must be trusted is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshfeed

SOURCE = Path(meshfeed.__file__).parent
ROOT = Path(__file__).parents[2]
TABLE = re.search(
    r"<!-- trusted: .*?-->(.*)<!-- end of trusted -->", (ROOT / "docs" / "design.md").read_text(), re.DOTALL
)
ROWS = [line.strip("|").split("|") for line in (TABLE[1] if TABLE else "").strip().splitlines()[2:]]


def lines_of(path: Path) -> int:
    files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.[ch]")]
    assert files, f"{path} is on the page and nowhere else"
    return sum(file.read_text().count("\n") for file in files if "_examples" not in file.parts)


@pytest.mark.parametrize("row", range(5))
def test_the_lines_that_must_be_trusted(row: int) -> None:
    """Within 5 %: `python tests/project/test_trusted.py` prints them."""
    question, files, told = ROWS[row]
    assert abs(lines_in(files) - int(told.replace(",", ""))) <= 0.05 * lines_in(files), question


def lines_in(files: str) -> int:
    """The lines of the files that a row names; of all others, if it says "all but"."""
    named = sum(lines_of(SOURCE / name) for name in re.findall(r"`([^`]+)`", files))
    return lines_of(SOURCE) - named if "all but" in files else named


if __name__ == "__main__":
    for question, files, _ in ROWS:
        print(f"{lines_in(files):7,} {question}")
