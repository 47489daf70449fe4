"""meshfeed watch: where a run stands, from logs made by hand and from a job with a slow rank."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from delays import LEAP_S, delayed
from meshfeed.cli.frame import Frame, frame_of, shares_of, straggler_of
from meshfeed.cli.main import main
from meshfeed.cli.watch import headline, picture_of, straggler_words
from meshfeed.metrics import RunLog, RunStart, StepRecord, StepStats
from meshfeed.report import MixtureHistory, RankHistory, RunHistory, Start
from meshfeed.report.words import duration
from soak import cases, some

STAGES = ("plan", "read", "deliver")
NOW = 1000.0
SLOW_RANK, NUM_STEPS = 2, 6


def rank_history(rank: int, waits: Any, *, until: float = NOW, **columns: Any) -> RankHistory:
    """A rank that is handed a step a second until a time, and waits as told, [n, stages]."""
    wait = np.asarray(waits, np.float64).reshape(-1, len(STAGES))
    steps = np.arange(len(wait))
    ones = np.ones(len(wait), np.int64)
    usual = {
        "start": 0 * ones,
        "step": steps,
        "time": until - steps[::-1].astype(float),
        "seconds": np.append(ones[1:], np.nan) if len(ones) else np.zeros(0),
        "wait": wait,
        "work": wait + 0.01,
        "queue_depth": ones,
        "bytes_read": ones * 4000,
        "tokens": ones * 1000,
        "padding": np.full(len(wait), np.nan),
        "imbalance": np.full(len(wait), np.nan),
    }
    others = dict.fromkeys(("bytes_fetched", "delivered_bytes", "opens", "collectives"), ones)
    who = {"rank": rank, "coord": {"tp": 0, "cp": 0, "dp": rank, "pp": 0}, "host": "here", "pid": 1}
    return RankHistory(**who | usual | others | columns)


def start_of(ranks: Any, world_size: int, *, step: int = 0, at: float = NOW - 100) -> Start:
    return Start(
        time=at,
        step=step,
        layout=f"dp{world_size}",
        world_size=world_size,
        delivery="direct",
        fingerprint=None,
        meshfeed=None,
        ranks=tuple(ranks),
        hosts=("here",),
    )


def run_of(*ranks: RankHistory, world_size: int | None = None) -> RunHistory:
    start = start_of([each.rank for each in ranks], world_size or len(ranks))
    return RunHistory(stages=STAGES, starts=(start,), ranks={each.rank: each for each in ranks}, mixture=None)


# -- frames -------------------------------------------------------------------------------------------

waits_of_a_step = st.lists(st.floats(0, 2), min_size=len(STAGES), max_size=len(STAGES))
waits_of_ranks = st.lists(st.lists(waits_of_a_step, max_size=9), min_size=1, max_size=6)


@given(waits_of_ranks, st.integers(1, 12))
@settings(max_examples=cases(60, 1_500), deadline=None)
def test_a_frame_says_of_every_rank_the_means_of_its_last_steps(waits: Any, steps: int) -> None:
    frame = frame_of(run_of(*(rank_history(k, some) for k, some in enumerate(waits))), NOW, steps=steps)
    assert sorted(each.rank for each in frame.ranks) == list(range(len(waits)))
    assert frame.step == max((len(some) - 1 for some in waits if some), default=None)
    for each in frame.ranks:
        some = np.asarray(waits[each.rank]).reshape(-1, len(STAGES))
        assert each.step == (len(some) - 1 if len(some) else None)
        assert each.behind == (max(map(len, waits)) - len(some))
        late = some[1:][-steps:] if len(some) > 1 else some
        expected = late.mean(axis=0) if len(late) else np.zeros(len(STAGES))
        assert list(each.wait_s.values()) == pytest.approx(expected.tolist())
        if len(late) > 1:
            assert (each.step_s, each.tokens_per_s, each.bytes_per_s) == (1.0, 1000.0, 4000.0)
        else:
            assert each.step_s is None and each.tokens_per_s is None
    own = [each.own_wait_s for each in frame.ranks if each.silent_s is None]
    assert own == sorted(own, reverse=True), "worst first"


@given(st.integers(2, 9), st.data())
@settings(max_examples=cases(100), deadline=None)
def test_who_stands_out_is_named_and_those_who_wait_for_it_are_not(num_ranks: int, data: Any) -> None:
    slow = data.draw(st.integers(0, num_ranks - 1))
    stage = data.draw(st.sampled_from(["plan", "read"]))
    extra = data.draw(st.floats(0.06, 5))
    common = data.draw(st.floats(0, 1))
    passed_on = extra + data.draw(st.floats(0, 5))  # the others may even wait longer, for the slow one
    ranks = []
    for rank in range(num_ranks):
        row = dict.fromkeys(STAGES, common)
        row[stage if rank == slow else "deliver"] += extra if rank == slow else passed_on
        ranks.append(rank_history(rank, [list(row.values())] * 4))
    frame = frame_of(run_of(*ranks), NOW)
    found = frame.straggler
    assert found is not None
    assert (found.rank, found.stage, found.does, found.num_others) == (slow, stage, "waits", 0)
    assert found.seconds - found.usual_s == pytest.approx(extra)
    assert frame.ranks[0].rank == slow


@given(st.integers(1, 9), waits_of_a_step)
@settings(max_examples=cases(50), deadline=None)
def test_nobody_stands_out_where_all_are_alike(num_ranks: int, row: Any) -> None:
    frame = frame_of(run_of(*(rank_history(k, [row] * 4) for k in range(num_ranks))), NOW)
    assert frame.straggler is None


def test_slow_work_that_is_hidden_is_told_as_such() -> None:
    quiet, work = np.zeros((4, 3)), np.tile([0.01, 0.1, 0.0], (4, 1))
    ranks = [rank_history(k, quiet, work=work * (5 if k == 1 else 1)) for k in range(3)]
    found = frame_of(run_of(*ranks), NOW).straggler
    assert found is not None and straggler_words(found) == (
        "rank 1 works 500 ms a step in read (others 100 ms), hidden by prefetching so far"
    )
    one_reader = [rank_history(k, quiet, work=work * (k == 1)) for k in range(3)]
    assert frame_of(run_of(*one_reader), NOW).straggler is None, "a reader for many is no straggler"
    assert straggler_of([], STAGES, 1.0) is None


def test_a_rank_that_tells_nothing_is_silent() -> None:
    history = run_of(*(rank_history(k, np.zeros((4, 3)), until=NOW - 40 * (k == 1)) for k in range(3)))
    frame = frame_of(history, NOW)
    assert frame.silent == (1,) and frame.ranks[0].silent_s == 40
    assert frame_of(history, NOW, silent_s=41).silent == ()
    slow = rank_history(0, np.zeros((4, 3)), time=NOW - 40 - np.arange(4)[::-1] * 20.0)
    assert frame_of(run_of(slow), NOW).silent == (), "its steps take 20 s"
    assert frame_of(run_of(slow), NOW + 61).silent == (0,)
    unstarted = frame_of(run_of(rank_history(0, []), world_size=3), NOW)
    assert (unstarted.silent, unstarted.missing, unstarted.step) == ((0,), (1, 2), None)


def test_a_new_start_with_another_layout_shows_its_own_ranks_and_steps() -> None:
    starts = (start_of(range(4), 4), start_of(range(2), 2, step=6, at=NOW - 10))
    ranks = {k: rank_history(k, np.ones((6, 3)), until=NOW - 50) for k in (2, 3)}
    for k in (0, 1):
        waits = np.concatenate([np.ones((6, 3)), np.zeros((3 * (1 - k), 3))])
        ranks[k] = rank_history(k, waits, start=(np.arange(len(waits)) >= 6).astype(int))
    history = RunHistory(stages=STAGES, starts=starts, ranks=ranks, mixture=None)
    frame = frame_of(history, NOW)
    assert (frame.num_starts, frame.step, frame.stages) == (2, 8, ())
    assert [(each.rank, each.step, each.behind) for each in frame.ranks] == [(0, 8, 0), (1, None, 3)]


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=8), st.data())
@settings(max_examples=cases(100), deadline=None)
def test_shares_are_asked_and_realised_over_the_same_steps(gained: Any, data: Any) -> None:
    change = data.draw(st.integers(0, len(gained)))
    each = np.array([[0.2, 0.3, 0.5]] * change + [[0.6, 0.4, 0.0]] * (len(gained) - change))
    new = np.array(gained, np.int64)
    wanted = each * new.sum(axis=1, keepdims=True)
    drawn, asked = np.cumsum(new, axis=0), np.cumsum(wanted, axis=0)
    shares = shares_of(
        MixtureHistory(names=("a", "b", "c"), steps=np.arange(len(gained)), drawn=drawn, asked=asked)
    )
    since = min(1, len(gained) - 1)
    total = new[since:].sum()
    assert bool(shares) == bool(total)
    for k, share in enumerate(shares):
        assert share.realised == pytest.approx(new[since:, k].sum() / total)
        assert share.asked == pytest.approx(wanted[since:, k].sum() / total)


def test_before_a_run_there_is_a_frame_too() -> None:
    empty = RunHistory(stages=(), starts=(), ranks={}, mixture=None)
    assert frame_of(None, NOW) == frame_of(empty, NOW) == Frame(num_starts=0)
    assert shares_of(None) == ()


# -- the command --------------------------------------------------------------------------------------


def write_log(path: Path, num_ranks: int, *, waits: dict[int, float] | None = None, ago_s: float = 0) -> None:
    layout = mf.Layout.parse(f"dp{num_ranks}")
    for rank in range(num_ranks):
        log = RunLog(path)
        log.take([RunStart.here(0, layout, rank, "direct", "abc", ["code", "docs"])])
        stats = {
            "exposed_wait_s": {"read": (waits or {}).get(rank, 0.002)},
            "work_s": {"read": 0.1},
            "source_drawn": np.array([3, 1]),
            "source_asked": np.array([3.0, 1.0]),
        } | dict.fromkeys(
            ("queue_depth", "bytes_read", "bytes_fetched", "delivered_bytes", "opens", "collectives"), 1
        )
        began = time.time() - 5 - ago_s
        log.take([StepRecord(step, began + step, 1000, StepStats(**stats)) for step in range(5)])
        log.close()


def once(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> tuple[int, str]:
    status = main(["watch", str(path), "--once", *words])
    return status, capsys.readouterr().out


def test_a_picture_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, 4, waits={2: 0.5})
    status, out = once(capsys, tmp_path, "--silent", "600")
    lines = out.splitlines()
    assert status == 0
    assert "dp4, direct, 4 ranks; step 4; 1 s a step, 0% of it waiting; 1.0 k tokens/s" in out
    assert "rank 2 waits 500 ms a step in read (others 2 ms)" in out
    assert "mixture, in sequences: code 75.0% of 75.0% asked, docs 25.0% of 25.0% asked" in out
    at = next(k for k, line in enumerate(lines) if line.startswith("rank  "))
    assert " ".join(lines[at].split()) == "rank place step read all tokens/s queue bytes/s"
    assert " ".join(lines[at + 1].split()).startswith("2 dp2 4 500 500 1.0 k 1 ")
    assert main(["watch", str(tmp_path), "--silent", "600"]) == 0, "into a file, once without being told"
    assert "rank 2 waits" in capsys.readouterr().out


def test_of_many_ranks_the_worst_are_shown_and_the_rest_is_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, 60, waits={k: k / 100 for k in range(60)})
    status, out = once(capsys, tmp_path, "--rows", "5", "--silent", "600")
    assert status == 0
    rows = out[out.index("rank  ") :].splitlines()
    rows = [line.split() for line in rows if re.match(r" *(\d+|others) ", line)]
    assert [row[0] for row in rows] == ["59", "58", "57", "56", "others"]
    assert re.search(r"(?m)^ *59 ", once(capsys, tmp_path, "--rows", "1", "--silent", "600")[1])
    assert rows[-1][1:5] == ["56", "ranks,", "at", "worst"] and "550" in rows[-1]
    assert len(json.loads(once(capsys, tmp_path, "--json")[1])["ranks"]) == 60


@pytest.mark.parametrize(("step_s", "says"), [(0.1, ""), (1.0, "3 steps behind"), (20.0, "3 steps behind")])
def test_ranks_are_behind_only_by_more_than_their_logs_may_be(step_s: float, says: str) -> None:
    """What a rank has done in the last second may not be in its log yet."""
    ahead, behind = (
        rank_history(k, np.zeros((num, 3)), time=NOW - 1 + (np.arange(num) - num) * step_s)
        for k, num in enumerate((9, 6))
    )
    frame = frame_of(run_of(ahead, behind), NOW, silent_s=600)
    assert [each.behind for each in frame.ranks] == [0, 3]
    console = Console(width=100, file=io.StringIO())
    console.print(picture_of(frame, Path("run"), 9))
    assert says in (text := console.file.getvalue()) and ("behind" in text) == bool(says)


def test_how_long_nothing_was_heard_is_said_before_anybody_is_silent() -> None:
    """A run that stands still shows the pace that it had; the time since tells that it stands."""
    frame = frame_of(run_of(rank_history(0, np.zeros((5, 3))), rank_history(1, np.zeros((5, 3)))), NOW + 25)
    assert frame.silent == () and [each.quiet_s for each in frame.ranks] == [25, 25]
    assert headline(frame).endswith("1.0 k tokens/s; last entry 25 s ago")


def test_a_narrow_picture_is_folded_and_cuts_no_number() -> None:
    ranks = (rank_history(k, np.full((5, 3), 1.234 + k), padding=np.full(5, 0.125)) for k in range(2))
    frame = frame_of(run_of(*ranks), NOW)
    texts: dict[int, str] = {}
    for width in (40, 60, 200):
        console = Console(width=width, file=io.StringIO())
        console.print(picture_of(frame, Path("run"), 9))
        texts[width] = console.file.getvalue()
        assert max(map(len, texts[width].splitlines())) <= width
    assert len({"".join(sorted(text)).strip() for text in texts.values()}) == 1


def test_thousands_of_ranks_make_a_frame() -> None:
    ranks = [rank_history(k, np.full((30, 3), k / 1000)) for k in range(4000)]
    frame = frame_of(run_of(*ranks, world_size=4096), NOW)
    assert len(frame.ranks) == 4000 and len(frame.missing) == 96 and frame.ranks[0].rank == 3999


def test_once_tells_scripts_whether_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = once(capsys, tmp_path / "later")
    assert status == 1 and "has not begun: the folder does not exist yet" in out
    (tmp_path / "later").mkdir()
    assert "has not begun: no rank has written" in once(capsys, tmp_path / "later")[1]
    status, out = once(capsys, tmp_path / "later", "--json")
    assert status == 1 and json.loads(out)["start"] is None
    write_log(tmp_path / "old", 2, ago_s=3600)
    status, out = once(capsys, tmp_path / "old")
    assert status == 1 and "all ranks are silent for 60 min: the run has ended or hangs" in out
    write_log(tmp_path / "part", 3)
    (tmp_path / "part" / "rank-000001.jsonl").unlink()
    status, out = once(capsys, tmp_path / "part")
    assert status == 1 and "rank 1 is not started yet" in out
    (tmp_path / "file").touch()
    assert main(["watch", str(tmp_path / "file"), "--once"]) == 2
    assert "no run log: not a folder with rank-000000.jsonl" in capsys.readouterr().err


@some(1)
@pytest.mark.parametrize("on_terminal", [True, False])
def test_an_interrupt_ends_it_and_leaves_the_last_picture(tmp_path: Path, on_terminal: bool) -> None:
    """It begins before the run, takes up what comes, and ends at Ctrl-C with a status of 0."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "meshfeed", "watch", str(tmp_path / "run"), "--every", "0.05"]
    out = theirs if on_terminal else subprocess.PIPE
    with subprocess.Popen(
        [*words] if on_terminal else [*words, "--json"],
        stdout=out,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "30", "PYTHONUNBUFFERED": "1"},
        preexec_fn=world.hears_interrupts,
    ) as process:
        os.close(theirs)
        fd = ours if on_terminal else process.stdout.fileno()  # type: ignore[union-attr]
        begun, going = (b"has not begun", b"waits 500 ms") if on_terminal else (b'"num_starts": 0', b'"read"')
        read_until(fd, begun)
        write_log(tmp_path / "run", 2, waits={1: 0.5})
        read_until(fd, going)
        process.send_signal(signal.SIGINT)
        rest = read_until(fd, None)
        status, err = process.wait(600), process.stderr.read()  # type: ignore[union-attr]
    os.close(ours)
    assert (status, err) == (0, b"")
    if on_terminal:
        assert b"waits 500 ms" in rest[rest.rindex(b"\x1b[?1049l") :], "after leaving its own screen"


