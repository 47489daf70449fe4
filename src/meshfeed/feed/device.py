"""Arrays -> tensors on the model's device."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch

from meshfeed.arrays import Array, Arrays, Columns
from meshfeed.errors import OptionError
from meshfeed.feed.batch import Fields, Microbatch, Sources, Value
from meshfeed.feed.nested import changed, leaves_of
from meshfeed.recipe import Recipe
from meshfeed.sequence import FieldTable, Portion, RuleContents, RunField, widened

_MOST_KEPT = 128
_LARGE_BITS = 22  # above 4 MiB
_MOST_FIELDS = 16
_lazy_clone = getattr(torch, "_lazy_clone", torch.clone)  # private: torch has no public copy-on-write
_ONLY_OWN_CAPTURES = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_FREE = 2  # sys.getrefcount of an array that only its list holds: the list's reference and the call's

Built = Sequence[Arrays] | Sequence[Fields] | FieldTable
"""The fields of some microbatches: arrays or tensors of each, or runs of all."""


class Placer(Protocol):
    """Moves a microbatch's arrays to their device."""

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An uninitialised array to build a field in."""
        ...

    def fill(self, table: FieldTable) -> Built:
        """What `place` makes the fields of a table from."""
        ...

    def place(self, built: Built) -> tuple[Sequence[Mapping[str, Value]], Any]:
        """The tensors of some microbatches, and a ticket for `receive`; called on the producer's thread."""
        ...

    def receive(self, microbatch: Microbatch, ticket: Any) -> None:
        """Make the tensors safe to use on the caller's current stream. ticket: of `place`."""
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

    def __init__(self) -> None:
        self._made: dict[int, list[Array]] = {}
        self._choosing = threading.Lock()  # a run that was ended may still fill, on its own thread
        self._kept = OrderedDict[tuple[int, int, int], tuple[RunField, torch.Tensor]]()

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """See Placer. Of the free buffers, the one used last: the processor may still have it cached."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        # rounded up to one of four sizes per power of two, or, if large, to a power of two: a buffer takes
        # memory as it is written, and fewer sizes need fewer buffers
        bits = (num_bytes - 1).bit_length()
        grain = 1 << (bits if bits > _LARGE_BITS else max(bits - 3, 6))
        room = -(-num_bytes // grain) * grain
        with self._choosing:
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

    def fill(self, table: FieldTable) -> Built:
        """The fields as tensors."""
        rows: dict[str, torch.Tensor] = {}
        for each in table.fields:
            if each.is_kept:
                rows[each.field.name] = self._kept_of(each, table.shape)
                continue
            out = self.allocate(table.shape, each.field.dtype)
            each.write(out, table.columns)
            rows[each.field.name] = torch.from_numpy(out)
        return _together(rows, table.ready)

    def place(self, built: Built) -> tuple[Sequence[Mapping[str, Value]], Any]:
        if isinstance(built, FieldTable):
            return _together(widened(built, lambda array: torch.from_numpy(array.copy())), built.ready), None
        if built and isinstance(built[0], Fields):
            return cast(Sequence[Fields], built), None
        return [_tensors(cast(Arrays, each)) for each in built], None

    def _kept_of(self, field: RunField, shape: tuple[int, int]) -> torch.Tensor:
        """A field that is the same in other steps: made once, and not copied until somebody writes to it."""
        key = id(field), *shape
        if key not in self._kept:
            out = np.empty(shape, field.field.dtype)
            field.write(out)
            self._kept[key] = field, torch.tensor(out)
            if len(self._kept) > _MOST_FIELDS:
                self._kept.popitem(last=False)
        return _lazy_clone(self._kept[key][1])

    def receive(self, microbatch: Microbatch, ticket: Any) -> None:
        """No copy is in flight."""

    def synchronize(self) -> None:
        """No copy is in flight."""


class OnCuda:
    """Copies from page-locked memory on a separate stream, so copies overlap with training.

    Page-locked memory is kept until the event after its copies. PyTorch keeps it too, but knows a buffer that
    was filled as an array only by its first byte, so not where a copy starts further in.
    """

    def __init__(self, device: torch.device) -> None:
        current = torch.device("cuda", torch.cuda.current_device())
        self._device = device if ":" in str(device) else current
        self._stream = torch.cuda.Stream(self._device)
        self._in_flight: deque[tuple[torch.cuda.Event, list[Any]]] = deque()

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Page-locked."""
        with _working_on(self._device):
            return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()

    def fill(self, table: FieldTable) -> Built:
        """The table: the device expands it."""
        return table

    def place(self, built: Built) -> tuple[Sequence[Mapping[str, Value]], Any]:
        staged: list[Any] = [built]

        def stage(array: Array) -> torch.Tensor:
            staged.append(self.allocate(array.shape, array.dtype.name))
            staged[-1][...] = array
            return torch.from_numpy(staged[-1]).to(self._device, non_blocking=True)

        with _working_on(self._device), torch.cuda.stream(self._stream):
            if isinstance(built, FieldTable):
                fields = _together(widened(built, stage), built.ready, self._device)
            else:
                fields = [_tensors(cast(Arrays, each), self._device) for each in built]
            done = torch.cuda.Event()
            done.record(self._stream)
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((done, staged))
        return fields, done

    def receive(self, microbatch: Microbatch, ticket: Any) -> None:
        """The current stream waits for the copies, and the allocator for the current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ticket)
        for value in microbatch.fields.values():
            for tensor in leaves_of(value):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Page-locked memory that is freed under a copy could be filled again before it is read."""
        self._stream.synchronize()
        self._in_flight.clear()


