"""docs/datasets.md: what it shows runs as it stands, one snippet after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/datasets.md"


def test_the_page_runs() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(snippets) == 5
    names: dict[str, Any] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["starts"].tolist()[0] == 0
    assert len(names["pictures"]) == len(names["microbatch"].draws)
    assert len(names["view"]) == 300 and len(names["first"]) == 4
    assert names["step"].valid_tokens > 0
