"""Producing ahead, and what the loop is told that it waited for."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import types
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import transports
import world
from corpus import recipe_of, write_corpus
from delays import LEAP_S, delayed
from meshfeed.feed.prefetcher import Prefetcher
from meshfeed.metrics.recorder import Span, StageClock, exposed_wait, work
from soak import cases

SOON_S = 600.0


# -- the law ---------------------------------------------------------------------------------------


@st.composite
def diaries(draw: st.DrawFn) -> list[Span]:
    """A producer's diary: stages one after the other, gaps between them; times exact in binary."""
    edges = sorted(draw(st.lists(st.integers(0, 1 << 20), min_size=0, max_size=16)))
    names = st.sampled_from(["plan", "read", "deliver", "build"])
    return [Span(draw(names), a / 64, b / 64) for a, b in zip(edges[::2], edges[1::2])]


@settings(max_examples=cases(100, 3_000), deadline=None)
@given(spans=diaries(), one=st.integers(0, 1 << 20), other=st.integers(0, 1 << 20))
def test_the_parts_sum_to_the_whole_wait(spans: list[Span], one: int, other: int) -> None:
    start, stop = min(one, other) / 64, max(one, other) / 64
    wait = exposed_wait(start, stop, spans)
    assert sum(wait.values()) == stop - start
    assert all(seconds > 0 for seconds in wait.values())
    for stage in {span.stage for span in spans}:
        ticks = [(max(s.start, start), min(s.stop, stop)) for s in spans if s.stage == stage]
        assert wait.get(stage, 0) == sum(b - a for a, b in ticks if b > a)


def test_no_wait_has_no_parts() -> None:
    assert exposed_wait(3, 3, [Span("read", 0, 9)]) == {}
    assert exposed_wait(0, 2, []) == {"other": 2}


# -- on a clock that only moves when told ----------------------------------------------------------


class FakeTime:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("meshfeed.metrics.recorder.time", fake)
    monkeypatch.setattr("meshfeed.feed.run.time", fake)
    return fake


def test_what_was_made_before_it_was_asked_for_costs_nothing(clock: FakeTime) -> None:
    stages, made = StageClock(), threading.Semaphore(0)

    def items() -> Iterator[int]:
        for i in range(5):
            with stages.stage("read"):
                clock.now += 7
            yield i
            made.release()  # the queue holds it

    ahead = Prefetcher(items(), stages, 4)
    ahead.start()
    for i in range(5):
        assert made.acquire(timeout=SOON_S)
        item, spans = ahead.get(SOON_S)
        assert (item, exposed_wait(clock.now, clock.now, spans), work(spans)) == (i, {}, {"read": 7})
    with pytest.raises(StopIteration):
        ahead.get(SOON_S)
    assert ahead.join(SOON_S)


def test_at_most_depth_items_are_made_ahead() -> None:
    made: list[int] = []
    reached = threading.Event()

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            if i == 3:
                reached.set()
            yield i

    ahead = Prefetcher(items(), StageClock(), 3)
    ahead.start()
    assert reached.wait(SOON_S)  # three in the queue, and one that waits for room
    assert ahead.get(SOON_S)[0] == 0
    ahead.stop()
    assert ahead.join(SOON_S), "stopped: the iterator runs to its end, and nothing is kept"
    assert made == list(range(100))


@pytest.mark.parametrize(("light", "ahead_of_all"), [(0, 3), (2, 7), (100, 7)])
def test_light_items_go_with_the_heavy_ones_but_not_without_end(light: int, ahead_of_all: int) -> None:
    """Depth 2, a heavy item after so many light ones; the last that is made waits for room."""
    made: list[int] = []
    reached = threading.Event()

    def items() -> Iterator[float]:
        for i in range(200):
            made.append(i)
            if len(made) == ahead_of_all:
                reached.set()
            yield i if i % (light + 1) == light else float(i)

    ahead = Prefetcher(items(), StageClock(), 2, int)
    ahead.start()
    assert reached.wait(SOON_S) and len(made) == ahead_of_all
    assert ahead.num_ready == {0: 2, 2: 2, 100: 0}[light]
    assert [ahead.get(SOON_S)[0] for _ in range(20)] == list(range(20))
    ahead.stop()
    assert ahead.join(SOON_S)


