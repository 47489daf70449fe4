"""The ranks of one node of the job of test_nodes: `python node_job.py NODE FOLDER ADDRESS`.

Each is a fork of one process that has imported torch, and writes what it saw into FOLDER/RANK.json.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import meshfeed as mf
from observe import seen_step

PER_NODE, STEPS, SEQUENCES, LENGTH = 3, 40, 32, 4096
LAYOUT = mf.Layout.parse("tp6", ranks_per_node=PER_NODE)
STEP_BYTES = SEQUENCES * (LENGTH + 1) * 2
NUM_TOKENS = 1_000_000
PORT = 29_500  # in a network of its own


class OnDisk(mf.Lengths):
    """Documents whose lengths every node knows, and whose tokens are where the file is."""

    def __init__(self, path: Path) -> None:
        super().__init__([NUM_TOKENS])
        self.path = path

    def read_stream(self, starts: Any, stops: Any, out: Any = None) -> Any:
        try:
            tokens = np.memmap(self.path, np.uint16, "r")
        except FileNotFoundError as missing:
            raise mf.errors.MissingError(f"{self.path}: no such file") from missing
        made = super().read_stream(starts, stops, out)
        np.concatenate([tokens[a:b] for a, b in zip(starts.tolist(), stops.tolist())], out=made)
        return made


def recipe_at(folder: Path) -> mf.Recipe:
    return mf.Recipe(
        data=OnDisk(folder / "tokens"),
        sequence=mf.Windows(LENGTH),
        batch=mf.Batch(sequences=SEQUENCES),
        seed=3,
    )


def main(rank: int, folder: Path, address: str) -> dict[str, Any]:
    patience = timedelta(seconds=600)
    store = dist.TCPStore(address, PORT, None, rank == 0, timeout=patience, wait_for_workers=False)
    told: dict[str, Any] = {}
    received = Path("/sys/class/net/eth0/statistics/rx_bytes")
    for delivery in ("auto", "broadcast", "share"):
        readers = None if delivery == "share" else range(PER_NODE)
        _together(store, f"before {delivery}", rank)
        before = int(received.read_text())
        feed = mf.Feed(
            recipe_at(folder),
            LAYOUT,
            rank,
            transport=mf.Transport(delivery=delivery, readers=readers, rendezvous=store, timeout_s=600),
        )
        try:
            with feed:
                seen = [seen_step(step, step.microbatches) for step in itertools.islice(feed, STEPS)]
        except mf.MeshfeedError as error:
            told[delivery] = {"error": [type(error).__name__, str(error)]}
        _together(store, f"after {delivery}", rank)
        if delivery in told:
            continue
        told[delivery] = {
            "delivery": feed.delivery,
            "seen": json.dumps([step["microbatches"] for step in seen]),
            "received_bytes": int(received.read_text()) - before,
        }
    store.set(f"end {rank}", "1")
    if rank == 0:  # it serves the store, so it is the last to leave
        store.wait([f"end {r}" for r in range(LAYOUT.world_size)])
    return told


def tell(rank: int, folder: Path, address: str) -> None:
    faulthandler.dump_traceback_later(300)  # where it hangs, if it does
    (folder / f"{rank}.json").write_text(json.dumps(main(rank, folder, address)))


def _together(store: Any, name: str, rank: int) -> None:
    store.set(f"{name} {rank}", "1")
    store.wait([f"{name} {r}" for r in range(LAYOUT.world_size)])


if __name__ == "__main__":
    at, disk = int(sys.argv[1]), Path(sys.argv[2])
    ranks = [
        multiprocessing.Process(target=tell, args=(at * PER_NODE + n, disk, sys.argv[3]))
        for n in range(PER_NODE)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
