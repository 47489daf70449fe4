"""The wordings that `phrases.py` counts only become fewer."""

from __future__ import annotations

import phrases


def test_no_page_docstring_or_message_adds_one() -> None:
    hits = phrases.found()
    assert len(hits) <= phrases.MOST, hits
