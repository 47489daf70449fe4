"""Mutants that are the same program to whoever uses it: mutate.py does not count them."""

from __future__ import annotations

_LISTED: dict[str, list[tuple[str, str, str]]] = {}
"""By file: a line, what the mutant has instead, and why nobody can tell them apart."""

SAME = {(file, before, after) for file, listed in _LISTED.items() for before, after, _ in listed}
