"""How sinks are told: never at the cost of training, and never with a silent gap."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import meshfeed as mf
import meshfeed.metrics.background as background
import world
from corpus import recipe_of, write_corpus
from logged import steps_of
from meshfeed.metrics import ProfilerRanges, RunLog, RunStart, Sink, StepRecord

PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "EVERY_S", 0.01)


class Kept(Sink):
    """Remembers what it was told, unless it is broken."""

    def __init__(self) -> None:
        self.told: list[RunStart | StepRecord] = []
        self.broken: Exception | None = None
        self.changed, self.closed = threading.Condition(), 0

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        if self.broken:
            raise self.broken
        with self.changed:
            self.told += entries
            self.changed.notify_all()

    def close(self) -> None:
        self.closed += 1

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.told if isinstance(each, StepRecord)]

    @property
    def starts(self) -> list[int]:
        return [each.step for each in self.told if isinstance(each, RunStart)]

    def await_step(self, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: step in self.steps, PATIENCE_S)


class WatchedLog(RunLog):
    """A log that says when it failed or did not."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.outcomes: list[bool] = []
        self.changed = threading.Condition()

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        went_well = False
        try:
            super().take(entries)
            went_well = True
        finally:
            with self.changed:
                self.outcomes.append(went_well)
                self.changed.notify_all()

    def await_outcome(self, went_well: bool) -> None:
        """The next of its kind after the one that was awaited last."""
        with self.changed:
            assert self.changed.wait_for(lambda: went_well in self.outcomes, PATIENCE_S)
            del self.outcomes[: self.outcomes.index(went_well) + 1]


def test_every_step_is_told_once_and_in_order_to_all(corpus: str) -> None:
    one, other = Kept(), Kept()
    with mf.Feed(recipe_of(corpus), metrics=[one, other]) as feed:
        for step in itertools.islice(feed, 5):
            list(step.microbatches)
        for step in itertools.islice(feed, 3):  # an iterator that was left goes on with a run of its own
            list(step.microbatches)
        recipe = feed.recipe
        feed.load_state_dict(mf.State(recipe=recipe.summary(until=2), step=2).to_json())
        last = [(step, list(step.microbatches)) for step in itertools.islice(feed, 4)]
    assert one.steps == other.steps == [0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5]
    assert one.starts == other.starts == [0, 5, 2]
    assert one.closed == other.closed == 1
    records = [each for each in one.told if isinstance(each, StepRecord)]
    assert [record.stats for record in records[-4:]] == [step.stats for step, _ in last]
    assert not any(thread.name == "meshfeed-metrics" for thread in threading.enumerate())