def test_errors_come_in_their_turn_but_a_lost_peer_at_once() -> None:
    for error, turns in ((ValueError("late"), 3), (mf.errors.PeerError("gone", [1]), 0)):
        over = threading.Event()

        def items(error: Exception = error, over: threading.Event = over) -> Iterator[int]:
            yield from range(3)
            over.set()
            raise error

        ahead = Prefetcher(items(), StageClock(), 8)
        ahead.start()
        assert over.wait(SOON_S) and ahead.join(SOON_S)
        assert [ahead.get(SOON_S)[0] for _ in range(turns)] == list(range(turns))
        for _ in range(2):
            with pytest.raises(type(error)):
                ahead.get(SOON_S)


class Held:
    """Something dear that a producer's frame holds."""


@pytest.mark.parametrize("fails_after_stop", [True, False])
def test_what_a_stopped_producer_held_is_let_go_at_once(fails_after_stop: bool) -> None:
    failing, gone = threading.Event(), threading.Event()

    def producer() -> Iterator[int]:
        held = Held()
        weakref.finalize(held, gone.set)
        yield 0
        failing.wait(SOON_S)
        raise RuntimeError("interrupted")

    prefetcher = Prefetcher(producer(), StageClock(), depth=2)
    gc.disable()
    try:
        prefetcher.start()
        assert prefetcher.get(SOON_S)[0] == 0
        if not fails_after_stop:
            failing.set()
            assert prefetcher.join(SOON_S)
        prefetcher.stop()
        failing.set()
        assert prefetcher.join(SOON_S)
        assert gone.is_set()
    finally:
        gc.enable()


def test_a_late_item_is_a_timeout_and_comes_after_all() -> None:
    go = threading.Event()

    def items() -> Iterator[int]:
        go.wait()
        yield 1

    ahead = Prefetcher(items(), StageClock(), 1)
    ahead.start()
    with pytest.raises(TimeoutError):
        ahead.get(0.05)
    go.set()
    assert ahead.get(SOON_S)[0] == 1


def test_a_depth_of_0_makes_each_item_when_asked(clock: FakeTime) -> None:
    stages = StageClock()

    def items() -> Iterator[int]:
        with stages.stage("read"):
            clock.now += 2
        with stages.stage("build"):
            clock.now += 1
        yield 1

    inline = Prefetcher(items(), stages, 0)
    inline.start()
    clock.now += 50
    asked = clock.now - 4
    item, spans = inline.get(SOON_S)
    assert (item, exposed_wait(asked, clock.now, spans)) == (1, {"read": 2, "build": 1, "other": 4})
    with pytest.raises(StopIteration):
        inline.get(SOON_S)
    assert inline.join(SOON_S)


def test_an_iterator_that_cannot_end_is_left_in_time() -> None:
    release = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        release.wait()

    inline = Prefetcher(items(), StageClock(), 0)
    assert inline.get(SOON_S)[0] == 1
    inline.stop()
    assert not inline.join(0.05)
    release.set()
    assert inline.join(SOON_S)


# -- through the feed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_slow_read_shows_under_read(
    corpus: str, clock: FakeTime, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    recipe, reading, asked, calls = recipe_of(corpus), threading.Event(), threading.Event(), itertools.count()
    load, get = recipe.sequence.load, Prefetcher.get

    def slow(*args: Any) -> Any:
        if next(calls) == 6:
            reading.set()
            assert prefetch == 0 or asked.wait(SOON_S)
            clock.now += 5
        return load(*args)

    def asking(self: Any, *args: Any) -> Any:
        if reading.is_set() and not self._queue:  # asks for what is being read, not for what was made before
            asked.set()
        return get(self, *args)

    object.__setattr__(recipe.sequence, "load", slow)
    monkeypatch.setattr(Prefetcher, "get", asking)
    with mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch)) as feed:
        for step in itertools.islice(feed, 9):
            assert step.index != 6 or prefetch == 0 or reading.wait(SOON_S)
            for _ in step.microbatches:
                pass
            assert step.stats.exposed_wait_s == ({"read": 5.0} if step.index == 6 else {}), step.index


