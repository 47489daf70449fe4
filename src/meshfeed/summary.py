"""What decides a stream, as short texts: digested, abbreviated, compared."""

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
    """A line of at most some 800 bytes of JSON that still tells two long ones apart."""
    if len(json.dumps(text)) <= 802:
        return text
    # a character is up to 12 bytes of JSON
    start = next(text[:end] for end in range(720, 0, -10) if len(json.dumps(text[:end])) <= 722)
    return f"{start}... (in full: {_in_full(text)})"


def same_text(one: str, other: str) -> bool:
    """Whether two parts of summaries are the same in full, however far each was abbreviated."""
    return _in_full(one) == _in_full(other)


def _in_full(text: str) -> str:
    """The digest of a text in full, 32 hex digits; of an abbreviated one, what it tells."""
    told = re.fullmatch(r".*\.\.\. \(in full: ([0-9a-f]{32})\)", text, re.DOTALL)
    return told[1] if told else hashlib.sha256(text.encode()).hexdigest()[:32]
