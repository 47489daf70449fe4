"""A corpus small enough for models of tests, and what was seen of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import meshfeed as mf
from meshfeed.store import IndexedWriter

VOCAB = 128


def write(path: Path, num_tokens: int = 6000) -> str:
    """A store of random documents; no window of it is like another."""
    rng = np.random.default_rng(3)
    with IndexedWriter(path, np.uint16) as writer:
        for document in np.split(rng.integers(1, VOCAB, num_tokens).astype(np.uint16), num_tokens // 100):
            writer.add_document(document)
    return str(path)


def recipe(corpus: str, **options: Any) -> mf.Recipe:
    """A recipe of it, with some options changed."""
    given = {"sequence": mf.Windows(32), "batch": mf.Batch(sequences=8), "seed": 1234, **options}
    return mf.Recipe(data=mf.open(corpus), **given)


def rows(tensor: torch.Tensor) -> tuple[str, ...]:
    """The digest of every row."""
    return tuple(hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in tensor.cpu())


def at_own_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Labels of next tokens [rows, tokens], each moved to its own token; -100 at the first."""
    return torch.nn.functional.pad(labels, (1, -1), value=-100)


def wanted(
    corpus: str,
    steps: Iterable[int],
    rank: int,
    *,
    window: int,
    sequences: int,
    dp: int = 2,
    micro: int = 2,
    shuffle: str = "global",
) -> list[tuple[int, tuple[str, ...]]]:
    """(step, rows of tokens) of every microbatch that a rank is to train, by simulation."""
    batch = mf.Batch(sequences=sequences)
    trained = recipe(corpus, sequence=mf.Windows(window), batch=batch, shuffle=shuffle)
    made = mf.simulate(trained, mf.Layout(dp=dp), steps, ranks=[rank], micro_batch_size=micro)
    return [(step.batch.step, rows(each["tokens"])) for step in made for each in step.microbatches]


def forget_accelerate() -> None:
    """accelerate keeps one state per process; a test begins without that of the tests before it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
