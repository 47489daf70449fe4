"""Decoding parts beside the reader: in worker processes that get bytes and give arrays in shared memory.

The reader's threads read the bytes, so that no worker opens a store. What a processor makes is checked where
it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from meshfeed.columns import Array
from meshfeed.errors import MeshfeedError, StoreError
from meshfeed.order import rng
from meshfeed.parts import KINDS, Kind
from meshfeed.recipe import Recipe
from meshfeed.sequence.processor import PartSize, Processor, named, rows_of, tokens_of
from meshfeed.store.workers import Failure, Workers

Made = dict[str, Array]

AHEAD_BYTES = 256 << 20
"""Workers begin no further part while so much is decoded and not asked for yet."""

# smaller arrays go through the worker's pipe: each in shared memory takes a descriptor
_SHARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Which part of which draw."""

    source: int
    epoch: int
    index: int
    part: int


@dataclass(frozen=True, slots=True)
class Bad:
    """Why there is nothing of a part.

    Attributes:
        is_broken: whether it cannot be decoded; if it can, its processor breaks a promise.
    """

    why: str
    is_broken: bool


@dataclass(frozen=True, slots=True)
class Task:
    """All that decoding a part needs.

    Attributes:
        seeds: of its generator; see `order.rng`.
        rows: of each field, by the processor.
        tokens: by the rule.
    """

    kind: Kind
    data: bytes
    size: PartSize
    seeds: tuple[int, ...]
    rows: Mapping[str, int]
    tokens: int


class Decoder:
    """The decoded parts of a recipe's draws. The stores must be entered, and so must it.

    Args:
        processors: by kind.
        workers: processes that decode what is announced, each in its turn; 0 decodes what is asked for.
        timeout_s: how long a worker may take for a part.
    """

    def __init__(
        self, recipe: Recipe, processors: Mapping[Kind, Processor], workers: int, timeout_s: float
    ) -> None:
        self._recipe, self._processors = recipe, processors
        self._num_workers, self._timeout_s = workers, timeout_s
        self._workers: Workers[PartPlace] | None = None

    def __enter__(self) -> Self:
        if self._num_workers:
            make = functools.partial(_made_in_worker, dict(self._processors))
            name = f"Multimodal(workers={self._num_workers})"
            self._workers = Workers(
                make,
                self._num_workers,
                self._timeout_s,
                name,
                read=self._task,
                is_full=_is_full,
                called=self.told,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def announce(self, places: Sequence[PartPlace]) -> None:
        """These will be decoded, in this order."""
        if self._workers is not None:
            self._workers.announce(places)

    def decode(self, places: Sequence[PartPlace]) -> list[Made | Bad]:
        """Each part, decoded and checked. Raises StoreError if it cannot be read, or a worker dies."""
        if self._workers is None:
            tasks = {at: self._task(at) for at in dict.fromkeys(places)}
            decoded = {at: made_of(self._processors, task) for at, task in tasks.items()}
            return [decoded[at] for at in places]
        return [self._received(at, item) for at, item in zip(places, self._workers.fetch(places))]

    def _task(self, at: PartPlace) -> Task:
        store, document = self._recipe.sources[at.source], np.array([at.index])
        part = store.parts(document).only(at.part)
        kind: Kind = KINDS[int(part.kind[0])]
        processor = self._processors[kind]
        try:
            rows, tokens = rows_of(processor, part), tokens_of(processor.rule, part)
        except Exception as error:
            raise named(error, processor, self.told(at)) from error
        (data,) = store.read_parts(document, np.array([at.part]))
        return Task(
            kind=kind,
            data=data,
            size=PartSize.of(part, 0),
            seeds=(self._recipe.seed, at.epoch, at.index, at.part, at.source),
            rows={name: int(count[0]) for name, count in rows.items()},
            tokens=int(tokens[0]),
        )

    def told(self, at: PartPlace) -> str:
        """What messages call a part."""
        return f"{self._recipe.sources[at.source]}: document {at.index}, part {at.part} (epoch {at.epoch})"

    def _received(self, at: PartPlace, item: Any) -> Made | Bad:
        if isinstance(item, MeshfeedError):
            raise item
        if isinstance(item, Failure):
            raise StoreError(f"{self.told(at)} failed in worker {item.worker}:\n{item.text}")
        return item if isinstance(item, Bad) else {name: np.asarray(array) for name, array in item.items()}


def made_of(processors: Mapping[Kind, Processor], task: Task) -> Made | Bad:
    """A part decoded, and compared with what its processor and rule promise."""
    processor = processors[task.kind]
    try:
        made = dict(processor(task.data, task.size, rng(*task.seeds)))
    except (ImportError, MemoryError) as error:  # of this machine, not of the part
        return Bad(f"{type(error).__name__}: {error}", is_broken=False)
    except Exception as error:  # whatever a decoder raises: the bytes are the user's
        return Bad(f"{type(error).__name__}: {error}", is_broken=True)
    if wrong := _difference(processor, task, made):
        return Bad(wrong, is_broken=False)
    return made


def _difference(processor: Processor, task: Task, made: Made) -> str | None:
    """How what was made differs from what was promised."""
    promised = {each.name: (each.dtype, (task.rows[each.name], *each.shape)) for each in processor.fields}
    given: dict[str, Any] = {
        name: (array.dtype.name, array.shape) if isinstance(array, np.ndarray) else type(array).__name__
        for name, array in made.items()
    }
    if given != promised:
        return f"{processor!r} makes {given}, and its fields and rows say {promised}; make them equal"
    try:
        tokens = processor.num_tokens(made)
    except Exception as error:
        return f"num_tokens of {processor!r} raises {type(error).__name__}: {error}"
    if tokens != task.tokens:
        return (
            f"{processor.rule!r} counts {task.tokens} tokens for {task.size}, and {processor!r} makes "
            f"{tokens}; correct the one that is wrong"
        )
    return None


def _made_in_worker(processors: Mapping[Kind, Processor], task: Task) -> dict[str, Any] | Bad:
    """What travels of a part: large arrays as tensors, which torch moves through shared memory."""
    made = made_of(processors, task)
    if isinstance(made, Bad):
        return made
    return {
        name: torch.from_numpy(np.require(array, requirements=["C", "W"]))
        if array.nbytes >= _SHARED_BYTES
        else array
        for name, array in made.items()
    }


def _is_full(items: Iterable[Any]) -> bool:
    arrays = (array for item in items if isinstance(item, dict) for array in item.values())
    return sum(array.nbytes for array in arrays) >= AHEAD_BYTES
