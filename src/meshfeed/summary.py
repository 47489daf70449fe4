"""Short texts that identify a recipe: digests, abbreviations, comparison."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any


def digest_of(summary: Mapping[str, Any]) -> str:
    """A hex digest of a recipe's summary, or other plain JSON; the same on every machine and Python."""
    text = json.dumps(dict(summary), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def brief(text: str) -> str:
    """A text of at most about 800 bytes of JSON; an abbreviated text carries its digest."""
    if len(json.dumps(text)) <= 802:
        return text
    # a character is up to 12 bytes of JSON
    start = next(text[:end] for end in range(720, 0, -10) if len(json.dumps(text[:end])) <= 722)
    return f"{start}... (in full: {_in_full(text)})"


def same_text(one: str, other: str) -> bool:
    """Whether two texts are the same in full, abbreviated or not."""
    return _in_full(one) == _in_full(other)


def _in_full(text: str) -> str:
    """The digest of the full text, 32 hex digits; an abbreviated text carries it."""
    abbreviated = re.fullmatch(r".*\.\.\. \(in full: ([0-9a-f]{32})\)", text, re.DOTALL)
    return abbreviated[1] if abbreviated else hashlib.sha256(text.encode()).hexdigest()[:32]
