"""Arrays -> tensors on the model's device."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch

from meshfeed.columns import Array, Arrays, Constant, Stacked
from meshfeed.errors import OptionError
from meshfeed.feed.batch import Fields, Microbatch, Together, Value
from meshfeed.feed.nested import changed, leaves_of
from meshfeed.sequence import FieldTable, Portion, widened

_MOST_KEPT = 128
_MOST_CONSTANTS = 16
_lazy_clone = getattr(torch, "_lazy_clone", torch.clone)  # private: torch has no public copy-on-write
_FREE = 2  # sys.getrefcount of an array that only its list holds: the list's reference and the call's


class Placer(Protocol):
    """Moves a microbatch's arrays to their device.

    Attributes:
        widens: whether it takes the tables of fields, and expands them itself.
    """

    widens: bool

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An uninitialised array to build a field in."""
        ...

    def place(self, built: Sequence[Arrays] | FieldTable) -> tuple[Sequence[Mapping[str, Value]], Any]:
        """The tensors of some microbatches, and a ticket for `receive`; called on the producer's thread."""
        ...

    def receive(self, microbatches: Sequence[Microbatch], ticket: Any) -> None:
        """Make the tensors safe to use on the caller's current stream."""
        ...

    def synchronize(self) -> None:
        """Wait until no copy is in flight; nothing is placed afterwards."""
        ...


def placer_of(device: str | torch.device) -> Placer:
    """The placer for a device. Raises OptionError for one that this machine lacks."""
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return OnHost()
    if (wanted.index or 0) >= (count := torch.cuda.device_count()):
        raise OptionError(
            f"device={str(wanted)!r}: torch sees {count} CUDA devices here; give one of them, or 'cpu'"
        )
    return OnCuda(wanted)


class OnHost:
    """Tensors that share the arrays' memory, which is reused once nothing refers to it.

    New memory costs a page fault per 4 KiB, several times the cost of filling it. Packs differ in size, so
    the pool holds byte buffers of a few sizes. Every array and tensor made from a buffer refers to it.
    """

    widens = False

    def __init__(self) -> None:
        self._made: dict[int, list[Array]] = {}
        self._constants = _Constants(torch.tensor)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """See Placer. Of the free buffers, the one used last: the processor may still have it cached."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        room = _room_for(num_bytes)
        made = self._made.setdefault(room, [])
        for at in range(len(made) - 1, -1, -1):
            if sys.getrefcount(made[at]) == _FREE:
                made.append(made.pop(at))
                break
        else:
            made.append(np.empty(room, np.uint8))
            if len(made) > _MOST_KEPT:
                del made[0]
        return made[-1][:num_bytes].view(dtype).reshape(shape)

    def place(self, built: Sequence[Arrays] | FieldTable) -> tuple[Sequence[Mapping[str, Value]], Any]:
        if isinstance(built, FieldTable):
            return _widened(built, lambda array: torch.from_numpy(array.copy()), _tensors), None
        return _placed(built, self._tensors), None

    def _tensors(self, value: Any, times: int = 1) -> Value:
        if isinstance(value, Constant):
            # a copy-on-write clone, as writing to a field must not change later microbatches'
            return _lazy_clone(self._constants.of(value, times))
        return _tensors(value)

    def receive(self, microbatches: Sequence[Microbatch], ticket: Any) -> None:
        """No copy is in flight."""

    def synchronize(self) -> None:
        """No copy is in flight."""


class OnCuda:
    """Copies from page-locked memory on a separate stream, so copies overlap with training.

    Page-locked memory is kept until the event after its copies. PyTorch keeps it too, but knows a buffer that
    was filled as an array only by its first byte, so not where a copy starts further in.
    """

    widens = True

    def __init__(self, device: torch.device) -> None:
        current = torch.device("cuda", torch.cuda.current_device())
        self._device = device if ":" in str(device) else current
        self._stream = torch.cuda.Stream(self._device)
        self._constants = _Constants(lambda array: torch.tensor(array).pin_memory())
        self._in_flight: deque[tuple[torch.cuda.Event, list[Any]]] = deque()

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Page-locked."""
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()

    def place(self, built: Sequence[Arrays] | FieldTable) -> tuple[Sequence[Mapping[str, Value]], Any]:
        staged: list[Any] = [built]

        def stage(array: Array) -> torch.Tensor:
            staged.append(self.allocate(array.shape, array.dtype.name))
            staged[-1][...] = array
            return torch.from_numpy(staged[-1]).to(self._device, non_blocking=True)

        with torch.cuda.stream(self._stream):
            if isinstance(built, FieldTable):
                fields = _widened(built, stage, self._copied)
            else:
                fields = _placed(built, self._copied)
            done = torch.cuda.Event()
            done.record(self._stream)
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        self._in_flight.append((done, staged))
        return fields, done

    def receive(self, microbatches: Sequence[Microbatch], ticket: Any) -> None:
        """The current stream waits for the copies, and the allocator for the current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ticket)
        for value in (value for microbatch in microbatches for value in microbatch.fields.values()):
            for tensor in leaves_of(value):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Page-locked memory that is freed under a copy could be filled again before it is read."""
        self._stream.synchronize()
        self._in_flight.clear()

    def _copied(self, value: Any, times: int = 1) -> Value:
        return on_device(
            self._constants.of(value, times) if isinstance(value, Constant) else _tensors(value), self._device
        )


