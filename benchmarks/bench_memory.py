"""Memory over 10**5 steps: of a mixture, with everything that a Feed keeps.

The process's resident memory after 10**3 steps against that after 10**5: what grows with the steps shows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import measure
import numpy as np
from measure import Row

import meshfeed as mf
from meshfeed.store import IndexedWriter

STEPS, EARLY = 100_000, 1_000


def measured(short: bool) -> Iterator[Row]:
    """The one ratio."""
    last = 2 * EARLY if short else STEPS
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, tuple[object, float]] = {}
        for k in range(3):
            path = Path(folder) / f"s{k}"
            with IndexedWriter(path, np.uint16) as writer:
                for _ in range(200):
                    writer.add_document(np.arange(100, dtype=np.uint16))
            stores[f"s{k}"] = (mf.open(path), k + 1.0)
        recipe = mf.Recipe(
            data=mf.Mixture(stores), sequence=mf.Windows(64), batch=mf.Batch(sequences=4), steps=last
        )
        resident: dict[int, int] = {}
        with mf.Feed(recipe) as feed:
            for step in feed:
                for _ in step.microbatches:
                    pass
                feed.state_dict()
                if step.index + 1 in (EARLY, last):
                    resident[step.index + 1] = resident_bytes()
    yield Row(
        name="resident memory after 10⁵ steps of a mixture",
        against="after 10³",
        value=resident[last] / resident[EARLY],
        aim=1.02,
    )


def resident_bytes() -> int:
    """This process's resident memory."""
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


if __name__ == "__main__":
    measure.main(__doc__, measured)
