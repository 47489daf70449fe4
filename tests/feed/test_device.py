"""Memory of tensors: used again, never while anybody holds it. Fields that a device widens."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import meshfeed as mf
from corpus import write_corpus
from meshfeed.feed.device import OnCuda, OnHost
from meshfeed.feed.nested import leaves_of
from meshfeed.sequence import SequenceRule
from meshfeed.sequence.windows import Rows
from meshfeed.testing import difference
from soak import some
from user_datasets import Rich, samples_recipe


@some(2)
@pytest.mark.parametrize("seed", range(5))
def test_memory_that_is_held_is_never_given_out(seed: int) -> None:
    rng, host = random.Random(seed), OnHost()
    held: list[tuple[int, torch.Tensor]] = []
    for number in range(2_000):
        shape = (rng.randint(1, 3), rng.randint(0, 700))
        array = host.allocate(shape, rng.choice(["int64", "float32", "bool", "uint16"]))
        assert array.shape == shape
        assert array.flags.c_contiguous and array.flags.writeable
        array[:] = number % 2
        held.append(
            (number % 2, torch.from_numpy(array[..., : rng.randint(0, shape[1])]))
        )  # a part holds all
        del array
        while len(held) > rng.randint(1, 60):
            held.pop(rng.randrange(len(held)))
        assert all((tensor == value).all() for value, tensor in held)


def test_packs_of_many_sizes_use_the_memory_of_few() -> None:
    rng, host = random.Random(0), OnHost()
    places: set[int] = set()
    for _ in range(3_000):
        array = host.allocate((1, rng.randint(30_000, 33_000)), "int64")
        places.add(array.ctypes.data)
        del array
    assert len(places) <= 3


def test_memory_goes_when_more_is_held_than_is_worth_keeping() -> None:
    host = OnHost()
    held = [host.allocate((1, 1_000), "uint8") for _ in range(1_000)]
    for value, array in enumerate(held):
        array[:] = value % 251
    assert all((array == value % 251).all() for value, array in enumerate(held))


class Event:
    """Of a stream whose work ends when the test says so."""

    made: ClassVar[list[Event]] = []

    def __init__(self) -> None:
        self.is_done = False
        self.made.append(self)

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return self.is_done


class Stream:
    """One whose work ends once it is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._before = {*threading.enumerate()}
        self.producers: list[int] = []  # alive when it was waited for

    def synchronize(self) -> None:
        began = {*threading.enumerate()} - self._before
        self.producers.append(sum(each.name == "meshfeed-prefetch" for each in began))
        for event in Event.made:
            event.is_done = True


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> OnCuda:
    """The placer of a CUDA device, with the host in place of one."""
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(OnCuda, "allocate", lambda self, shape, dtype: np.empty(shape, dtype))
    return OnCuda(torch.device("cpu:0"))


def test_page_locked_memory_is_kept_until_its_copies_are_done(on_cuda: OnCuda) -> None:
    held: list[weakref.ref[Any]] = []
    for _ in range(4):
        array = on_cuda.allocate((2, 8), "int64")
        held.append(weakref.ref(array))
        on_cuda.place([{"tokens": array[1:]}])
        del array
    assert all(each() is not None for each in held)
    Event.made[0].is_done = Event.made[1].is_done = Event.made[3].is_done = True
    on_cuda.place([])
    assert [each() is not None for each in held] == [False, False, True, True], "a stream works in order"


