"""A mixture of more sources than the process may have descriptors."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

import meshfeed as mf
from meshfeed.store import IndexedStore
from raw_index import write_raw
from soak import cases, only_soak

NUM_SOURCES = cases(600, 3_000)
NUM_TOKENS, LENGTH = 64, 16
STEPS, SEQUENCES = 100, 64


def recipe_of(stores: list[IndexedStore]) -> mf.Recipe:
    return mf.Recipe(
        data=mf.Mixture({f"s{i}": (store, 1.0) for i, store in enumerate(stores)}),
        sequence=mf.Windows(LENGTH),
        batch=mf.Batch(sequences=SEQUENCES),
        seed=1,
        steps=STEPS,
    )


def trained(folder: Path, limit: int | None) -> dict[str, object]:
    """What a job sees, and how often it opened a file."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    stores = [IndexedStore(folder / f"s{i}") for i in range(NUM_SOURCES)]
    digest, num_steps = hashlib.blake2b(), 0
    with mf.Feed(recipe_of(stores), mf.Layout.parse("dp1"), 0, micro_batch_size=SEQUENCES) as feed:
        for step in feed:
            num_steps += 1
            for microbatch in step.microbatches:
                digest.update(microbatch["tokens"].numpy().tobytes())
    opens = sum(store.stats.opens for store in stores)
    return {"digest": digest.hexdigest(), "steps": num_steps, "opens": opens}


@only_soak
def test_few_descriptors_for_many_sources(tmp_path: Path) -> None:
    for i in range(NUM_SOURCES):
        tokens = np.random.default_rng(i).integers(0, 60_000, NUM_TOKENS).astype("<u2")
        write_raw(
            tmp_path / f"s{i}", lengths=[NUM_TOKENS], pointers=[0], documents=[0, 1], data=tokens.tobytes()
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * NUM_SOURCES), hard))
    try:
        free, few = (
            json.loads(
                subprocess.run(
                    [sys.executable, __file__, str(tmp_path), limit],
                    env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
                    stdout=subprocess.PIPE,
                    check=True,
                    timeout=800,
                ).stdout
            )
            for limit in ("", "256")
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert few["steps"] == free["steps"] == STEPS
    assert few["digest"] == free["digest"]
    assert free["opens"] == NUM_SOURCES < few["opens"]


if __name__ == "__main__":
    print(json.dumps(trained(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2] else None)))
