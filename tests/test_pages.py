"""The pages under docs/: what they show runs as it stands, one snippet after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf

DOCS = Path(__file__).parents[1] / "docs"


def run_page(name: str, expected: int) -> dict[str, Any]:
    """What the snippets of a page define."""
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S)
    assert len(snippets) == expected
    names: dict[str, Any] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, name, "exec"), names)
    return names


def test_datasets() -> None:
    names = run_page("datasets.md", 5)
    assert names["starts"].tolist()[0] == 0
    assert len(names["pictures"]) == len(names["microbatch"].draws)
    assert len(names["view"]) == 300 and len(names["first"]) == 4
    assert names["step"].valid_tokens > 0


def test_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("storage.md", 1)
    with mf.Feed(names["recipe"]) as feed:
        step = next(iter(feed))
        (microbatch, *_) = step.microbatches
        assert step.valid_tokens == 4 * 16 // 2, "every second label bears a loss"
        assert {"tokens", "labels", "loss_mask"} <= set(microbatch)