def on_device(value: Any, device: str | torch.device) -> Any:
    """A value with all tensors in it on a device."""
    return changed(value, lambda v: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v)


class _Constants:
    """The tensors of recently used constants."""

    def __init__(self, make: Callable[[Array], torch.Tensor]) -> None:
        self._make = make
        self._known: OrderedDict[tuple[int, int], tuple[Constant, torch.Tensor]] = OrderedDict()

    def of(self, array: Constant, times: int) -> torch.Tensor:
        """The constant's rows, so many times, as a tensor that is made once; do not write to it."""
        key = id(array), times
        if key not in self._known:
            self._known[key] = array, self._make(np.concatenate([array.view(np.ndarray)] * times))
            if len(self._known) > _MOST_CONSTANTS:
                self._known.popitem(last=False)
        return self._known[key][1]


def _room_for(num_bytes: int) -> int:
    """Round up, by at most a quarter, to one of four sizes per power of two."""
    grain = 1 << max((num_bytes - 1).bit_length() - 3, 6)
    return -(-num_bytes // grain) * grain


def microbatches_of(
    portion: Portion, built: Sequence[Arrays] | FieldTable, placer: Placer
) -> tuple[list[Microbatch], Any]:
    """The microbatches of a portion on their device, and the placer's ticket for them."""
    placed, ticket = placer.place(built)
    return [Microbatch(m, fields, portion) for m, fields in zip(portion.microbatches, placed)], ticket


def _widened(
    table: FieldTable, copy: Callable[[Array], torch.Tensor], tensors: Callable[[Any], Value]
) -> Sequence[Mapping[str, Value]]:
    """The fields of each microbatch, from their table."""
    return _together(widened(table, copy), table.ready, tensors)


def _placed(built: Sequence[Arrays], tensors: Callable[[Any, int], Value]) -> Sequence[Mapping[str, Value]]:
    """The fields of each microbatch."""
    if isinstance(built, Stacked) and built.is_whole:
        rows = {name: cast(torch.Tensor, tensors(array, len(built))) for name, array in built.rows.items()}
        return _together(rows, built.others, lambda value: tensors(value, 1))
    return [{name: tensors(value, 1) for name, value in arrays.items()} for arrays in built]


def _together(
    rows: Mapping[str, torch.Tensor], others: Sequence[Arrays], tensors: Callable[[Any], Value]
) -> list[Fields]:
    """The fields of each microbatch: its share of the rows of all, and its others."""
    together = Together(rows, len(others))
    return [
        Fields(together, at, {name: tensors(value) for name, value in arrays.items()})
        for at, arrays in enumerate(others)
    ]


def _tensors(value: Any) -> Value:
    if isinstance(value, np.ndarray):
        # A read-only array is a column passed through: a view of a buffer that is reused.
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return cast(Value, [_tensors(v) if isinstance(v, np.ndarray) else v for v in value])