@contextlib.contextmanager
def _working_on(device: torch.device) -> Generator[None]:
    """Let this thread allocate and copy for a device, whatever other threads do.

    The device of a new thread is the first one, where setting a stream would leave a context: half a GB of
    each rank's. And a capture of a CUDA graph forbids this to all threads, and fails, unless it says
    otherwise or they do. Here it is safe: the stream is our own.
    """
    with torch.cuda.device(device):
        exchange, mode = _exchange_of_mode(), ctypes.c_int(_ONLY_OWN_CAPTURES)
        is_set = exchange is not None and exchange(ctypes.byref(mode)) == 0  # then it has the one before
        try:
            yield
        finally:
            if exchange is not None and is_set:
                exchange(ctypes.byref(mode))


@cache
def _exchange_of_mode() -> Callable[..., int] | None:
    """The driver's function that sets how a thread minds captures; None without NVIDIA's driver."""
    try:
        return ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def built_by(
    placer: Placer,
    contents: RuleContents,
    recipe: Recipe,
    portion: Portion,
    columns: Columns | None,
    names: Sequence[str],
) -> Built:
    """The named fields of a portion, as the placer takes them: its rule's table, or what it builds itself."""
    if contents.has_table:
        return placer.fill(contents.table(recipe, portion, columns, names, placer.allocate))
    return contents.build(recipe, portion, columns, names, placer.allocate)


def on_device(value: Any, device: str | torch.device) -> Any:
    """A value with all tensors in it on a device."""
    return changed(value, lambda v: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v)


def microbatches_of(
    portion: Portion, built: Built, placer: Placer, sources: Sources | None = None
) -> tuple[list[Microbatch], Any]:
    """The microbatches of a portion on their device, and the placer's ticket for them."""
    placed, ticket = placer.place(built)
    made = zip(portion.microbatches, placed)
    return [Microbatch(m, fields, portion, sources) for m, fields in made], ticket


def _tensor(array: Array) -> torch.Tensor:
    # A read-only array is a column passed through: a view of a buffer that is reused.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _tensors(arrays: Arrays, device: torch.device | None = None) -> dict[str, Value]:
    """The fields of one microbatch, on the host without a device."""
    made: dict[str, Value] = {}
    for name, value in arrays.items():
        if isinstance(value, np.ndarray):
            made[name] = _tensor(value)
        else:
            made[name] = [_tensor(each) if isinstance(each, np.ndarray) else each for each in value]
    return made if device is None else on_device(made, device)


def _together(
    rows: Mapping[str, torch.Tensor], ready: Sequence[Arrays], device: torch.device | None = None
) -> list[Fields]:
    """The fields of each microbatch: its share of the rows of all, and its others."""
    made, parts = list[Fields](), dict[str, Sequence[torch.Tensor]]()
    for at, each in enumerate(ready):
        made.append(Fields(rows, parts, at, len(ready), _tensors(each, device) if each else {}))
    return made
