"""Remote storage in the demo: the same steps fed from a disk, and from remote storage in two ways."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from demo.compare import Run
from demo.corpus import BLOCK_BYTES, Corpus
from demo.remote_page import LEAST_BYTES_PER_S, Remote
from demo.runs import Trainer
from demo.storage import Manners, Served, SlowStorage

LAYOUT = "tp2"
STEPS = {"local": 6, "remote": 18, "apart": 18}  # more than 20 requests: the 20th is late
HEADROOM = 1.6
"""One reader fetches some 1.4 bytes for each byte of a step, and a reader for each rank twice as many."""
_OPTIONS = {"window": 128, "sequences": 24, "micro-batch-size": 12, "shuffle": "blocks"}
_TOKEN_BYTES = 2


def bytes_per_s(consumed: int, step_s: float) -> float:
    """What the storage gives. consumed: bytes of a step. step_s: of a step, long on a busy machine."""
    return max(HEADROOM * consumed / step_s, LEAST_BYTES_PER_S)


def train_from_remote_storage(trainer: Trainer, corpus: Corpus, out: Path, console: Console) -> Remote:
    """Three short runs of one recipe; the storage gives 1.6 times what the steps of the first one take.

    Raises MeshfeedError where a run fails.
    """
    options: dict[str, Any] = {**_OPTIONS, "checkpoint-every": 1000}
    local_options = options | {"steps": STEPS["local"]}
    trainer.train("local", LAYOUT, "2 processes, corpus on the disk", options=local_options)
    local = Run.read(out, "local")
    consumed = int(_OPTIONS["sequences"]) * int(_OPTIONS["window"]) * _TOKEN_BYTES
    step_s = median(line["seconds"] for line in local.costs[0] if line["step"])
    manners = Manners(bytes_per_s=bytes_per_s(consumed, step_s))
    served: dict[str, Served] = {}
    with SlowStorage(Path(corpus.prefix).parent, manners) as storage:
        for name, told, further in (
            ("remote", "the same, corpus behind slow storage", {"cache": out / "cache"}),
            ("apart", "the same, every rank for itself", {"cache": out / "cache-RANK", "delivery": "direct"}),
        ):
            remote: dict[str, Any] = {"corpus": f"{storage.url}/{Path(corpus.prefix).name}"}
            storage.served = served[name] = Served()
            remote |= {"block-bytes": BLOCK_BYTES, "steps": STEPS[name]}
            trainer.train(name, LAYOUT, told, options=options | remote | further)
            for cache in out.glob("cache*"):
                shutil.rmtree(cache, ignore_errors=True)
    return Remote(
        layout=LAYOUT,
        runs={name: Run.read(out, name) for name in ("local", "remote", "apart")},
        fetched_bytes={name: counted.num_bytes for name, counted in served.items()},
        consumed_bytes={name: consumed * steps for name, steps in STEPS.items()},
        latency_s=manners.latency_s,
        bytes_per_s=manners.bytes_per_s or 0.0,
        requests={name: counted.requests for name, counted in served.items()},
        late={name: counted.late for name, counted in served.items()},
        late_by=manners.late_by,
    )
