"""The log of a run on disk: what is written, what is read back, what a kill and a repeat leave of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from meshfeed.metrics import RunLog, RunStart, StepRecord, StepStats
from meshfeed.metrics.sink import by_runs
from meshfeed.report import read_run
from meshfeed.report.history.loop import longest_outside
from meshfeed.report.history.tables import mixture_table
from soak import SEED, cases

PATIENCE_S = 600.0
LAYOUT = mf.Layout.parse("tp2-dp2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def start_at(step: int, rank: int = 0, layout: mf.Layout = LAYOUT, **changed: Any) -> RunStart:
    made = RunStart.here(step, layout, rank, "share", "abc")
    return RunStart(**{name: getattr(made, name) for name in RunStart.__slots__} | changed)


def record_of(step: int, time_s: float = 0.0, **changed: Any) -> StepRecord:
    counts = ("queue_depth", "bytes_read", "bytes_fetched", "opens", "collectives", "delivered_bytes")
    stats = {"exposed_wait_s": {"read": 0.5}, "work_s": {"read": 0.75, "plan": 1e-3}}
    return StepRecord(step, time_s, 1000 + step, StepStats(**stats | dict.fromkeys(counts, 2) | changed))


def write(folder: Path, *entries: RunStart | StepRecord) -> Path:
    """A log of some entries; the file."""
    log = RunLog(folder)
    for some in by_runs(entries):
        log.take(some)
    log.close()
    (rank,) = {entry.rank for entry in entries if isinstance(entry, RunStart)}
    return folder / f"rank-{rank:06d}.jsonl"


# -- what a feed writes ----------------------------------------------------------------------------


def test_a_feed_tells_all_of_its_steps(corpus: str, tmp_path: Path) -> None:
    before = time.time()
    with mf.Feed(recipe_of(corpus), metrics=RunLog(tmp_path / "a" / "run")) as feed:
        steps = [(step, list(step.microbatches)) for step in itertools.islice(feed, 7)]
    history = read_run(tmp_path / "a" / "run")
    (start,), rank = history.starts, history.ranks[0]
    assert (start.step, start.world_size, start.layout, start.delivery) == (0, 1, "dp1", "direct")
    assert start.fingerprint == feed.recipe.fingerprint and start.ranks == (0,)
    assert (rank.host, rank.pid) == (start.hosts[0], os.getpid())
    assert rank.coord == {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
    assert rank.step.tolist() == list(range(7)) and rank.start.tolist() == [0] * 7
    assert rank.tokens.tolist() == [step.tokens for step, _ in steps]
    assert rank.bytes_read.tolist() == [step.stats.bytes_read for step, _ in steps]
    assert (np.diff(rank.time) > 0).all()
    assert before <= rank.time[0] <= start.time <= rank.time[1] and rank.time[-1] <= time.time()
    np.testing.assert_array_equal(rank.seconds, [*np.diff(rank.time), np.nan])
    assert np.isnan(rank.padding).all() and np.isnan(rank.imbalance).all()
    assert history.mixture is None
    lines = (tmp_path / "a" / "run" / "rank-000000.jsonl").read_text().splitlines()
    assert len(lines) == 8 and max(map(len, lines[1:])) < 250


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_stall_of_the_loader_is_no_time_of_the_loop(corpus: str, tmp_path: Path, prefetch: int) -> None:
    """A step is handed over before its microbatches are read: the waits for these are within it."""
    recipe, num_loads = recipe_of(corpus), itertools.count()
    rule: Any = recipe.sequence
    load = rule.load

    def slow(*given: Any) -> Any:
        if next(num_loads) == 3:
            time.sleep(3.0)
        return load(*given)

    object.__setattr__(rule, "load", slow)
    with mf.Feed(
        recipe, transport=mf.Transport(prefetch=prefetch), metrics=RunLog(tmp_path), micro_batch_size=16
    ) as feed:
        for step in itertools.islice(feed, 8):
            list(step.microbatches)
            time.sleep(1.25 * (step.index == 5))
    history = read_run(tmp_path)
    rank, outside = history.ranks[0], longest_outside(history)
    assert rank.wait[3].sum() > 2.5 and rank.seconds[3] > 2.5, "the stall is of the step that it kept waiting"
    assert (rank.seconds[:-1] >= rank.wait[:-1].sum(axis=1) - 1e-5).all()
    assert outside is not None and outside.step == 5 and 1.25 <= outside.busy_s < 2.5


def test_packed_steps_tell_padding_and_balance(corpus: str, tmp_path: Path) -> None:
    recipe = mf.Recipe(data=mf.open(corpus), sequence=mf.Documents(), batch=mf.Batch(sequences=8), steps=3)
    with mf.Feed(recipe, packing=mf.Packing(capacity=1024), metrics=RunLog(tmp_path)) as feed:
        stats = [step.stats for step in feed]
    rank = read_run(tmp_path).ranks[0]
    np.testing.assert_allclose(rank.padding, [each["padding"] for each in stats], atol=1e-6)
    np.testing.assert_allclose(rank.imbalance, [each["max_over_mean"] for each in stats], atol=1e-6)


def test_the_mixture_is_told_as_it_was_drawn_and_as_it_was_asked(corpus: str, tmp_path: Path) -> None:
    mixture = mf.Mixture({"code": (mf.open(corpus), 3), "docs": (mf.open(corpus), 1)})
    mixture = mixture.then(4, {"docs": 1, "math": (mf.open(corpus), 1)})
    recipe = mf.Recipe(data=mixture, sequence=mf.Windows(64), batch=mf.Batch(sequences=16), steps=6)
    with mf.Feed(recipe, metrics=RunLog(tmp_path)) as feed:
        stats = [step.stats for step in feed]
    assert stats[0]["source_asked"].tolist() == [12, 4, 0]
    told = read_run(tmp_path).mixture
    assert told is not None and told.names == ("code", "docs", "math")
    assert told.steps[-1] == 5 and told.drawn[-1].tolist() == [48, 32, 16] and told.drawn[-1].sum() == 6 * 16
    assert told.asked[-1].tolist() == [48, 32, 16], "0.75 and 0.25 in 4 steps of 16, then 0.5 and 0.5 in 2"


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (mf.Layout.parse("tp2-cp2-pp2"), "tp2-cp2-pp2"),
        (mf.Layout(tp=2, dp=2, order="dp-tp"), "dp2-tp2"),
        (mf.Layout(dp=2), "dp2"),
        (mf.Layout(dp=2, ranks_per_node=2), "dp2"),  # as torchrun completes it
        (mf.Layout(tp=2, cp=2, dp=2, pp=2, ep=2), "tp2-cp2-dp2-pp2"),
        (mf.Layout(pp=4, dp=2), "dp2-pp4"),
        (mf.Layout(dp=2, table=(0, 1)), "dp2"),  # as a device mesh gives it
        (mf.Layout(dp=2, tp=2, table=(0, 2, 1, 3)), None),
        (mf.Layout(dp=2, table=(3, 1)), None),
    ],
)
def test_a_layout_is_told_where_its_text_tells_it_all(layout: mf.Layout, text: str | None) -> None:
    told = RunStart.here(0, layout, 1, "direct")
    assert told.layout == text
    assert text is None or np.array_equal(mf.Layout.parse(text).coords(), layout.coords())
    assert told.is_lowest == (layout.table == (3, 1)), "rank 1 is the lowest of 3 and 1"


SIZES = {"a": 5, "b": 14, "c": 23, "more": 7}  # windows of 16


@dataclass
class Shares:
    """A schedule of random shares, and what it makes of each step, worked out with plain numbers."""

    recipe: mf.Recipe
    amounts: list[tuple[int, dict[str, int]]]
    grown: int | None = None  # from this step on, a has grown

    def change(self, rng: np.random.Generator, step: int, folder: Path) -> Shares:
        """Another recipe from a step on."""
        if (kind := rng.integers(2 if self.grown is not None else 3)) == 0:
            new = step, {name: int(rng.integers(name == "a", 5)) for name in "abc"}
            amounts = sorted([*(each for each in self.amounts if each[0] != step), new], key=itemgetter(0))
            return replace(
                self, recipe=self.recipe.amended([(step, mf.amendments.Reweigh(new[1]))]), amounts=amounts
            )
        if kind == 1:
            size = mf.amendments.BatchSize(int(rng.integers(1, 9)))
            return replace(self, recipe=self.recipe.amended([(step, size)]))
        growth = mf.amendments.Grow("a", str(folder / "more"))
        return replace(self, recipe=self.recipe.amended([(step, growth)]), grown=step)

    def of_step(self, step: int) -> dict[str, float]:
        """Source -> its share."""
        amounts = [amounts for first, amounts in self.amounts if first <= step][-1]
        shares = {name: amount / sum(amounts.values()) for name, amount in amounts.items()}
        if self.grown is not None and self.grown <= step:
            whole, shares["more"] = SIZES["a"] + SIZES["more"], shares["a"]
            shares |= {name: shares[name] * SIZES[name] / whole for name in ("a", "more")}
        return shares


def some_shares(rng: np.random.Generator, folder: Path) -> Shares:
    first = {name: int(rng.integers(1, 5)) for name in "abc"}
    mixture = mf.Mixture({name: (mf.open(folder / name), amount) for name, amount in first.items()})
    batch, amounts = mf.Batch(int(rng.integers(1, 9))), [(0, first)]
    for step in sorted(rng.choice(np.arange(1, 30), rng.integers(4), replace=False).tolist()):
        amounts.append((step, {name: int(rng.integers(name == "a", 5)) for name in "abc"}))
        mixture, batch = mixture.then(*amounts[-1]), batch.then(step, int(rng.integers(1, 9)))
    return Shares(mf.Recipe(data=mixture, sequence=mf.Windows(16), batch=batch), amounts)


def test_what_a_run_was_asked_for_is_the_sum_of_the_shares_of_its_steps(tmp_path: Path) -> None:
    """Whatever changes shares and batches, whenever a line is written, whatever a kill undoes."""
    for name, windows in SIZES.items():
        write_corpus(tmp_path / name, num_tokens=16 * windows + 1)
    for life in range(cases(20)):
        rng = np.random.default_rng((SEED, life))
        now, step, entries = some_shares(rng, tmp_path), 0, list[RunStart | StepRecord]()
        true = dict[int, tuple[dict[str, float], int]]()  # of each step: shares, sequences
        for _ in range(rng.integers(1, 5)):
            stop = step + int(rng.integers(1, 14))
            entries.append(start_at(step, sources=now.recipe.source_names))
            true = {before: each for before, each in true.items() if before < step}
            for simulated in mf.simulate(now.recipe, mf.Layout(), range(step, stop)):
                batch = simulated.batch
                entries.append(StepRecord(batch.step, float(len(entries)), batch.tokens, batch.stats()))
                true[batch.step] = now.of_step(batch.step), len(batch.draws)
            step = int(rng.integers(step, stop + 1))
            if rng.random() < 0.7:
                now = now.change(rng, step + int(rng.integers(3)), tmp_path)
        log = RunLog(folder := tmp_path / f"log {life}")
        while entries:
            some, entries = entries[: (count := int(rng.integers(1, 9)))], entries[count:]
            for of_run in by_runs(some):
                log.take(of_run)
        log.close()
        told = read_run(folder).mixture
        assert told is not None and (np.diff(told.steps) > 0).all()
        drawn = {name.replace("a+", "more+").split("+")[0]: k for k, name in enumerate(told.names)}
        for name, k in drawn.items():
            asked = sum(shares.get(name, 0) * size for shares, size in true.values())
            assert told.asked[-1, k] == pytest.approx(asked), (life, name)
            assert f"<td>{told.drawn[-1, k] - asked:+.2f}</td>" in mixture_table(told), (life, name)


# -- what is read back -----------------------------------------------------------------------------


@settings(max_examples=cases(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6))
def test_of_a_step_that_was_repeated_the_last_time_counts(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int]]
) -> None:
    folder, expected, now = tmp_path_factory.mktemp("run"), dict[int, tuple[int, float]](), 0.0
    entries: list[RunStart | StepRecord] = []
    for number, (first, count) in enumerate(runs):
        entries.append(start_at(first, time_s=(now := now + 1)))
        expected = {step: told for step, told in expected.items() if step < first}
        for step in range(first, first + count):
            entries.append(record_of(step, now := now + 1))
            expected[step] = (number, now)
    write(folder, *entries)
    rank = read_run(folder).ranks[0]
    assert dict(zip(rank.step.tolist(), zip(rank.start.tolist(), rank.time.tolist()))) == expected
    assert (np.diff(rank.step) > 0).all()
    same = np.diff(rank.start, append=-1) == 0
    assert (rank.seconds[same] == np.diff(rank.time)[same[:-1]]).all() and np.isnan(rank.seconds[~same]).all()


def test_starts_of_ranks_are_one_start_of_the_job(tmp_path: Path) -> None:
    smaller = mf.Layout.parse("dp2")
    for rank in range(4):
        entries = [start_at(0, rank, time_s=rank / 10, host=f"node{rank // 2}")]
        entries += [record_of(step, 1.0 + step) for step in range(6)]
        if rank < 2:
            entries += [start_at(4, rank, smaller, time_s=20 + rank / 10), record_of(4, 21.0)]
        write(tmp_path, *entries)
    history = read_run(tmp_path)
    first, second = history.starts
    assert (first.ranks, first.hosts, first.layout) == ((0, 1, 2, 3), ("node0", "node1"), "tp2-dp2")
    assert (second.ranks, second.step, second.world_size) == ((0, 1), 4, 2)
    assert history.ranks[0].step.tolist() == [0, 1, 2, 3, 4]
    assert history.ranks[3].step.tolist() == [0, 1, 2, 3], (
        "it is gone, and what it did past step 4 was undone"
    )


QUORUMS = ((0, 1, 2), (0, 2), (2, 0, 3), (3, 2, 0), (2, 3))  # which process is rank 0, 1, ...


def taking_part(process: int, path: str, folder: str) -> None:
    with contextlib.ExitStack() as stack:
        feed: mf.Feed | None = None
        for number, quorum in enumerate(QUORUMS):
            if process in quorum:
                feed = feed or stack.enter_context(
                    mf.Feed(recipe_of(path), pad_rows=True, metrics=RunLog(folder))
                )
                for step in (2 * number, 2 * number + 1):
                    list(feed.at(step, mf.Layout(dp=len(quorum)), quorum.index(process)).microbatches)
            dist.barrier()


def test_a_rank_has_the_steps_that_it_took_whichever_process_it_was(corpus: str, tmp_path: Path) -> None:
    """After each change some processes have other ranks, one is gone, and one that is new has the rank that
    another one had, which goes on."""
    world.run(taking_part, 4, corpus, str(tmp_path))
    history = read_run(tmp_path)
    assert [start.ranks for start in history.starts] == [tuple(range(len(each))) for each in QUORUMS]
    for rank in range(3):
        numbers = [number for number, quorum in enumerate(QUORUMS) if rank < len(quorum)]
        assert history.ranks[rank].step.tolist() == [2 * number + at for number in numbers for at in (0, 1)]
        assert history.ranks[rank].start.tolist() == [number for number in numbers for _ in (0, 1)]


@settings(max_examples=cases(60), deadline=None)
@given(cut=st.integers(0, 4000))
def test_a_running_log_is_read_up_to_its_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder, grows = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("grows")
    steps = [record_of(step, float(step), source_drawn=np.array([step, 1]), source_asked=np.array([0.5, 0.5]))
             for step in range(9)]  # fmt: skip
    entries = [start_at(0, sources=("a", "b")), *steps, start_at(5, sources=("a", "b")), *steps[5:7]]
    whole = write(folder, *entries).read_bytes()
    (grows / "rank-000000.jsonl").write_bytes(whole[:cut])
    so_far = read_run(grows)
    (grows / "rank-000000.jsonl").write_bytes(whole[: whole.rfind(b"\n", 0, cut) + 1])
    by_lines = read_run(grows)
    assert so_far.starts == by_lines.starts and set(so_far.ranks) == set(by_lines.ranks)
    for number, rank in so_far.ranks.items():
        for name in ("step", "time", "start", "seconds", "wait", "work", "tokens", "opens"):
            np.testing.assert_array_equal(getattr(rank, name), getattr(by_lines.ranks[number], name))
    whole_run = read_run(folder)
    assert len(whole_run.ranks[0].step) == 7
    assert whole_run.mixture is not None and whole_run.mixture.steps[-1] == 6


def test_columns_are_those_that_the_start_names(tmp_path: Path) -> None:
    """A log of another version: a column less, one more, in another order."""
    file = write(tmp_path, start_at(0), record_of(0, 3.0))
    told, _ = map(json.loads, file.read_text().splitlines())
    told["start"] |= {"columns": ["wait_nap", "step", "time", "work_read"], "stages": ["read", "nap"]}
    file.write_text(json.dumps(told) + "\n[0.5,7,3.5,0.25]\n" + '{"something": "new"}\n')
    history = read_run(tmp_path)
    rank = history.ranks[0]
    assert history.stages == ("read", "nap")
    assert (rank.step.tolist(), rank.wait.tolist(), rank.work.tolist()) == ([7], [[0, 0.5]], [[0.25, 0]])
    assert rank.opens.tolist() == [0] and np.isnan(rank.padding[0])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (1, "{}"),
        (1, '{"start":{}}'),
        (1, '{"start":7}'),
        (1, '{"mixture":{"step":0,"drawn":[],"asked":[]}}'),
        (2, "[1,2,3]"),
        (3, "[1,2"),
        (3, "[1,2]"),
        (3, "\0" * 40),
        (4, '["a"]'),
        (4, "[1],[2]"),
        (4, '{"mixture":{}}'),
        (4, "\xff"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: int, wrong: str) -> None:
    file = write(tmp_path, start_at(0), *map(record_of, range(6)))
    lines = file.read_bytes().splitlines()
    lines[line - 1] = wrong.encode("latin-1")
    file.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(mf.errors.MetricsError, match=rf"rank-000000.jsonl:{2 if wrong == '{}' else line}: "):
        read_run(tmp_path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path / "nowhere", tmp_path, Path(__file__)):
        with pytest.raises(mf.errors.MetricsError, match=wrong.name):
            read_run(wrong)
    with pytest.raises(mf.errors.MetricsError, match="object store"):
        RunLog("s3://bucket/run")


# -- what a kill leaves ----------------------------------------------------------------------------


def endless(rank: int, path: str, folder: str) -> None:
    import meshfeed.metrics.background as background

    background.EVERY_S = 0.01
    with mf.Feed(
        recipe_of(path), LAYOUT, transport=mf.Transport(delivery="direct"), metrics=RunLog(folder)
    ) as feed:
        for step in feed:
            for _ in step.microbatches:
                pass


def test_after_a_kill_the_log_goes_on(corpus: str, tmp_path: Path) -> None:
    job = world.start(endless, 4, corpus, str(tmp_path))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:  # until every rank has written some steps
        logged = [file.read_bytes().count(b"\n") for file in tmp_path.iterdir()]
        if len(logged) == 4 and min(logged) > 20:
            break
        time.sleep(0.02)
    job.kill(range(4))
    job.join()
    killed = read_run(tmp_path)
    assert len(killed.starts) == 1 and min(rank.step.size for rank in killed.ranks.values()) >= 20
    torn = tmp_path / "rank-000000.jsonl"
    with torn.open("ab") as file:
        file.write(b"[77,123.4")
    assert read_run(tmp_path).ranks[0].step.tolist() == killed.ranks[0].step.tolist()
    recipe = recipe_of(corpus)
    with mf.Feed(recipe, metrics=RunLog(tmp_path)) as feed:
        feed.load_state_dict(mf.State(recipe=recipe.summary(), step=10).to_json())
        for _ in itertools.islice(feed, 5):
            pass
    history = read_run(tmp_path)
    assert [start.step for start in history.starts] == [0, 10]
    assert [start.world_size for start in history.starts] == [4, 1]
    assert history.ranks[0].step.tolist() == list(range(15))
    assert history.ranks[0].start.tolist() == [0] * 10 + [1] * 5
    assert history.ranks[2].step.tolist() == list(range(10))


@pytest.mark.parametrize("tail", [b"", b"x", b"x" * 70_000, b"[1,2,3"])
def test_a_torn_line_is_taken_away(tmp_path: Path, tail: bytes) -> None:
    file = write(tmp_path, start_at(0), record_of(0))
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    write(tmp_path, start_at(1), record_of(1))
    assert file.read_bytes().startswith(whole + b'{"start"')
    assert read_run(tmp_path).ranks[0].step.tolist() == [0, 1]
    file.write_bytes(b"x" * 70_000)  # not one line is whole
    write(tmp_path, start_at(0), record_of(0))
    assert file.read_bytes().startswith(b'{"start"')
