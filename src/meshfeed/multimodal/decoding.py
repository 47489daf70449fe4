"""Decoding parts beside the reader: in worker processes that get bytes and give arrays in shared memory.

The reader's threads read the bytes, so that no worker opens a store. What a processor makes is checked where
it is made.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self, cast

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.datasets.workers import Failure, Workers
from meshfeed.errors import MeshfeedError, PartError, RecipeError, StoreError
from meshfeed.forks import at_fork
from meshfeed.machine import Machine
from meshfeed.multimodal.arena import Arena, ArenaRange
from meshfeed.multimodal.processor import PartField, PartSize, Processor
from meshfeed.order import philox
from meshfeed.parts import Kind
from meshfeed.sequence.rule import DecodeCosts

Made = dict[str, Array]

AHEAD_BYTES = 256 << 20
"""Workers begin no further part while so much is decoded and not asked for yet."""

_ARENA_BYTES = 1 << 36  # of addresses, far above AHEAD_BYTES and what a step has; memory as it is written
_SHARED_BYTES = 1 << 16  # less goes through the worker's pipe
_ALIGNED = 64


class Promise(NamedTuple):
    """What is known of a part before its bytes are read.

    Attributes:
        begin, num_bytes: of the stored bytes, in the file of all parts.
        rows: of each column, by the processor.
        tokens: by the rule.
        seeds: of its generator; see `order.rng`.
    """

    kind: Kind
    size: PartSize
    begin: int
    num_bytes: int
    rows: Mapping[str, int]
    tokens: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Which part of which draw.

    Attributes:
        name: of its source: growth may give this one another number before the part is fetched.
        store: where it is.
    """

    name: str
    epoch: int
    index: int
    part: int
    store: Any = field(compare=False, repr=False)
    promise: Promise = field(compare=False, repr=False)

    def told(self) -> str:
        """What messages call the part."""
        return f"{self.store}: document {self.index}, part {self.part} (epoch {self.epoch})"


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
        data: as stored; empty where they begin the room.
        read_s: seconds that reading the bytes took.
        room: for the stored bytes and large arrays; None where all go through the pipe.
        slots: where the arrays from _SHARED_BYTES begin in the room.
    """

    promise: Promise
    data: bytes
    read_s: float
    room: ArenaRange | None = None
    slots: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Placed:
    """An array in a task's room. begin: its first byte there."""

    begin: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Decoded:
    """What a part became, and what that cost.

    Attributes:
        made: its arrays, from a worker some as Placed; or why there are none.
        num_bytes, read_s: of the part before decoding; seconds that reading it took.
        busy_s, cpu_s: seconds that decoding took, and CPU seconds.
        is_counted: whether the costs are in the decoder's: several packs may ask for one part.
    """

    made: dict[str, Any] | Bad
    num_bytes: int
    read_s: float
    busy_s: float
    cpu_s: float
    is_counted: bool = False


