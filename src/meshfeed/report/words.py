"""Counts in words."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """1 -> "1 rank", 2000 -> "2,000 ranks"; what: one of them."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")
