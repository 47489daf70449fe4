"""Whether a dataset gives the same item for the same index, whatever happened before and elsewhere."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from meshfeed.order import EpochIndex
from meshfeed.testing.difference import difference
from meshfeed.testing.elsewhere import elsewhere

_SEEDING = (
    (torch, "manual_seed"), (torch, "seed"), (torch.random, "manual_seed"), (torch.cuda, "manual_seed"),
    (torch.cuda, "manual_seed_all"), (np.random, "seed"), (random, "seed"),
)  # fmt: skip

_RANK = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
)  # fmt: skip


def assert_deterministic(
    dataset: Any,
    *,
    indices: Iterable[Any] | None = None,
    another_process: bool = True,
    timeout_s: float = 120.0,
) -> None:
    """Ask a map-style dataset for items again and again, and compare.

    indices: what to ask for; by default some sixteen `EpochIndex`es of two epochs. another_process: ask in a
    fresh process too, to which the dataset is pickled.

    Raises AssertionError where an item differs when it is asked for twice, in another order, after other
    items, under another global random state, on another rank (by $RANK, $WORLD_SIZE and the like) or in
    another process; where it draws from or changes the global random state of Python, NumPy, torch or CUDA;
    or where it calls a global seed function. What a dataset read of $RANK when it was made is not noticed.
    """
    if indices is None:
        indices = (EpochIndex(epoch, index) for epoch in (0, 1) for index in _few_of(dataset))
    asked = list(indices)
    if not asked:
        raise AssertionError("no index to ask for: the dataset is empty, or `indices` is")
    of_another: list[Any] = []
    if another_process:  # spawned: a fork would share what this process has cached and seeded
        with _other_rank():  # backwards, and first: the dataset has kept nothing yet
            of_another = elsewhere("spawn", timeout_s, _items, dataset, asked[::-1])[::-1]
    items = [_item(dataset, at) for at in asked]
    _compare(asked, items, [_item(dataset, at) for at in asked], "asked for twice")
    backwards = [_item(dataset, at) for at in reversed(asked)][::-1]
    _compare(asked, items, backwards, "asked for in another order")
    with _other_random_state():
        again = [_item(dataset, at) for at in asked]
    _compare(asked, items, again, "asked for under another global random state")
    with _other_rank():
        again = [_item(dataset, at) for at in asked]
    how = "asked for on another rank, with other values of $RANK, $WORLD_SIZE and their like"
    _compare(asked, items, again, how)
    _compare(asked, items, of_another, "asked for in another process")


def assert_epochs_differ(
    dataset: Any, *, indices: Iterable[int] | None = None, epochs: tuple[int, int] = (0, 1)
) -> None:
    """An item of one epoch is another in the next: its crop, its mask or its noise is keyed by the epoch.

    indices: what to ask for; by default some eight. Leave out items that chance may make equal, such as one
    of a single token.
    Raises AssertionError naming the first item that is the same in both epochs.
    """
    asked = _few_of(dataset) if indices is None else list(indices)
    if not asked:
        raise AssertionError("no index to ask for: the dataset is empty, or `indices` is")
    for index in asked:
        one, other = (_item(dataset, EpochIndex(epoch, index)) for epoch in epochs)
        if difference(one, other) is None:
            raise AssertionError(
                f"item {index} is the same in epochs {epochs[0]} and {epochs[1]}; "
                f"draw from a generator keyed by (seed, epoch, index), as mf.order.rng makes"
            )


def _few_of(dataset: Any) -> list[int]:
    size = len(dataset)
    return sorted({size * k // 8 for k in range(8)}) if size else []


def _compare(asked: Sequence[Any], one: Sequence[Any], other: Sequence[Any], when: str) -> None:
    for at, first, second in zip(asked, one, other):
        if found := difference(first, second):
            raise AssertionError(f"{at} differs when {when}: {found}")


def _item(dataset: Any, at: Any) -> Any:
    """One item, by copy, with the global random state watched."""
    called: list[str] = []
    before = _random_states()
    with contextlib.ExitStack() as stack:
        for module, name in _SEEDING:
            stack.enter_context(mock.patch.object(module, name, _noting(called, module, name)))
        item = copy.deepcopy(dataset[at])
    if called:
        raise AssertionError(f"{at} calls {called[0]}; draw from a generator keyed by (seed, epoch, index)")
    for name, state in _random_states().items():
        if difference(before[name], state):
            raise AssertionError(
                f"{at} changes the global random state of {name}; draw from a generator keyed by "
                f"(seed, epoch, index)"
            )
    return item


def _noting(called: list[str], module: Any, name: str) -> Callable[..., Any]:
    real = getattr(module, name)

    def noted(*args: Any, **options: Any) -> Any:
        called.append(f"{module.__name__}.{name}")
        return real(*args, **options)

    return noted


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["CUDA"] = torch.cuda.get_rng_state_all()
    return states


@contextlib.contextmanager
def _other_random_state() -> Generator[None]:
    """Another state of every global generator; the old one comes back."""
    saved = _random_states()
    try:
        random.seed(1)
        np.random.seed(1)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            yield
    finally:
        random.setstate(saved["random"])
        np.random.set_state(saved["numpy"])


def _other_rank() -> Any:
    """Other values of what launchers say of a rank; the old ones come back."""
    return mock.patch.dict(os.environ, {name: "6" if os.environ.get(name) != "6" else "7" for name in _RANK})


def _items(dataset: Any, asked: Sequence[Any]) -> list[Any]:
    return [copy.deepcopy(dataset[at]) for at in asked]
