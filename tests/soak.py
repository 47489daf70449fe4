"""How long a test searches. `make test` takes a tenth of every long law, with fixed seeds; `make soak` takes it whole,
with a seed that is new each time and printed at both ends.

    for life in range(cases(100, 1_000)):
        rng = np.random.default_rng((SEED, life))

    @settings(max_examples=cases(40))  # twenty times as many in a soak
"""

from __future__ import annotations

import os

SOAK = os.environ.get("MESHFEED_SOAK") == "1"
SEED = int(os.environ.get("MESHFEED_SEED", "0"))
"""The seed of tests that draw for themselves: 0 in `make test`."""


def cases(short: int, long: int | None = None) -> int:
    """How many cases to try: short in `make test`, long (20 * short where it is not given) in `make soak`."""
    return (20 * short if long is None else long) if SOAK else short