def late_to_the_meeting(rank: int, path: str) -> dict[str, float]:
    """Rank 1 joins half a second after rank 0 began to."""
    store, stage = dist.distributed_c10d._get_default_store(), StageClock.stage

    @contextlib.contextmanager
    def announced(clock: StageClock, name: str) -> Iterator[None]:
        with stage(clock, name):
            if name == "start":
                store.set("joins", "1")
            yield

    if rank == 0:
        StageClock.stage = announced
    else:
        store.wait(["joins"], timedelta(seconds=SOON_S))
        threading.Event().wait(0.5)
    return next(
        iter(mf.Feed(recipe_of(path), mf.Layout.parse("tp2"), transport=mf.Transport(delivery="share")))
    ).stats["exposed_wait_s"]


def test_waiting_for_peers_to_join_shows_under_start(corpus: str) -> None:
    punctual, _ = world.run(late_to_the_meeting, 2, corpus)
    assert punctual["start"] >= 0.5


def slow_reader(rank: int, path: str, delivery: str, folder: Path) -> dict[str, float]:
    """Rank 0's storage is late for the step that both ranks are waiting for."""
    recipe, step, calls, get = recipe_of(path), threading.Event(), itertools.count(), Prefetcher.get
    load = recipe.sequence.load

    def slow(*args: Any) -> Any:
        if next(calls) == 4:
            end = time.monotonic() + SOON_S
            while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
                threading.Event().wait(0.01)
            threading.Event().wait(0.5)
        return load(*args)

    def asking(self: Any, *args: Any) -> Any:
        if step.is_set():
            (folder / f"rank {rank} asks").touch()
        return get(self, *args)

    if rank == 0:
        object.__setattr__(recipe.sequence, "load", delayed(slow, {4}))
    Prefetcher.get = asking
    steps = iter(
        mf.Feed(
            recipe,
            mf.Layout.parse("tp2"),
            transport=mf.Transport(delivery=delivery, timeout_s=600, prefetch=1),
        )
    )
    for _ in range(4):
        list(next(steps).microbatches)
    step.set()
    last = next(steps)
    list(last.microbatches)
    return last.stats.exposed_wait_s


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_a_slow_reader_shows_as_read_with_it_and_as_deliver_with_its_peers(
    corpus: str, delivery: str, tmp_path: Path
) -> None:
    reader, peer = world.run(slow_reader, 2, corpus, delivery, tmp_path)
    assert reader["read"] >= LEAP_S and reader.get("deliver", 0) < LEAP_S / 2
    assert peer["deliver"] > 0 and "read" not in peer


def test_stats_are_plain_numbers_of_their_own_step(corpus: str) -> None:
    with mf.Feed(recipe_of(corpus)) as feed:
        stats = [step.stats for step in itertools.islice(feed, 3)]
    assert len({id(each) for each in stats}) == 3
    counted = {"bytes_read", "bytes_fetched", "opens", "collectives", "delivered_bytes"}
    assert set(stats[0]) == {"exposed_wait_s", "work_s", "queue_depth", *counted}
    assert isinstance(types.MappingProxyType(stats[0])["bytes_read"], int)


def test_settings_outside_their_range_are_refused(corpus: str, tmp_path: Path) -> None:
    for wrong in ({"prefetch": -1}, {"timeout_s": 0}):
        with pytest.raises(mf.errors.RecipeError, match=next(iter(wrong))):
            mf.Feed(recipe_of(corpus), **transports.of(**wrong))
