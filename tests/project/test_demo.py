"""The demo as a user runs it, and the comparison that decides whether it has succeeded."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo import remote, story
from demo.compare import Run, compare
from demo.corpus import BLOCK_BYTES, Corpus
from demo.page import balance_of
from demo.storage import Manners, Served, SlowStorage

import quick
from meshfeed.errors import MeshfeedError
from meshfeed.remote.retries import Patience

STEPS, KILL_AT, TOLERANCE = 9, 6, 1e-6
SHORT = """
import multiprocessing, sys
multiprocessing.set_executable(sys.argv.pop())
from meshfeed.cli import demo, main
sys.path.insert(0, str(demo._examples()))
import demo.corpus, demo.remote, demo.runs, demo.story
demo.corpus._MOST_BYTES, demo.corpus._TRAINED_ON_BYTES = 500_000, 100_000
demo.runs.WINDOW = 32
demo.remote.STEPS = {"local": 3, "remote": 12, "apart": 12}
demo.remote.HEADROOM = 100.0
demo.remote._OPTIONS |= {"window": 64, "sequences": 8, "micro-batch-size": 4}
demo.story.PACKED_SIZES |= {"capacity": 512, "window": 256, "steps": 3}
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole demo, on four processes and then two."""
    out = tmp_path_factory.mktemp("demo") / "out"
    layouts = ["--first", "tp2-pp2", "--then", "cp2", "--kill-at", str(KILL_AT), "--steps", str(STEPS)]
    command = [quick.python(), "-c", SHORT, "demo", *layouts, "--out", str(out)]
    done = subprocess.run([*command, quick.python()], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "they agree" in done.stdout
    return out


def runs_of(out: Path) -> tuple[Run, Run, Run]:
    reference, first, then = (Run.read(out, name) for name in ("reference", "first", "then"))
    return reference, first, then


def test_the_job_that_was_killed_saw_what_the_other_saw(told: Path) -> None:
    reference, first, then = runs_of(told)
    found = compare(reference, first, then, 5, TOLERANCE)
    assert found.agree, found.problems
    assert found.num_sequences == STEPS * 16
    assert found.num_redone >= (KILL_AT - 5 + 1) * 16, "the steps after the checkpoint were read again"
    assert found.max_difference <= TOLERANCE
    assert max(first.losses) >= KILL_AT
    assert min(then.losses) == 5
    assert max(then.losses) == STEPS - 1


def test_packed_runs_are_measured(told: Path) -> None:
    balances = {policy: balance_of(Run.read(told, policy)) for policy in ("in_order", "balanced")}
    assert balances["balanced"].efficiency >= balances["in_order"].efficiency + 0.02
    assert balances["balanced"].efficiency > 0.9
    assert "waited for planning" in (told / "report.html").read_text()


def test_remote_storage_is_shown(told: Path) -> None:
    report = (told / "report.html").read_text()
    assert "From remote storage" in report and "every rank for itself" in report
    local, far, other = (Run.read(told, name) for name in ("local", "remote", "apart"))
    assert [line["index"] for line in far.ledger if line["step"] < 3 and line["rank"] == 0] == [
        line["index"] for line in local.ledger if line["rank"] == 0
    ]
    fetched = [
        sum(line["bytes_fetched"] for lines in run.costs.values() for line in lines) for run in (far, other)
    ]
    assert fetched[0] > 0 and 1.6 < fetched[1] / fetched[0] < 2.4, "each byte once, or once for each rank"
    late = [(int(late), int(of)) for late, of in re.findall(r"<td>(\d+) of (\d+)</td>", report)]
    assert late[0][1] > 0 and late[1][1] > 0
    assert all(late == (of + 80) // 100 for late, of in late), (
        "one request in a hundred was late, from the 20th"
    )


def test_storage_carries_several_requests_at_a_time_however_slow_the_steps_are() -> None:
    assert remote.bytes_per_s(6144, 0.01) == pytest.approx(remote.HEADROOM * 614_400)
    for step_s in (8.0, 1e6):
        assert 20 * BLOCK_BYTES / remote.bytes_per_s(6144, step_s) < Patience().timeout_s / 10


class NoTrainer:
    """Trains nothing: the runs are there."""

    def __init__(self, *args: Any) -> None: ...

    def train(self, *args: Any, **options: Any) -> None: ...


def test_a_report_is_kept_where_remote_storage_fails(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> None:
        assert "The two jobs agree" in (out / "report.html").read_text()
        raise MeshfeedError("storage is gone")

    out = Path(shutil.copytree(told, tmp_path / "out"))
    (out / "report.html").unlink()
    corpus = Corpus(prefix="corpus", vocab=1, num_files=1, num_bytes=1, num_tokens=1)
    fakes = {"_prepare": id, "begin_server": int, "make_corpus": lambda *_: corpus, "Trainer": NoTrainer}
    for name, fake in {**fakes, "train_from_remote_storage": fails}.items():
        monkeypatch.setattr(story, name, fake)
    words = {"first": "tp2-pp2", "then": "cp2", "kill_at": KILL_AT, "steps": STEPS, "delivery": "share"}
    with pytest.raises(
        MeshfeedError, match="the runs from remote storage failed, all others have ended: storage"
    ):
        story.run(argparse.Namespace(**words, out=out))
    assert "These runs have not ended" in (out / "report.html").read_text()
    assert "they agree" in capsys.readouterr().out


def test_one_request_in_a_hundred_is_late_by_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(bytes(100))
    manners = Manners(latency_s=0.0, late_by=20.0)
    with SlowStorage(tmp_path, manners) as storage:
        for _ in range(320):
            urllib.request.urlopen(f"{storage.url}/object").read()
        assert (storage.served.requests, storage.served.late) == (320, 4)
        manners.latency_s, manners.bytes_per_s = 0.05, 1000.0
        usual_s = storage.delay_s(100, late=False) + 100 / manners.bytes_per_s
        assert usual_s == pytest.approx(0.15)
        assert storage.delay_s(100, late=True) + 100 / manners.bytes_per_s == pytest.approx(20 * usual_s)
        storage.served, manners.late_every = Served(requests=19), 20
        assert len(urllib.request.urlopen(f"{storage.url}/object").read()) == 100
        assert storage.served.late == 0


def test_ledger_lines_say_who_what_and_where(told: Path) -> None:
    _, first, _ = runs_of(told)
    assert {line["rank"] for line in first.ledger} == {0, 1, 2, 3}
    assert set(first.ledger[0]) >= {"step", "microbatch", "rank", "coordinate", "source", "epoch", "index"}


def test_losses_and_report_are_written(told: Path) -> None:
    losses = json.loads((told / "losses.json").read_text())
    assert losses["agree"] is True
    assert len(losses["losses"]["reference"]) == STEPS
    report = (told / "report.html").read_text()
    assert "The two jobs agree" in report
    assert "http://" not in report
    assert "https://" not in report


def test_a_tampered_ledger_is_found_out(told: Path) -> None:
    reference, first, then = runs_of(told)
    lost = replace(then, ledger=[line for line in then.ledger if line["step"] != STEPS - 1])
    assert compare(reference, first, lost, 5, TOLERANCE).lost
    moved = [line | {"index": line["index"] + 1} if line["step"] == 2 else line for line in first.ledger]
    found = compare(reference, replace(first, ledger=moved), then, 5, TOLERANCE)
    assert found.lost
    assert found.repeated
    one_rank = [
        line | {"index": line["index"] + 1} if (line["step"], line["rank"]) == (2, 3) else line
        for line in first.ledger
    ]
    found = compare(reference, replace(first, ledger=one_rank), then, 5, TOLERANCE)
    assert any("ranks 0 and 3" in problem for problem in found.problems)


def test_a_tampered_loss_is_found_out(told: Path) -> None:
    reference, first, then = runs_of(told)
    off = replace(then, losses=dict(then.losses) | {7: then.losses[7] + 1e-3})
    found = compare(reference, first, off, 5, TOLERANCE)
    assert not found.agree
    assert found.max_difference == pytest.approx(1e-3, rel=1e-3)
    short = replace(then, losses={step: loss for step, loss in then.losses.items() if step != 7})
    assert not compare(reference, first, short, 5, TOLERANCE).agree
    nan = replace(then, losses=dict(then.losses) | {7: float("nan")})
    assert not compare(reference, first, nan, 5, TOLERANCE).agree


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--first", "tp3"], "heads"),
        (["--first", "nonsense"], "cannot read"),
        (["--kill-at", "40"], "--kill-at"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], says: str, tmp_path: Path) -> None:
    command = [quick.python(), "-m", "meshfeed", "demo", "--out", str(tmp_path / "out"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    command = [quick.python(), "-m", "meshfeed", "demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
