"""Another thread or a signal handler ends a run while its loop waits: the loop raises, and never just ends."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import meshfeed as mf
import meshfeed.feed.run
import transports
from corpus import recipe_of, write_corpus
from soak import SEED, cases

SOON_S = 60.0
FIELDS = mf.Samples("x")
BATCH, MICROBATCH = 4, 2  # two microbatches a step
PACKING = mf.Packing(capacity=8, policy="in_order")


class Gate:
    """Where a dataset or an iterator waits once, at item `at`, until a run has been stopped."""

    def __init__(self, at: int) -> None:
        self.at, self.reached, self.open = at, threading.Event(), threading.Event()

    def passed(self, count: int) -> None:
        if count == self.at and not self.reached.is_set():
            self.reached.set()
            assert self.open.wait(SOON_S)


class Gated:
    """A dataset behind a gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        self.gate.passed(at.index)
        return {"x": np.full(3, at.index)}


def items(gate: Gate) -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        gate.passed(number)
        yield {"tokens": np.full(3, number)}


def feed_of(gate: Gate, **options: Any) -> mf.Feed:
    recipe = mf.Recipe(
        data=mf.Mapped(Gated(gate)), sequence=FIELDS, batch=mf.Batch(sequences=BATCH), shuffle="none"
    )
    return mf.Feed(recipe, **transports.of(micro_batch_size=MICROBATCH, **options))


def exchange_of(gate: Gate, **options: Any) -> mf.Exchange:
    return mf.Exchange(items(gate), **transports.of(packing=PACKING, pulls=BATCH, **options))


def close(source: Any) -> None:
    source.close()


def load(source: Any) -> None:
    try:
        source.load_state_dict(source.state_dict())
    except mf.errors.StateError as busy:  # an iterator that does not return cannot be reset
        assert "still producing" in str(busy)


def when_stopped(source: Any, gate: Gate, end: Callable[[], object]) -> threading.Thread:
    """A thread that ends the run once the gate is reached, and opens the gate when the run is told to stop."""

    def ending() -> None:
        assert gate.reached.wait(SOON_S)
        run = source._loop.on
        while run._prefetcher.depth and not run._prefetcher._changed._waiters:
            threading.Event().wait(0.001)  # the loop still takes what was read ahead
        ends = threading.Thread(target=end)
        ends.start()
        while not run._stopped:
            threading.Event().wait(0.001)
        gate.open.set()
        ends.join(SOON_S)

    thread = threading.Thread(target=ending)
    thread.start()
    return thread


