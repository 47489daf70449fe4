"""How many requests ahead, and how large, without a clock."""

from __future__ import annotations

from meshfeed.remote.fetcher.pace import Pace


def simulated(seconds_of: object, rounds: int = 200) -> Pace:
    """A pace that has learnt from a storage: (requests at once, bytes) -> seconds."""
    pace = Pace(16 << 20)
    for _ in range(rounds):
        size = max(pace.range_bytes, 1 << 16)
        pace.learn(size, seconds_of(pace.at_once, size))  # type: ignore[operator]
    return pace


def test_a_narrow_line_is_not_crowded() -> None:
    """1 MB/s for all together: more requests at once only make each slower."""
    pace = simulated(lambda at_once, size: 0.05 + size * at_once / 1e6)
    assert pace.at_once <= 3
    assert 0.2e6 < pace.range_bytes < 2e6


def test_a_wide_line_is_filled() -> None:
    """50 MB/s for each, as object stores give: as many as may be."""
    pace = simulated(lambda at_once, size: 0.03 + size / 50e6)
    assert pace.at_once == 24
    assert pace.range_bytes == 16 << 20


def test_a_line_that_widens_is_noticed() -> None:
    pace = Pace(16 << 20)
    for turn in range(600):
        per_byte = 1e-6 * pace.at_once if turn < 300 else 1 / 80e6
        pace.learn(1 << 20, 0.02 + (1 << 20) * per_byte)
    assert pace.at_once == 24
