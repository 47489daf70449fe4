"""Small real jobs that `bench` watches: four ranks on one node, and one rank far from its storage."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import meshfeed as mf
from meshfeed.cli.demo.storage import Manners, SlowStorage
from meshfeed.errors import MeshfeedError
from meshfeed.roles import DeliveryName
from meshfeed.store import IndexedWriter, OpenedStore

_TCPStore: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch's stubs leave it out
_LENGTH, _SEQUENCES, _STEPS = 1024, 16, 16
_PATIENCE_S = 120.0
_FAR_STEPS, _FAR_WARM, _FAR_STEP_S, _FAR_SEQUENCES = 90, 30, 0.05, 32


@dataclass(frozen=True, slots=True)
class Done:
    """What a job's ranks counted, together; microbatches and bytes consumed once."""

    bytes_read: int
    bytes_consumed: int
    collectives: float
    num_microbatches: int


def run(prefix: str, layout: str, delivery: DeliveryName) -> Done:
    """Feed a layout on processes of this machine. Raises MeshfeedError where one fails."""
    num_ranks = mf.Layout.parse(layout).world_size
    patience = timedelta(seconds=_PATIENCE_S)
    store = _TCPStore("127.0.0.1", 0, None, True, timeout=patience, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
            asked = [
                pool.submit(_fed, rank, store.port, prefix, layout, delivery) for rank in range(num_ranks)
            ]
            counted = np.array([each.result() for each in asked])
    except BrokenProcessPool as error:
        raise MeshfeedError(
            f"a process of the job {layout} died; is there memory for {num_ranks}?"
        ) from error
    consumed = _STEPS * _SEQUENCES * _LENGTH * 2
    return Done(int(counted[:, 0].sum()), consumed, float(counted[:, 1].max()), int(counted[0, 2]))


def _fed(rank: int, port: int, prefix: str, layout: str, delivery: DeliveryName) -> tuple[int, int, int]:
    """One rank: bytes that it read, collectives and microbatches."""
    torch.set_num_threads(1)
    store = _TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=_PATIENCE_S))
    recipe = _recipe(mf.open(prefix), _SEQUENCES)
    read = collectives = microbatches = 0
    grid = mf.Layout.parse(layout)
    with mf.Feed(recipe, grid, rank, delivery=delivery, rendezvous=store, pad_rows=True) as feed:
        for step in feed:
            microbatches += sum(1 for _ in step.microbatches)
            read += step.stats["bytes_read"]
            collectives += step.stats["collectives"]
            if step.index == _STEPS - 1:
                break
    return read, collectives, microbatches


def waited_far() -> float:
    """Seconds that a loop waited, over those that it trained, after warm-up.

    Raises StoreError without obstore.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "served").mkdir()
        with IndexedWriter(folder / "served/corpus", np.uint16) as writer:
            for _ in range(_FAR_STEPS * _FAR_SEQUENCES):
                writer.add_document(np.zeros(_LENGTH + 1, np.uint16))
        demand = _FAR_SEQUENCES * (_LENGTH + 1) * 2 / _FAR_STEP_S
        cache = mf.Cache(folder / "cache", block_bytes=16 << 10)
        with SlowStorage(folder / "served", Manners(bytes_per_s=1.2 * demand)) as storage:
            recipe = _recipe(mf.open(f"{storage.url}/corpus", cache=cache), _FAR_SEQUENCES)
            waited = 0.0
            with mf.Feed(recipe, micro_batch_size=_FAR_SEQUENCES) as feed:
                for step in feed:
                    for _ in step.microbatches:
                        time.sleep(_FAR_STEP_S)  # the training
                    if step.index >= _FAR_WARM:
                        waited += sum(step.stats["exposed_wait_s"].values())
                    if step.index == _FAR_STEPS - 2:
                        break
        return waited / ((_FAR_STEPS - 1 - _FAR_WARM) * _FAR_STEP_S)


def _recipe(store: OpenedStore, sequences: int) -> mf.Recipe:
    return mf.Recipe(
        data=store,
        sequence=mf.Windows(_LENGTH),
        batch=mf.Batch(sequences=sequences),
        shuffle=mf.Blocks(sequences=64, window=2, lanes=2),
    )
