"""What a rank wrote to a run log, for tests of the core; `report` reads whole logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines_of(folder: Path, rank: int = 0) -> list[Any]:
    """All lines of its file: starts, steps and draws of a mixture."""
    return [json.loads(line) for line in (folder / f"rank-{rank:06d}.jsonl").read_text().splitlines()]


def steps_of(folder: Path, rank: int = 0) -> list[int]:
    """The numbers of its steps, of all starts; a start comes first."""
    start, *others = lines_of(folder, rank)
    assert "start" in start
    return [line[0] for line in others if isinstance(line, list)]