class Decoder:
    """The decoded parts of draws. The stores must be entered, and so must it.

    Args:
        processors: by kind.
        machine: its workers decode what is announced, each in its turn; without any, `decode` does.

    Attributes:
        costs: of all that was asked for.
        has_bad: the sources of which a part could not be decoded.
    """

    def __init__(self, processors: Mapping[Kind, Processor], machine: Machine) -> None:
        self._processors, self._machine = processors, machine
        self._workers: Workers[PartPlace] | None = None
        self._arena: Arena | None = None
        self.costs = DecodeCosts(machine.workers)
        self.has_bad: set[str] = set()

    def __enter__(self) -> Self:
        if count := self._machine.workers:
            with contextlib.suppress(OSError):  # a limit on addresses: all arrays go through the pipe
                self._arena = Arena(_ARENA_BYTES)
            make = functools.partial(_decoded_in_worker, dict(self._processors), self._arena)
            self._workers = Workers(
                make,
                count,
                self._machine.item_timeout_s,
                f"Multimodal with {count} worker{'s' * (count > 1)}",
                read=self._task_with_room,
                received=_arrays_of,
                is_full=_is_full,
                called=PartPlace.told,
            )
            at_fork(self)
        return self

    def forget_parent(self) -> None:
        """In a forked child: workers and arena are its parent's, which goes on with them."""
        self._workers = self._arena = None

    def __exit__(self, *exc: object) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def announce(self, places: Sequence[PartPlace]) -> None:
        """These will be decoded, in this order."""
        if self._workers is not None:
            self._workers.announce(places)

    def decode(self, places: Sequence[PartPlace]) -> list[Made | Bad]:
        """Each part, decoded and checked. Raises StoreError if it cannot be read, or a worker dies."""
        if self._workers is None:
            decoded = {
                at: _decoded(self._processors, task, time.thread_time, copies=True)
                for at, task in _tasks(places).items()
            }
            self.costs.wait_s += self._count(decoded.values())[0]
            return [decoded[at].made for at in places]
        begin = time.monotonic()
        items = self._workers.fetch(places)
        waited = time.monotonic() - begin
        received = [self._received(at, item) for at, item in zip(places, items)]
        busy, read = self._count(received)
        # workers also wait for the bytes that they decode: that part of the wait is reading
        self.costs.wait_s += waited * busy / (busy + read) if busy else 0.0
        return [each.made for each in received]

    def _count(self, decoded: Iterable[Decoded]) -> tuple[float, float]:
        """Add up what was not counted yet. Returns its seconds of decoding, and those of reading."""
        busy_s = read_s = 0.0
        for each in decoded:
            if not each.is_counted:
                each.is_counted = True
                self.costs.parts += 1
                self.costs.bad += isinstance(each.made, Bad)
                self.costs.num_bytes += each.num_bytes
                self.costs.cpu_s += each.cpu_s
                busy_s, read_s = busy_s + each.busy_s, read_s + each.read_s
        self.costs.busy_s += busy_s
        return busy_s, read_s

    def _task_with_room(self, at: PartPlace) -> Task:
        """What a worker needs, in a room where some of it is large."""
        promise, arena, slots = at.promise, self._arena, dict[str, int]()
        end = _aligned(promise.num_bytes)
        for each in self._columns[promise.kind]:
            if (size := promise.rows[each.name] * each.row_bytes) >= _SHARED_BYTES:
                slots[each.name], end = end, end + _aligned(size)
        room = None if arena is None or end < _SHARED_BYTES else arena.take(end)
        if room is None or room.memory is None:
            return _tasks([at])[at]
        begin = time.monotonic()
        at.store.read_part_ranges(*ranges_of([at]), room.memory[: promise.num_bytes])
        return Task(promise, b"", time.monotonic() - begin, room, slots)

    @functools.cached_property
    def _columns(self) -> dict[Kind, tuple[PartField, ...]]:
        return {kind: processor.columns for kind, processor in self._processors.items()}

    def _received(self, at: PartPlace, item: Any) -> Decoded:
        if isinstance(item, MeshfeedError):
            raise item
        if isinstance(item, Failure):
            raise StoreError(f"{at.told()} failed in worker {item.worker}:\n{item.text}")
        return item


def by_store(places: Iterable[PartPlace]) -> Mapping[Any, list[PartPlace]]:
    """The parts of each store, in the order of its bytes."""
    found = dict[Any, list[PartPlace]]()
    for at in sorted(dict.fromkeys(places), key=attrgetter("promise.begin")):
        found.setdefault(at.store, []).append(at)
    return found


def ranges_of(places: Sequence[PartPlace]) -> tuple[Longs, Longs]:
    """Begin and end of the bytes of each part of a store; int64 [n] twice."""
    begins, sizes = np.array([(at.promise.begin, at.promise.num_bytes) for at in places], np.int64).T
    return begins, begins + sizes


def _tasks(places: Iterable[PartPlace]) -> dict[PartPlace, Task]:
    """All that decoding some parts needs. What is of one store is read together."""
    tasks: dict[PartPlace, Task] = {}
    for store, mine in by_store(places).items():
        begin = time.monotonic()
        data = store.read_part_ranges(*ranges_of(mine))
        read_s, stop = (time.monotonic() - begin) / len(mine), 0
        for at in mine:
            start, stop = stop, stop + at.promise.num_bytes
            tasks[at] = Task(at.promise, data[start:stop].tobytes(), read_s)
    return tasks


_OF_BYTES = (SyntaxError, ValueError, IndexError, OverflowError, struct.error, zlib.error)
"""What Pillow's decoders raise for broken bytes beside OSError. A TypeError is of an argument."""


def made_of(processors: Mapping[Kind, Processor], task: Task) -> Made | Bad:
    """A part decoded, and compared with what its processor and rule promise."""
    processor, promise = processors[task.promise.kind], task.promise
    drawn = np.random.Generator(philox(*promise.seeds))  # `rng` of these, which are whole
    try:
        given: Any = processor.decoded(task.data, promise.size, drawn)
    except Exception as error:
        return _failed(processor, error)
    if not isinstance(given, Mapping):
        return Bad(f"{processor!r} gives {type(given).__name__}; give each field's array", is_broken=False)
    made = dict(cast(Mapping[str, Array], given))
    if wrong := _other_arrays(processor.columns, promise.rows, made):
        return Bad(f"{processor!r} {wrong}", is_broken=False)
    try:
        tokens = processor.num_tokens(made)
    except Exception as error:
        return Bad(f"num_tokens of {processor!r} raises {type(error).__name__}: {error}", is_broken=False)
    if tokens != promise.tokens:
        return Bad(
            f"{processor.rule!r} counts {promise.tokens} tokens for {promise.size}, and {processor!r} makes "
            f"{tokens}; correct the one that is wrong",
            is_broken=False,
        )
    return made


