"""Memory over 10**5 steps: of a mixture, with everything that a Feed keeps.

The process's resident memory after 10**3 steps against that after 10**5: what grows with the steps shows.

    python benchmarks/bench_memory.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from measure import verdict

import meshfeed as mf
from meshfeed.store import IndexedWriter

STEPS, EARLY = 100_000, 1_000


def main() -> None:
    """Run and print."""
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, tuple[object, float]] = {}
        for k in range(3):
            path = Path(folder) / f"s{k}"
            with IndexedWriter(path, np.uint16) as writer:
                for _ in range(200):
                    writer.add_document(np.arange(100, dtype=np.uint16))
            stores[f"s{k}"] = (mf.open(path), k + 1.0)
        recipe = mf.Recipe(
            data=mf.Mixture(stores), sequence=mf.Windows(64), batch=mf.Batch(sequences=4), steps=STEPS
        )
        resident: dict[int, int] = {}
        with mf.Feed(recipe) as feed:
            for step in feed:
                for _ in step.microbatches:
                    pass
                feed.state_dict()
                if step.index + 1 in (EARLY, STEPS):
                    resident[step.index + 1] = resident_bytes()
    for steps, size in resident.items():
        print(f"after {steps:>7} steps: {size / 2**20:.1f} MiB resident")
    print(verdict("resident memory, late : early", resident[STEPS] / resident[EARLY], 1.02, at_least=False))


def resident_bytes() -> int:
    """This process's resident memory."""
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


if __name__ == "__main__":
    main()
