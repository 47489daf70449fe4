"""What the pieces of gpu.py run on, and what they tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from measure import Row

from meshfeed.store import IndexedStore, IndexedWriter

VOCABULARY = 50_000


@dataclass(frozen=True)
class LeftOut:
    """Something that could not be shown here. why: what it needs."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"left out: {self.what}: {self.why}"


@dataclass(frozen=True)
class Bench:
    """Where a piece runs.

    Attributes:
        device: a CUDA device, or the CPU.
        short: seconds instead of minutes; figures then say nothing about speed.
        folder: for files, empty at first.
        megatron: a checkout of Megatron-LM.
    """

    device: torch.device
    short: bool
    folder: Path
    megatron: Path | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done all its work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def store(self, dtype: str, num_tokens: int) -> IndexedStore:
        """Documents of lognormal lengths, some 1,000 tokens each."""
        rng, path = np.random.default_rng(0), self.folder / f"{dtype}-{num_tokens}"
        with IndexedWriter(path, dtype, overwrite=True) as writer:
            while num_tokens > 0:
                size = min(int(rng.lognormal(6.5, 0.9)) + 2, 8_192, num_tokens)
                writer.add_document(rng.integers(1, VOCABULARY, size).astype(dtype))
                num_tokens -= size
        return IndexedStore(path)


Shown = Iterator[Row | LeftOut]
"""What a piece tells, as it goes."""


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
