"""Killed at any step, a run goes on to the very same bytes."""

import functools
import os
import sys

import pytest
from kills import dies_at, run
from texts import Here, jsonl, left_behind, texts, tree

import quick
from meshfeed.prepare import Text, prepare
from meshfeed.prepare.engines import tasks as module
from meshfeed.prepare.engines.tasks import encoded, prepare_tasks, run_task
from soak import SOAK, cases, only_soak


def dies_at_line(count, file, work):
    """Run `work` in a fork that ends, as by SIGKILL, right before its count-th line of a file."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = count

    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename != file:
            return None
        left -= event == "line"
        if not left:
            os._exit(9)
        return trace

    sys.settrace(trace)
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


@only_soak
def test_killed_before_any_step_it_goes_on_to_the_same_bytes(tmp_path):
    """Every creation, rename and removal of a file (in `make test` every third) of a run that replaces another."""
    some = texts(7)
    jsonl(tmp_path / "a.jsonl", some + some[:3])
    jsonl(tmp_path / "old.jsonl", some[:2])

    def run(out, **options):
        options = {
            "dedup": True,
            "validation": 0.5,
            "part_bytes": 900,
            "engine": Here(),
        } | options
        return prepare([tmp_path / "a.jsonl"], out, Text(tokenizer="bytes"), **options)

    run(tmp_path / "whole")
    whole, out, step, between = tree(tmp_path / "whole"), tmp_path / "out", 0, 0
    killed = True
    while killed:
        step += cases(3, 1)
        if not out.exists():
            prepare([tmp_path / "old.jsonl"], out, Text(tokenizer="bytes"), engine=Here())
        old = tree(out)
        killed = dies_at(step, lambda: run(out, overwrite=True))
        assert not out.exists() or tree(out) in (old, whole), "never anything in between"
        if not out.exists():  # between the old one's rename and the new one's
            with pytest.raises(KeyboardInterrupt):
                run(out, overwrite=True, engine=Here(stop_after=0))
            assert tree(out) == old, "the old one is back until there is a new one"
            between += 1
        run(out, overwrite=True, resume=True)
        assert tree(out) == whole, step
        assert left_behind(out) == [], step
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        out.rmdir()
    assert step > 40 and between in ({0, 1}, {1})[SOAK], "the steps were not seen"


class Restarted:
    """A task that is killed before any line of its own, and restarted under its number, as Ray does."""

    kills = 0

    def encode(self, folder, parts):
        while True:
            tasks = prepare_tasks(folder, parts)
            run = functools.partial(run_task, tasks, 0)
            killed = dies_at_line(self.kills + 1, module.__file__, run)
            run()
            done = list(encoded(tasks, parts, lambda: (0, "ended without it"), 0))
            if not killed:
                yield from done
                return
            self.kills += 1
            for part in (folder / "parts").iterdir():
                part.unlink()


def test_a_restarted_task_leaves_no_part_to_nobody(tmp_path):
    jsonl(tmp_path / "a.jsonl", texts(4))
    for name, each in ("whole", Here()), ("out", restarted := Restarted()):
        prepare([tmp_path / "a.jsonl"], tmp_path / name, Text(tokenizer="bytes"), part_bytes=900, engine=each)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert restarted.kills >= 10, "the lines of a task were not seen"


def test_real_kills_of_the_command_and_its_workers(tmp_path):
    python = sys.executable if SOAK else quick.at_hand()
    done = run(
        tmp_path, cases(1, 15), [5 if SOAK else 2, 1], seed=1, count=cases(1_000, 2_000), python=python
    )
    assert done["kills"] == cases(1, 15)
    assert done["finished"] >= 1
