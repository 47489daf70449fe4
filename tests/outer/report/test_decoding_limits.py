"""Whether decoding limits: what a report says of real jobs that are slow at one thing; and that text has none of it."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_up
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from delays import LEAP_S, delayed, leap
from meshfeed.cli.main import main
from meshfeed.datasets.workers import Workers
from meshfeed.metrics import Span, StageClock
from meshfeed.multimodal import decoding
from meshfeed.report import RankHistory, read_run
from meshfeed.report.history.decoding import limiting
from meshfeed.report.history.page import page
from meshfeed.report.history.waits import waits_of
from pictures import Look, multimodal, write_pictures
from soak import cases

SLOW, STEPS, DELAYED = 2, 10, (3, 5, 7)
PACKING = mf.Packing(capacity=64, oversize="truncate")


@dataclass(frozen=True)
class LooksLong(Look):
    """Where this is asked for: takes LEAP_S for each image, by the clock of its worker."""

    def __call__(self, *given: Any) -> Any:
        if "LOOKS_LONG" in os.environ:
            leap()
        return super().__call__(*given)


def train(rank: int, folder: str, workers: int, slow: str) -> list[dict[str, Any]]:
    """Stats of every step. slow: at what rank SLOW is, or all trainers are."""
    multiprocessing.current_process().daemon = False  # so that it may have workers
    is_slow = rank == SLOW and slow == "decode"
    recipe = multimodal(f"{folder}/store", image=LooksLong())
    if is_slow and workers:
        os.environ["LOOKS_LONG"] = "1"
        Workers.fetch = delayed(Workers.fetch, DELAYED)  # type: ignore[method-assign]
    elif is_slow:
        decoding.made_of = delayed(decoding.made_of, range(20, 60, 10))
    elif rank == SLOW and slow == "read":
        store = type(recipe.sources[0])
        store.read_part_ranges = delayed(store.read_part_ranges, DELAYED)  # type: ignore[method-assign]
    machine = mf.Machine(workers=workers)
    options: dict[str, Any] = {
        "packing": PACKING, "transport": mf.Transport(delivery="share", timeout_s=600), "machine": machine,
    }  # fmt: skip
    log, steps = mf.metrics.RunLog(f"{folder}/{slow}-{workers}"), list[mf.Step]()
    with mf.Feed(recipe, mf.Layout.parse("tp2-dp2"), metrics=log, **options) as feed:
        for step in itertools.islice(feed, STEPS):
            for _ in step.microbatches:
                pass
            if slow == "train":
                leap()
            steps.append(step)
    return [dict(step.stats) for step in steps]


def report(log: Path, out: Path) -> tuple[dict[str, Any], str]:
    """What `meshfeed report --json` says, and its page without the script."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        assert main(["report", str(log), "--out", str(out), "--json"]) == 0
    return json.loads(printed.getvalue()), out.read_text().split("<script")[0]


@pytest.mark.parametrize(
    ("slow", "workers", "says"),
    [
        ("decode", 1, f"Decoding is the bottleneck: rank {SLOW} .* 1 worker is busy 100% .*: give it more"),
        ("decode", 0, f"Decoding is the bottleneck: rank {SLOW} .* reading thread decodes"),
        ("read", 0, f"Look at rank {SLOW}: it waits .* for read"),
        ("train", 1, "hardly kept anybody waiting"),
    ],
)
def test_a_job_that_is_slow_at_one_thing(tmp_path: Path, slow: str, workers: int, says: str) -> None:
    write_pictures(tmp_path / "store")
    stats = world.run(train, 4, str(tmp_path), workers, slow)
    said, shown = report(tmp_path / f"{slow}-{workers}", tmp_path / "page.html")
    assert re.search(says, said["says"]), said["says"]
    assert said["decoding"]["limits"] == (slow == "decode")
    decode = [(each["rank"], each["workers"]) for each in said["decoding"]["ranks"]]
    assert decode == [(0, workers), (2, workers)], "only they read"
    assert 'id="decoding"' in shown
    history = read_run(tmp_path / f"{slow}-{workers}")
    for rank, mine in enumerate(stats):
        logged = history.ranks[rank]
        waits = [[each["exposed_wait_s"].get(stage, 0.0) for stage in history.stages] for each in mine]
        np.testing.assert_allclose(logged.wait, waits, atol=1e-6)
        if rank % 2:
            assert logged.decoded is None and "parts_decoded" not in mine[0]
            assert not any("decode" in each["work_s"] for each in mine)
            continue
        assert logged.decoded is not None
        assert logged.decoded.parts.tolist() == [each["parts_decoded"] for each in mine]
        assert logged.decoded.num_bytes.tolist() == [each["bytes_decoded"] for each in mine]
        assert min(sum(logged.decoded.parts), sum(logged.decoded.num_bytes)) > 0
        if slow in ("decode", "read") and rank == SLOW:
            long = [stage for each in mine for stage, s in each["exposed_wait_s"].items() if s > LEAP_S / 2]
            assert set(long) == {slow}