def read_until(fd: int, what: bytes | None) -> bytes:
    """All that comes until some text has; until the end where it is None."""
    seen = b""
    while what is None or what not in seen:
        try:
            more = os.read(fd, 1 << 16)
        except OSError:  # a terminal whose other side is closed
            more = b""
        if not more:
            assert what is None, seen[-2000:]
            break
        seen += more
    return seen


# -- a real job ---------------------------------------------------------------------------------------


def slow_reader(rank: int, path: str, log: str) -> None:
    """A rank of a job; one is slow to read each of its steps."""
    recipe = recipe_of(path)
    if rank == SLOW_RANK:
        object.__setattr__(recipe.sequence, "load", delayed(recipe.sequence.load, range(NUM_STEPS)))
    layout = mf.Layout.parse("tp2-dp2")
    with mf.Feed(recipe, layout, delivery="direct", timeout_s=600, metrics=RunLog(log)) as feed:
        for step in itertools.islice(feed, NUM_STEPS):
            for _ in step.microbatches:
                pass


def test_a_delay_shows_on_its_rank_and_in_its_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    world.run(slow_reader, 4, str(tmp_path / "text"), str(tmp_path / "run"))
    status, out = once(capsys, tmp_path / "run", "--json", "--silent", "600")
    frame = json.loads(out)
    assert status == 0 and len(frame["ranks"]) == 4
    found = frame["straggler"]
    assert (found["rank"], found["stage"], found["does"]) == (SLOW_RANK, "read", "waits")
    assert found["seconds"] >= 0.9 * LEAP_S
    reads = {each["rank"]: each["wait_s"]["read"] for each in frame["ranks"]}
    assert reads[SLOW_RANK] >= 0.9 * LEAP_S, reads
    assert max(reads, key=lambda rank: reads[rank]) == SLOW_RANK, reads
    text = once(capsys, tmp_path / "run", "--silent", "600")[1]
    assert f"rank {SLOW_RANK} waits {duration(found['seconds'])} a step in read" in text
