"""The fuzzers; `make soak` runs them long."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import TARGETS, tried

from soak import SEED, cases


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A size that a damaged header claims is not allocated: there are but 4 GiB."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_our_errors(name: str) -> None:
    count = cases(100, 10_000)
    ended = Counter(tried(name, count, seed=SEED + 1))
    assert ended["fine"] > 0, "some damage is harmless"
    assert sum(ended.values()) - ended["fine"] > count // 3, "and some is not"