def _failed(processor: Processor, error: Exception) -> Bad:
    """What an error of a processor says of the part: that it is broken only if the error is a codec's."""
    told = str(error) if isinstance(error, PartError) else f"{type(error).__name__}: {error}"
    if _is_of_the_part(error):
        return Bad(told, is_broken=True)
    if isinstance(error, (ImportError, MemoryError, MeshfeedError)):  # of this machine or recipe
        return Bad(f"{processor!r}: {told}", is_broken=False)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return Bad(
        f"{processor!r}: {told} ({at.filename}, line {at.lineno}); correct the processor, or let it raise "
        f"mf.errors.PartError where the part's bytes are at fault",
        is_broken=False,
    )


def _is_of_the_part(error: Exception) -> bool:
    """Whether an error is a codec's: PartError, one of Pillow's decoders, an early end, or no system's."""
    if isinstance(error, MeshfeedError):
        return isinstance(error, PartError)
    if isinstance(error, OSError):
        return error.errno is None  # as Pillow raises it; the system's have a number
    if isinstance(error, EOFError) or type(error).__name__ == "DecompressionBombError":
        return True
    return isinstance(error, _OF_BYTES) and _in_decoder(error)


def _in_decoder(error: Exception) -> bool:
    """Whether Pillow raised an error while it read a file; elsewhere it tells of wrong arguments, too."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [name for name in modules if name.startswith("PIL.")]
    return own[-1:] == modules[-1:] and any(name.endswith(("ImageFile", "ImagePlugin")) for name in own)


def blank_of(processor: Processor, size: PartSize, rows: Mapping[str, int]) -> Made:
    """What stands for a part that cannot be decoded. rows: of each field. Raises RecipeError."""
    blank = dict(processor.blank(size, rows))
    if wrong := _other_arrays(processor.fields, rows, blank):
        raise RecipeError(f"blank({size}) {wrong}")
    return {name: array.copy() for name, array in blank.items()}  # it may give the same ones again


def _other_arrays(promises: Sequence[PartField], rows: Mapping[str, int], made: Made) -> str | None:
    """How arrays differ from some fields or columns, and the rows of each."""
    promised, given = dict[str, Any](), dict[str, Any]()
    for each in promises:
        promised[each.name] = each.dtype, (rows[each.name], *each.shape)
    for name, array in made.items():
        is_array = isinstance(array, np.ndarray)
        given[name] = (array.dtype.name, array.shape) if is_array else type(array).__name__
    if given == promised:
        return None
    return f"makes {given}, and its fields and rows say {promised}; make them equal"


def _decoded(
    processors: Mapping[Kind, Processor], task: Task, cpu_clock: Callable[[], float], *, copies: bool = False
) -> Decoded:
    """copies: of the arrays, where the processor may write the next part's into its own."""
    begin, cpu = time.monotonic(), cpu_clock()
    made = made_of(processors, task)
    if copies and not isinstance(made, Bad):
        for name, array in made.items():
            made[name] = array.copy()
    busy_s, cpu_s = time.monotonic() - begin, cpu_clock() - cpu
    return Decoded(made, len(task.data), task.read_s, busy_s, cpu_s)


def _decoded_in_worker(processors: Mapping[Kind, Processor], arena: Arena | None, task: Task) -> Decoded:
    """What travels of a part: large arrays lie in the task's room."""
    if arena is None or task.room is None:
        return _decoded(processors, task, time.process_time)
    begin = task.room.offset
    task = replace(task, data=arena.written(begin, task.promise.num_bytes).tobytes())
    decoded = _decoded(processors, task, time.process_time)
    if not isinstance(decoded.made, Bad):
        for name, slot in task.slots.items():
            array = decoded.made[name]
            memory = arena.written(begin + slot, array.nbytes)
            memory.view(array.dtype.name).reshape(array.shape)[...] = array  # in this machine's byte order
            decoded.made[name] = Placed(slot, array.dtype.name, array.shape)
    return decoded


def _arrays_of(task: Task, decoded: Any) -> Any:
    """What a worker made, the arrays in the task's room by reference; they keep it taken."""
    memory = None if task.room is None else task.room.memory
    if memory is None or not isinstance(decoded, Decoded) or isinstance(decoded.made, Bad):
        return decoded
    for name, each in decoded.made.items():
        if isinstance(each, Placed):
            num_bytes = math.prod(each.shape) * np.dtype(each.dtype).itemsize
            array = memory[each.begin : each.begin + num_bytes].view(each.dtype)
            decoded.made[name] = array.reshape(each.shape)
    return decoded


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _is_full(items: Iterable[Any]) -> bool:
    held = 0
    for item in items:
        if isinstance(item, Decoded) and not isinstance(made := item.made, Bad):
            # the stored bytes lie in one room with the arrays
            held += item.num_bytes + sum(array.nbytes for array in made.values())
    return held >= AHEAD_BYTES
