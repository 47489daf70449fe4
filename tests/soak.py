"""How long a test searches. `make test` takes a tenth of every long law, with fixed seeds; `make soak` takes it whole,
with a seed that is new each time and printed at both ends. Keep a whole soak to about an hour on two idle cores, so that
it is run before each release.

    for life in range(cases(100, 1_000)):
        rng = np.random.default_rng((SEED, life))

    @settings(max_examples=cases(40))  # ten times as many in a soak

    @only_soak  # another test shows the same law in less time

    @some(3)  # of its parameters, evenly spread; all in a soak
    @pytest.mark.parametrize(...)
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

SOAK = os.environ.get("MESHFEED_SOAK") == "1"
SEED = int(os.environ.get("MESHFEED_SEED", "0"))
"""The seed of tests that draw for themselves: 0 in `make test`."""


def cases(short: int, long: int | None = None) -> int:
    """How many cases to try: short in `make test`, long (10 * short where it is not given) in `make soak`."""
    return (10 * short if long is None else long) if SOAK else short


only_soak = pytest.mark.only_soak


def some(most: int) -> pytest.MarkDecorator:
    """Mark a test with parameters: `make test` runs it with so many sets of them."""
    return pytest.mark.some(most)


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that only a soak runs."""
    out: list[pytest.Item] = []
    sets: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("only_soak"):
            out.append(item)
        elif mark := item.get_closest_marker("some"):
            sets[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, most), each in sets.items():
        kept = {at * len(each) // most for at in range(most)}
        out += [item for at, item in enumerate(each) if at not in kept]
    return out