def test_a_wait_for_workers_that_mostly_read_is_a_wait_for_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 s a quarter is decoding; a part that is asked for again costs nothing."""
    now = iter([0.0, 8.0, 10.0, 10.0])
    monkeypatch.setattr(decoding, "time", SimpleNamespace(monotonic=lambda: next(now)))
    decoder = decoding.Decoder({}, mf.Machine())
    items = [decoding.Decoded({}, 10, read_s=r, busy_s=b, cpu_s=b / 2) for r, b in ((5.0, 1.0), (1.0, 1.0))]
    decoder._workers = SimpleNamespace(fetch=lambda places: items)  # type: ignore[assignment]
    places = [decoding.PartPlace("", 0, 0, part, None, None) for part in range(2)]
    for _ in range(2):
        decoder.decode(places)
    costs = decoder.costs
    assert (costs.wait_s, costs.busy_s, costs.cpu_s, costs.parts, costs.num_bytes) == (2.0, 2.0, 1.0, 2, 20)


@given(st.lists(st.floats(0, 9), min_size=2, max_size=9), st.floats(-1, 20))
@settings(max_examples=cases(100), deadline=None)
def test_what_is_split_off_a_stage_is_no_longer_in_it(times: list[float], seconds: float) -> None:
    clock = StageClock()
    ends = np.cumsum(times).tolist()
    clock.spans = [Span("read", begin, end) for begin, end in itertools.pairwise(ends)]
    whole = sum(span.stop - span.start for span in clock.spans)
    last = clock.spans[-1]
    clock.split("decode", seconds)
    for before, after in itertools.pairwise(clock.spans):
        assert before.start <= before.stop == after.start <= after.stop
    assert sum(span.stop - span.start for span in clock.spans) == pytest.approx(whole)
    decoded = sum(span.stop - span.start for span in clock.spans if span.stage == "decode")
    assert decoded == pytest.approx(min(max(seconds, 0.0), last.stop - last.start), abs=1e-9)


def test_text_has_nothing_of_it(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    with mf.Feed(recipe_of(str(tmp_path / "text")), metrics=mf.metrics.RunLog(tmp_path / "run")) as feed:
        stats = [dict(step.stats) for step in itertools.islice(feed, 4)]
    said, shown = report(tmp_path / "run", tmp_path / "page.html")
    for each in (
        *stats,
        said,
        shown.replace("--decode:", ""),
        (tmp_path / "run/rank-000000.jsonl").read_text(),
    ):
        assert "decod" not in str(each)
    assert "decod" not in page(made_up.history(2), "x").split("<script")[0].replace("--decode:", "")


SECONDS = st.integers(0, 99).map(lambda number: number / 64)


@given(st.lists(SECONDS, min_size=3, max_size=3), SECONDS)
@settings(max_examples=cases(20, 400), deadline=None)
def test_a_report_says_that_decoding_limits(decode: list[float], read: float) -> None:
    """It does if that is the longest wait for something of one's own, from a twentieth of a step on."""
    history = made_up.history(3, ((0, 12),))
    ranks: dict[int, RankHistory] = {}
    for number, rank in history.ranks.items():
        waits = np.zeros_like(rank.wait)
        waits[:, made_up.STAGES.index("read")] = read
        waits = np.column_stack([waits, np.full(12, decode[number])])
        ranks[number] = replace(rank, seconds=np.ones(12), wait=waits, work=waits)
    history = replace(history, stages=(*made_up.STAGES, "decode"), ranks=ranks)
    worst = limiting(waits_of(history))
    slowest = max(range(3), key=lambda number: (decode[number], -number))
    assume(decode[slowest] != read)
    limits = decode[slowest] > read and decode[slowest] >= 0.05
    assert (worst.rank if worst is not None else None) == (slowest if limits else None)
