"""docs/troubleshooting.md quotes messages as the source has them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import meshfeed

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SHARE = 0.4  # of a quoted line that one text of the source must spell out; the rest are its fields


@cache
def texts() -> list[tuple[int, tuple[str, ...]]]:
    """Every text of the source, as what stands between its fields, and how long that is."""
    found: set[tuple[str, ...]] = set()
    for path in Path(meshfeed.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            found.add(tuple(value.strip() for value in values if isinstance(value, str)))
    return [(sum(map(len, parts)), parts) for parts in found]


def is_known(line: str) -> bool:
    """Whether some text has all its parts in the line, in order, and they make up enough of it."""
    for length, parts in texts():
        if length >= SHARE * len(line):
            at = 0
            for part in parts:
                found = line.find(part, at)
                at = found + len(part) if found >= 0 and at >= 0 else -1
            if at >= 0:
                return True
    return False


def quoted() -> list[str]:
    blocks = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return [line for block in blocks for line in block.splitlines()]


def test_every_quoted_message_is_in_the_source() -> None:
    assert len(quoted()) > 30
    assert [line for line in quoted() if not is_known(line)] == []


def test_a_message_that_was_reworded_would_be_seen() -> None:
    for line in quoted():
        assert not is_known(line.replace(" ", "  "))
