"""The demo on far storage: the same steps fed from a disk, from far storage, by two deliveries."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from demo.compare import Run
from demo.corpus import BLOCK_BYTES, Corpus
from demo.far_page import Far
from demo.runs import Trainer
from demo.storage import Manners, Served, SlowStorage

LAYOUT = "tp2"
STEPS = {"near": 10, "far": 50, "broadcast": 50}  # some 160 requests: the 20th and the 120th are late
HEADROOM = 1.2
_OPTIONS = {"window": 128, "sequences": 48, "micro-batch-size": 12, "shuffle": "blocks"}
_TOKEN_BYTES = 2


def train_from_afar(trainer: Trainer, corpus: Corpus, out: Path, console: Console) -> Far:
    """Three short runs of one recipe; the storage gives 1.2 times what the steps of the first one take."""
    options: dict[str, Any] = {**_OPTIONS, "checkpoint-every": 1000}
    near_options = options | {"steps": STEPS["near"]}
    trainer.train("near", LAYOUT, "2 processes, corpus on the disk", options=near_options)
    near = Run.read(out, "near")
    consumed = int(_OPTIONS["sequences"]) * int(_OPTIONS["window"]) * _TOKEN_BYTES
    step_s = median(line["seconds"] for line in near.costs[0] if line["step"])
    manners = Manners(bytes_per_s=HEADROOM * consumed / step_s)
    served: dict[str, Served] = {}
    with SlowStorage(Path(corpus.prefix).parent, manners) as storage:
        for name, told, further in (
            ("far", "the same, corpus behind slow storage", {}),
            ("broadcast", "the same, tp rank 0 reads and broadcasts", {"delivery": "broadcast"}),
        ):
            cache = out / "cache"
            far: dict[str, Any] = {"corpus": f"{storage.url}/{Path(corpus.prefix).name}", "cache": cache}
            storage.served = served[name] = Served()
            far |= {"block-bytes": BLOCK_BYTES, "steps": STEPS[name]}
            trainer.train(name, LAYOUT, told, options=options | far | further)
            shutil.rmtree(cache, ignore_errors=True)
    return Far(
        layout=LAYOUT,
        runs={name: Run.read(out, name) for name in ("near", "far", "broadcast")},
        fetched_bytes={name: counted.num_bytes for name, counted in served.items()},
        consumed_bytes={name: consumed * steps for name, steps in STEPS.items()},
        latency_s=manners.latency_s,
        bytes_per_s=manners.bytes_per_s or 0.0,
        requests={name: counted.requests for name, counted in served.items()},
        late={name: counted.late for name, counted in served.items()},
        late_by=manners.late_by,
    )
