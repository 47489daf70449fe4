"""Counts, durations and bytes in words."""

from __future__ import annotations

import html

from meshfeed.text import visible


def escape(text: str) -> str:
    """Any text as HTML that shows it; see `visible`."""
    return html.escape(visible(text))


def counted(number: int, what: str) -> str:
    """1 -> "1 rank", 2000 -> "2,000 ranks"; what: one of them."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Three digits in a suitable unit: 0.0005 -> "500 µs", 1.234 -> "1.23 s", 3600 -> "60 min"."""
    if seconds >= 600:
        return f"{seconds / 60:,.0f} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:  # 999.6 ms would round to 1000 ms
            return f"{seconds / size:.3g} {unit}"
    return "0 ms" if seconds < 5e-7 else "1 µs"


def short(number: float, unit: str = "B") -> str:
    """Two digits or more in a suitable unit: 999 -> "999 B", 1234 -> "1.2 kB", 25_600_000 -> "26 MB"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:,.{1 if number < 9.95 * size else 0}f} {prefix}{unit}"
    return f"{number:.0f} {unit}"