def by_signal(source: Any, end: Callable[[], object]) -> Callable[[], None]:
    """The same in a signal handler of the main thread, which may need a second signal to wake."""
    signal.signal(signal.SIGUSR1, lambda *_: end())
    main = threading.main_thread().ident

    def kill() -> None:
        run = source._loop.on
        while not run._stopped and main is not None:
            signal.pthread_kill(main, signal.SIGUSR1)
            threading.Event().wait(0.01)

    return kill


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("how", ["thread", "signal"])
@pytest.mark.parametrize("end", [close, load])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source_of", [feed_of, exchange_of])
@pytest.mark.parametrize("at", [0, 3 * BATCH + 2])
def test_a_loop_that_waits_raises(
    handler: None, source_of: Callable[..., Any], prefetch: int, end: Any, how: str, at: int
) -> None:
    gate = Gate(at)
    source, threads, taken = source_of(gate, prefetch=prefetch), threading.active_count(), 0
    ends = lambda: end(source)  # noqa: E731
    with source:
        ending = when_stopped(source, gate, by_signal(source, ends) if how == "signal" else ends)
        steps = iter(source)
        with pytest.raises(mf.errors.StateError, match="ended this iteration; start a new one"):
            for step in steps:
                for _ in step.microbatches:
                    taken += 1
        ending.join(SOON_S)
        with pytest.raises(mf.errors.StateError, match="start a new one"):
            next(steps)  # not StopIteration: the stream is not at its end
        step = taken // 2
        assert source.next_step == step and (step == at // BATCH or prefetch)
        assert next(iter(source)).index == step, "a new loop goes on where that one was"
    assert threading.active_count() == threads, "nothing runs on"


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source_of", [feed_of, exchange_of])
def test_a_dataset_or_an_iterator_may_close_its_own_feed(
    source_of: Callable[..., Any], prefetch: int
) -> None:
    gate = Gate(5)
    gate.open.set()
    source = source_of(gate, prefetch=prefetch)
    passed, gate.passed = gate.passed, lambda count: source.close() if count == 5 else passed(count)  # type: ignore
    with pytest.raises(mf.errors.StateError, match="start a new one"):
        for step in source:
            list(step.microbatches)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source_of", [feed_of, exchange_of])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_loop_that_raised_is_not_at_its_end(source_of: Any, prefetch: int, error: Any) -> None:
    gate = Gate(5)
    gate.open.set()
    passed = gate.passed

    def fails(count: int) -> None:
        passed(count)
        if count == 5:
            raise error("no such item")

    gate.passed = fails  # type: ignore[method-assign]
    with source_of(gate, prefetch=prefetch) as source:
        steps, told = iter(source), list[Any]()
        for _ in range(3):
            try:
                for step in steps:
                    told += [step.index] if list(step.microbatches) else []
            except BaseException as met:
                told.append(type(met))
    ended, *again = [each for each in told if isinstance(each, type)]
    raised = KeyboardInterrupt if error is KeyboardInterrupt else mf.errors.MeshfeedError
    assert told[:-3] == [0] and issubclass(ended, raised), told
    assert all(issubclass(each, mf.errors.MeshfeedError) for each in again) and len(again) == 2, told


def test_a_signal_handler_may_close_and_exit(handler: None) -> None:
    gate = Gate(5)
    source = feed_of(gate, prefetch=0)

    def leave(*_: object) -> None:
        source.close()
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        ending = when_stopped(source, gate, by_signal(source, leave))
        for step in source:
            list(step.microbatches)
    ending.join(SOON_S)
    assert next(iter(source)).index == 1
    source.close()


def test_what_a_run_holds_is_closed_when_its_producer_returns_late() -> None:
    gate, closed = Gate(MICROBATCH), threading.Event()
    feed = feed_of(gate, prefetch=2, timeout_s=0.1)
    with feed:
        next(iter(feed))
        run: Any = feed._loop.on
        run._resources.callback(closed.set)
        assert gate.reached.wait(SOON_S)
    assert not closed.is_set()
    gate.open.set()
    assert closed.wait(SOON_S)


def test_an_error_of_closing_a_run_is_raised_to_its_loop() -> None:
    def fails() -> None:
        raise RuntimeError("a copy has failed")

    feed = feed_of(Gate(-1), prefetch=2)
    with pytest.raises(RuntimeError, match="a copy has failed"), feed:
        next(iter(feed))
        run: Any = feed._loop.on
        run._resources.callback(fails)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return path


@pytest.mark.parametrize("prefetch", [0, 2])
def test_at_any_moment_and_from_several_threads(corpus: Path, prefetch: int) -> None:
    """Each loop raises StateError, and together they hand out every step but those that were cut off."""
    rng = np.random.default_rng(SEED)
    feed = mf.Feed(recipe_of(corpus, sequences=4), transport=mf.Transport(prefetch=prefetch))
    over = threading.Event()
    progress = threading.Semaphore(0)

    def disturb(act: Callable[[], object]) -> None:
        while not over.is_set():
            progress.acquire(timeout=0.05)
            act()

    acts = [feed.close, lambda: feed.load_state_dict(feed.state_dict()), feed.state_dict]
    others = [threading.Thread(target=disturb, args=(act,)) for act in acts]
    for other in others:
        other.start()
    try:
        for _ in range(cases(30, 600)):
            wanted, expected = int(rng.integers(1, 6)), None
            with pytest.raises(mf.errors.StateError, match="start a new one"):
                for step in feed:
                    assert expected in (None, step.index)
                    expected = step.index + 1
                    list(step.microbatches)
                    wanted -= 1
                    if not wanted:
                        progress.release(3)
    finally:
        over.set()
        for other in others:
            other.join(SOON_S)
        feed.close()


@pytest.mark.parametrize("end", [close, load])
def test_while_it_waits_for_peers(corpus: Path, end: Callable[[Any], None]) -> None:
    """Its peers hear of it too: they need not wait for what will not come."""
    store = dist.HashStore()
    feed, peer = (
        mf.Feed(
            recipe_of(corpus),
            mf.Layout(tp=2),
            rank,
            transport=mf.Transport(rendezvous=store, delivery="share", timeout_s=SOON_S),
        )
        for rank in range(2)
    )
    found: list[BaseException] = []

    def loop() -> None:
        try:
            iter(feed)
        except mf.MeshfeedError as error:
            found.append(error)

    thread = threading.Thread(target=loop)
    with feed:
        thread.start()
        while not (feed._loop.on and feed._loop.on._failures._prefix):
            threading.Event().wait(0.001)
        end(feed)
        thread.join(SOON_S)
    assert isinstance(found[0], mf.errors.StateError) and "start a new one" in str(found[0])
    prefix = meshfeed.deliver.Meeting.prefix
    with pytest.MonkeyPatch.context() as patch:  # in a process of its own it would be in the same run
        patch.setattr(meshfeed.deliver.Meeting, "prefix", property(lambda m: prefix.fget(m)[:-1] + "0"))  # type: ignore
        with peer, pytest.raises(mf.errors.PeerError, match="rank 0 has closed its feed, or loaded a state"):
            iter(peer)
