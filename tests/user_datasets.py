"""Datasets as users write them, for tests; at module level, so that any process can have them."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import meshfeed as mf


class Rich:
    """Every kind of value; sizes vary by index, numbers by epoch too."""

    def __init__(self, size: int = 40, seed: int = 3) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def lengths(self) -> np.ndarray:
        return np.array([self.length_of(i) for i in range(self.size)])

    def length_of(self, index: int) -> int:
        return 1 + index * 7 % 23

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        rng = mf.order.rng(self.seed, at.epoch, at.index)
        n = self.length_of(at.index)
        return {
            "ids": rng.integers(1, 1000, n).astype(np.int32),
            "weight": torch.from_numpy(rng.random(n, np.float32)),
            "image": rng.integers(0, 255, (3, 2 + at.index % 3, 2)).astype(np.uint8),
            "score": rng.random(),
            "class": at.index % 5,
            "caption": "ü" * (at.index % 4),
            "raw": bytes(at.index % 3),
            "pixels": torch.arange(6).reshape(2, 3).T,
            "unasked": object(),
        }


class Plain:
    """One item per index, made by a function."""

    def __init__(self, size: int, make: Callable[[mf.order.EpochIndex], Any]) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: mf.order.EpochIndex) -> Any:
        return self.make(at)


class Fatal(Plain):
    """The item at `index` does what `make` says, the others are fine."""

    def __init__(self, size: int, index: int, make: Callable[[mf.order.EpochIndex], Any]) -> None:
        super().__init__(size, make)
        self.index = index

    def __getitem__(self, at: mf.order.EpochIndex) -> Any:
        return self.make(at) if at.index == self.index else {"x": np.full(50_000, at.index)}


def kill_this_process(at: mf.order.EpochIndex) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_this_process(at: mf.order.EpochIndex) -> Any:
    os._exit(3)


def fail(at: mf.order.EpochIndex) -> Any:
    raise LookupError(f"nothing at {at.index}, that is it")


class Large:
    """What cannot be sent, as a tensor where the shared memory is full."""

    def __reduce__(self) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/torch_7")


def large(at: Any) -> Large:
    return Large()


def lock(at: Any) -> Any:
    return threading.Lock()


def never(at: mf.order.EpochIndex) -> Any:
    threading.Event().wait()


class OddError(Exception):
    """Cannot be made from a message alone, as pickle would."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def fail_oddly(at: mf.order.EpochIndex) -> Any:
    raise OddError(1, 2)


def global_randomness() -> tuple[Any, ...]:
    """The state of every global generator of this process."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


def samples_recipe(
    dataset: Any, *fields: Any, packed: bool = False, sequences: int = 8, **mapped: Any
) -> mf.Recipe:
    """The usual recipe over a dataset: two epochs, eight items a step."""
    return mf.Recipe(
        data=mf.Mapped(dataset, **mapped),
        sequence=mf.Samples(*fields, packed=packed),
        batch=mf.Batch(sequences=sequences),
        seed=11,
        epochs=2,
    )