def test_a_capture_on_another_thread_goes_on(on_cuda: OnCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph's capture fails if a thread allocates or copies meanwhile, unless its mode says otherwise."""
    now, when_recorded = [0], list[int]()

    def exchange(mode: Any) -> int:
        mode._obj.value, now[0] = now[0], mode._obj.value
        return 0

    monkeypatch.setattr("meshfeed.feed.device._exchange_of_mode", lambda: exchange)
    monkeypatch.setattr(Event, "record", lambda self, stream: when_recorded.append(now[0]))
    on_cuda.place([{"tokens": np.arange(4)}])
    assert (when_recorded, now) == ([1], [0]), "of this thread's own captures alone, as long as it copies"
    with pytest.raises(TypeError):
        on_cuda.place([{"tokens": np.array(["no number"])}])
    assert now == [0]


def test_a_thread_works_on_its_device_before_it_sets_a_stream(
    on_cuda: OnCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device is the first one, and leaving a stream sets the device before: every rank would use GPU 0."""
    entered = list[str]()

    def entering(what: Any) -> contextlib.AbstractContextManager[None]:
        entered.append("stream" if isinstance(what, Stream) else str(what))
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(torch.cuda, "stream", entering)
    on_cuda.place([{"tokens": np.arange(4)}])
    assert entered == ["cpu:0", "stream"]


def taken(feed: mf.Feed, steps: int) -> list[Any]:
    """The microbatches of some steps."""
    with feed:
        return [dict(microbatch) for _, step in zip(range(steps), feed) for microbatch in step.microbatches]


def never(*_: Any) -> Any:
    raise AssertionError("built on the host")


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        (mf.Windows(48, reset_position_ids=True, reset_attention_mask=True), {"micro_batch_size": 2}),
        (mf.Documents(), {"packing": mf.Packing(capacity=2_000)}),
    ],
    ids=("windows", "packs"),
)
def test_a_feed_for_a_device_that_widens_builds_nothing_on_the_host(
    rule: Any, how: dict[str, Any], tmp_path: Path, on_cuda: OnCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "c", num_tokens=9_000)
    recipe = mf.Recipe(data=mf.open(tmp_path / "c"), sequence=rule, batch=mf.Batch(sequences=8))
    wanted = taken(mf.Feed(recipe, **how), 3)
    monkeypatch.setattr("meshfeed.feed.run.placer_of", lambda device: on_cuda)
    monkeypatch.setattr(on_cuda, "receive", lambda microbatch, ticket: None)
    for kind in (Rows, mf.Documents):
        monkeypatch.setattr(kind, "build", never)
    found = taken(mf.Feed(recipe, **how), 3)
    assert (differs := difference(wanted, found)) is None, differs


def test_each_microbatch_is_received_when_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop may take some on a side stream, as before it captures a CUDA graph, though all were read together."""
    stream, received = "side", list[tuple[int, str]]()

    class Streams(OnHost):
        def receive(self, microbatch: mf.Microbatch, ticket: Any) -> None:
            received.append((microbatch.index, stream))

    write_corpus(tmp_path / "c", num_tokens=9_000)
    recipe = mf.Recipe(data=mf.open(tmp_path / "c"), sequence=mf.Windows(48), batch=mf.Batch(sequences=4))
    monkeypatch.setattr("meshfeed.feed.run.placer_of", lambda device: Streams())
    with mf.Feed(recipe) as feed:
        for microbatch in next(iter(feed)).microbatches:
            assert received[-1] == (microbatch.index, stream)
            stream = "main"
        assert received == [(0, "side"), (1, "main"), (2, "main"), (3, "main")]
    received.clear()
    with mf.Feed(recipe, stage_map=mf.StageMap(pp=1, vpp=2)) as feed:
        first, last = (next(iter(stage)).microbatches for stage in feed.virtual_stages)
        stream = "first"
        next(first)
        stream = "last"
        next(last)
        assert received == [(0, "first"), (0, "last")]


def test_a_loop_waits_for_the_copies_of_what_it_takes(
    on_cuda: OnCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the allocator gives none of its memory to another before the loop's stream is done with it."""
    waited, recorded = list[Event](), set[int]()
    current = SimpleNamespace(wait_event=waited.append)

    def memory_of(value: Any) -> set[int]:
        return {each.untyped_storage().data_ptr() for each in leaves_of(value) if torch.is_tensor(each)}

    def record(tensor: torch.Tensor, stream: Any) -> None:
        assert stream is current
        recorded.update(memory_of([tensor]))

    monkeypatch.setattr("meshfeed.feed.run.placer_of", lambda device: on_cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    data = Rich()
    ids = mf.Field(name="ids", dtype="int32", split=True)
    recipe = samples_recipe(data, ids, "image", "pixels", packed=True, lengths=data.lengths())
    with mf.Feed(recipe, packing=mf.Packing(capacity=32)) as feed:
        for microbatch in next(iter(feed)).microbatches:
            held = memory_of(dict(microbatch))
            assert len(held) > 3
            assert held <= recorded
            assert waited and waited[-1] in Event.made
            recorded.clear()
            waited.clear()


def test_a_loop_that_ends_early_waits_for_its_copies(
    tmp_path: Path, on_cuda: OnCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "c", num_tokens=9_000)
    recipe = mf.Recipe(data=mf.open(tmp_path / "c"), sequence=mf.Windows(48), batch=mf.Batch(sequences=8))
    monkeypatch.setattr("meshfeed.feed.run.placer_of", lambda device: on_cuda)
    monkeypatch.setattr(on_cuda, "receive", lambda microbatch, ticket: None)
    assert taken(mf.Feed(recipe), 1)
    assert Event.made and all(event.is_done for event in Event.made)
    assert on_cuda._stream.producers == [0], "once, when the producer has ended"
    assert not on_cuda._in_flight


class Shifted(mf.Windows):
    """Replaces `build` alone, so the table of its base is not its own."""

    def build(self, *args: Any) -> Any:
        return [arrays | {"tokens": arrays["tokens"] + 1} for arrays in super().build(*args)]


@pytest.mark.parametrize("rule", [Shifted(48), mf.Masked(32, vocab_size=60_000, mask_token=7)], ids=repr)
def test_a_rule_without_a_table_is_built_on_the_host(
    rule: SequenceRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "c", num_tokens=9_000)
    recipe = mf.Recipe(data=mf.open(tmp_path / "c"), sequence=rule, batch=mf.Batch(sequences=8))
    wanted = taken(mf.Feed(recipe), 2)
    monkeypatch.setattr(OnHost, "fill", lambda self, table: table)
    assert difference(wanted, taken(mf.Feed(recipe), 2)) is None