def test_records_of_two_runs_come_one_after_the_other(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second, this process has another rank: whoever takes records knows of which rank they are."""
    monkeypatch.setattr(background, "EVERY_S", PATIENCE_S)
    told = list[list[RunStart | StepRecord]]()

    class Apart(Sink):
        def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
            told.append([*entries])

    layout, direct = mf.Layout(dp=2), mf.Transport(delivery="direct")
    with mf.Feed(recipe_of(corpus), pad_rows=True, metrics=Apart(), transport=direct) as feed:
        for step, rank in ((0, 1), (1, 1), (2, 0), (3, 0)):
            list(feed.at(step, layout, rank).microbatches)
    assert [[(type(each), each.step) for each in entries] for entries in told] == [
        [(RunStart, 0)],
        [(StepRecord, 0), (StepRecord, 1)],
        [(RunStart, 2), (StepRecord, 2), (StepRecord, 3)],
    ]
    assert [start.rank for start, *_ in told[::2] if isinstance(start, RunStart)] == [1, 0]


def test_without_sinks_nothing_of_theirs_runs(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("called")

    for owner, name in (
        (background.BackgroundSinks, "__init__"),
        (RunStart, "here"),
        (StepRecord, "__init__"),
    ):
        monkeypatch.setattr(owner, name, never)
    with mf.Feed(recipe_of(corpus)) as feed:
        stats = [step.stats for step in itertools.islice(feed, 5)]
        assert not any(thread.name == "meshfeed-metrics" for thread in threading.enumerate())
    assert "metrics_lost" not in stats[-1]


def test_what_is_no_sink_is_refused(corpus: str) -> None:
    for wrong in ("runs/7", [RunLog("run"), print], RunLog):
        with pytest.raises(mf.errors.MetricsError, match="not a sink"):
            mf.Feed(recipe_of(corpus), metrics=wrong)


def test_a_log_that_cannot_be_begun_is_refused_before_training(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(mf.errors.MetricsError, match="rank-000000"),
        mf.Feed(recipe_of(corpus), metrics=RunLog(tmp_path / "file")) as feed,
    ):
        next(iter(feed))


def refused_on_one(rank: int, path: str, folders: list[str]) -> str:
    feed = mf.Feed(
        recipe_of(path),
        mf.Layout.parse("dp2"),
        transport=mf.Transport(timeout_s=600),
        metrics=RunLog(folders[rank]),
    )
    with pytest.raises(mf.errors.MetricsError) as refused, feed:
        for _ in feed:  # the other rank may be a step or two ahead before it hears
            pass
    return str(refused.value)


def test_a_log_that_cannot_be_begun_on_one_rank_ends_all(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one, other = world.run(refused_on_one, 2, corpus, [str(tmp_path / "run"), str(tmp_path / "file")])
    assert one == f"rank 1 ended at step 0: {other}" and "rank-000001" in other


class Rounds:
    """How many steps were lost after each round in which the sink was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lost, self._changed = -1, threading.Condition()
        pass_on = background._Backlog.take

        def watched(backlog: Any, more: Sequence[RunStart | StepRecord]) -> None:
            pass_on(backlog, more)
            with self._changed:
                self._lost = backlog.lost
                self._changed.notify_all()

        monkeypatch.setattr(background._Backlog, "take", watched)

    def await_lost(self, least: int, most: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: least <= self._lost <= most, PATIENCE_S)


def test_what_a_full_disk_refused_is_written_once_there_is_room(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, rounds = RunLog(tmp_path / "run"), Rounds(monkeypatch)
    with mf.Feed(recipe_of(corpus), metrics=log) as feed:
        loop = iter(feed)
        for _ in range(3):
            next(loop)
        with full_disk(log):
            for _ in range(4):
                next(loop)
            rounds.await_lost(4, 9)  # steps 2 to 5 were told after the disk was full
            assert next(loop).stats.metrics_lost >= 4
        rounds.await_lost(0, 0)
        assert next(loop).stats.metrics_lost == 0
    assert steps_of(tmp_path / "run") == list(range(9))


@contextlib.contextmanager
def full_disk(log: RunLog) -> Iterator[None]:
    """Every write to the log's file ends half-way, as on a disk without room."""
    write = os.write

    def half(fd: int, data: Any) -> int:
        if fd != log._fd:
            return write(fd, data)
        if len(data) > 64:
            return write(fd, data[:64])
        raise OSError(28, "No space left on device")

    patched_os = pytest.MonkeyPatch()
    patched_os.setattr("meshfeed.metrics.run_log.os.write", half)
    try:
        yield
    finally:
        patched_os.undo()


def test_a_folder_that_vanishes_is_waited_for(corpus: str, tmp_path: Path) -> None:
    log = WatchedLog(tmp_path / "run")
    with mf.Feed(recipe_of(corpus), metrics=log) as feed:
        loop = iter(feed)
        for _ in range(3):
            next(loop)
        log.await_outcome(True)
        shutil.rmtree(tmp_path / "run")
        for _ in range(3):
            next(loop)
        log.await_outcome(False)
        (tmp_path / "run").mkdir()
        log.await_outcome(True)
        assert next(loop).index == 6
    assert steps_of(tmp_path / "run")[-4:] == [3, 4, 5, 6]


def test_what_was_not_written_is_an_error_when_all_is_closed(corpus: str, tmp_path: Path) -> None:
    feed = mf.Feed(recipe_of(corpus), metrics=RunLog(tmp_path / "run"))
    with pytest.raises(mf.errors.MetricsError, match=r"missed 5 steps.*rank-000000"), feed:
        loop = iter(feed)
        next(loop)
        shutil.rmtree(tmp_path / "run")
        for _ in range(4):
            step = next(loop)
        list(step.microbatches)
    with feed:
        assert next(iter(feed)).index == 5, "all is closed, and may be entered again"


def test_an_error_of_the_loop_is_not_hidden_by_it(corpus: str) -> None:
    sink = Kept()
    with pytest.raises(ZeroDivisionError) as raised, mf.Feed(recipe_of(corpus), metrics=sink) as feed:
        for step in feed:
            sink.broken = ValueError("broken")
            assert step.index < 3 or 1 / 0
    assert "Kept has missed" in raised.value.__notes__[0]


def test_a_sink_that_fails_is_told_again_and_forgets_the_oldest(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_KEPT", 8)

    class Whole(Kept):
        """Misses nothing, and is not named."""

    sink, whole = Kept(), Whole()
    with (
        pytest.raises(mf.errors.MetricsError, match="Kept has missed 12 steps"),
        mf.Feed(recipe_of(corpus), metrics=[whole, sink]) as feed,
    ):
        loop = iter(feed)
        next(loop)
        sink.broken = ValueError("busy")
        for step in range(20):
            next(loop)
            whole.await_step(step)
        sink.broken = None
        sink.await_step(19)
        assert next(loop).stats.metrics_lost == 12
    assert sink.steps == list(range(12, 22)) and sink.starts == [0]
    assert whole.steps == list(range(22))


class Hanging(Kept):
    """Does not return, as a network file system that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        if isinstance(entries[-1], StepRecord):
            self.release.wait()


def test_the_loop_does_not_wait_for_a_sink_that_hangs(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_KEPT", 8)
    monkeypatch.setattr(background, "_CLOSE_S", 0.1)
    sink = Hanging()
    with (
        pytest.raises(mf.errors.MetricsError, match="hangs"),
        mf.Feed(recipe_of(corpus), metrics=sink) as feed,
    ):
        stats = [step.stats for step in itertools.islice(feed, 60)]
    assert stats[-1]["metrics_lost"] > 30
    sink.release.set()


def test_a_fork_leaves_the_sinks_to_its_parent(corpus: str, tmp_path: Path) -> None:
    feed = mf.Feed(recipe_of(corpus), metrics=RunLog(tmp_path))
    with feed:
        list(next(iter(feed)).microbatches)
        child = os.fork()
        if child == 0:
            feed.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        next(iter(feed))
    assert steps_of(tmp_path) == [0, 1]


# -- torch's profiler ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_stages_are_ranges_in_a_trace(corpus: str, prefetch: int) -> None:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=prefetch > 0)
    feed = mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=prefetch), metrics=ProfilerRanges())
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as trace, feed:
        for step in itertools.islice(feed, 4):
            list(step.microbatches)
    ranges: dict[str, list[Any]] = {}
    for event in trace.events():
        ranges.setdefault(event.name, []).append(event)
    assert "meshfeed.deliver" not in ranges, "a rank that reads for itself has nothing delivered"
    for stage in ("plan", "read", "build", "copy"):
        assert len(ranges[f"meshfeed.{stage}"]) >= 4, stage
    assert len(ranges["meshfeed.wait"]) >= 4 * 3 - 1, "start, microbatches and end of each step"
    threads = {stage: {event.thread for event in ranges[f"meshfeed.{stage}"]} for stage in ("wait", "read")}
    assert (threads["wait"] == threads["read"]) == (prefetch == 0)
