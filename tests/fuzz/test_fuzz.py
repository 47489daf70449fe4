"""A short run of the fuzzers; `make fuzz` is the long one."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzzing import TARGETS, tried


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_our_errors(name: str) -> None:
    ended = Counter(tried(name, 1500, seed=1))
    assert ended["fine"] > 10, "some damage is harmless"
    assert sum(ended.values()) - ended["fine"] > 500, "and some is not"
