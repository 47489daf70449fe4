"""The same bytes from Ray and from Slurm as from processes of this machine; both run for real."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import random
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quick
from meshfeed.errors import PrepareError
from meshfeed.prepare import Local, OnRay, OnSlurm, Text, prepare
from services.needs import needs, needs_root
from services.slurm import slurm
from soak import only_soak

PART_BYTES = 20_000
WAIT_S = 600
RUN = """
import sys, time
from meshfeed.errors import MeshfeedError
from meshfeed.prepare import OnRay, OnSlurm, Text, prepare
from meshfeed.prepare.engines import on_slurm
engine, corpus, out, *more = sys.argv[1:]
engines = {"ray": OnRay(2), "slurm": OnSlurm(2, ["--hold"] if "hold" in more else [])}
on_slurm._LAG_S = 1.0
def run(told, resume="resume" in more):
    try:
        prepare([corpus], out, Text(tokenizer="bytes"), engine=engines[engine],
                part_bytes=20_000, on_progress=told, resume=resume)
    except MeshfeedError as error:
        return f"{type(error).__name__}: {error}"
def show(progress):
    print(progress.doing, progress.done_parts, flush=True)
    if f"stop at {progress.done_parts}" in more:
        time.sleep(600)
if "workers die" not in more:
    sys.exit(run(show))
"""
DYING = """
import os, ray, signal
from pathlib import Path
from meshfeed.prepare.engines import on_ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
         object_store_memory=80 << 20, _node_ip_address="127.0.0.1")
run_task = on_ray._run_task
on_ray._run_task = lambda folder, task: os.kill(os.getpid(), signal.SIGKILL)
os.environ["RAY_TASK_MAX_RETRIES"] = "0"
print(run(lambda progress: None), flush=True)
os.environ["RAY_TASK_MAX_RETRIES"] = "3"  # Ray's default
on_ray._run_task, killed = run_task, []
def workers():
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if (each / "cmdline").read_bytes().startswith((b"ray::_run_task", b"ray::IDLE")) and MARK.encode() in (each / "environ").read_bytes():
                yield int(each.name)
        except OSError:
            pass
def kill(progress):
    show(progress)
    if killed == ["begun"]:
        killed.extend(workers())
        for pid in killed[1:]:
            os.kill(pid, signal.SIGKILL)
    if not killed:
        killed.append("begun")
MARK = os.environ["MARK"]
error = run(kill, resume=True)
print("killed", len(killed) - 1)
sys.exit(error)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(7)
    path = tmp_path_factory.mktemp("engines") / "corpus.jsonl"
    texts = ["".join(rng.choices("abc \n", k=rng.randint(0, 4000))) for _ in range(100)]
    lines = [json.dumps({"id": at, "text": text}) for at, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(corpus: Path) -> Path:
    out = corpus.with_name("local")
    prepare([corpus], out, Text(tokenizer="bytes"), engine=Local(2), part_bytes=PART_BYTES)
    return out


def start(engine: str, corpus: Path, out: Path, *more: str, env: dict[str, str] | None = None):
    script = RUN + DYING * ("workers die" in more)
    command = [quick.python(), "-c", script, engine, str(corpus), str(out), *more]
    if engine == "ray":  # Ray binds every address; a network of its own keeps it from others
        needs("unshare", "ip")
        needs_root()
        env = {"RAY_worker_niceness": "0"} | (env or {})  # or a busy machine leaves its workers no time
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    return subprocess.Popen(
        command,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, errors = process.communicate(timeout=600)
    return process.returncode, said, errors


def same(a: Path, b: Path) -> bool:
    names = sorted(each.name for each in a.iterdir())
    assert names == sorted(each.name for each in b.iterdir())
    return filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def until_part(count: int, process: subprocess.Popen[str]) -> None:
    for line in process.stdout:
        if line.split() == ["encoding", str(count)]:
            return
    pytest.fail(f"no part came: {process.communicate(timeout=WAIT_S)[1]}")


def marked(mark: str) -> Iterator[int]:
    """Processes that have it in their environment."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (each / "environ").read_bytes():
                yield int(each.name)


def remove_parts(out: Path, keep: int) -> None:
    """Remove all but some parts, so that there is work left, however far the killed run came."""
    for part in sorted(out.with_name("out.preparing").glob("parts/*"))[keep:]:
        part.unlink()


@only_soak
def test_ray_ends_with_its_run_and_another_goes_on(corpus: Path, expected: Path, tmp_path: Path) -> None:
    out, mark = tmp_path / "out", secrets.token_hex(16)
    process = start("ray", corpus, out, "stop at 2", env={"MARK": mark})
    until_part(2, process)
    process.kill()  # the driver alone
    process.wait(WAIT_S)
    assert not out.exists()
    until = time.monotonic() + WAIT_S
    while left := list(marked(mark)):
        assert time.monotonic() < until, f"Ray outlived its run: {left}"
        time.sleep(0.1)
    remove_parts(out, keep=2)
    status, said, errors = ended(start("ray", corpus, out, "resume"))
    assert status == 0, errors
    assert "encoding 2" in said, "what was encoded is not encoded again"
    assert same(out, expected)


def test_ray_gives_the_same_bytes_though_workers_die(corpus: Path, expected: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, said, errors = ended(
        start("ray", corpus, out, "workers die", env={"MARK": secrets.token_hex(16)})
    )
    assert status == 0, errors
    told = {line.split()[0]: line for line in reversed(said.splitlines()) if line}  # the first of each word
    refused = told["PrepareError:"]
    assert "the Ray task that encoded it is lost: " in refused and refused.endswith("continue with --resume")
    assert int(told["killed"].split()[1]) >= 1
    assert same(out, expected)


def test_ray_that_is_not_there_is_named_at_once(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"Ray at 127\.0\.0\.1:1 cannot be reached: .*--ray-address"):
        prepare([corpus], tmp_path / "out", Text(tokenizer="bytes"), engine=OnRay(2, "127.0.0.1:1"))


def test_slurm_gives_the_same_bytes_after_kills_of_the_run_and_of_its_job(
    corpus: Path, expected: Path, tmp_path: Path
) -> None:
    out, bad = tmp_path / "out", tmp_path / "bad.jsonl"
    scratch = tmp_path / "slurm"
    scratch.mkdir()
    with slurm(scratch) as env:

        def told_by(*command: str) -> str:
            return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

        def begun(*more: str) -> tuple[subprocess.Popen[str], str]:
            """A run whose tasks are held back, and its job."""
            process = start("slurm", corpus, out, "hold", *more, env=env)
            while not (job := told_by("squeue", "-h", "-o", "%F", "--states=PENDING")) or orphan in job:
                assert process.poll() is None, process.communicate()
                time.sleep(0.2)
            return process, job

        orphan = "none"
        process, orphan = begun("stop at 5")
        told_by("scontrol", "release", f"{orphan}_0")
        until_part(5, process)
        process.kill()  # the driver alone
        process.wait(WAIT_S)
        while told_by("squeue", "-h", "-o", "%F", "--states=RUNNING,COMPLETING"):
            time.sleep(0.1)
        remove_parts(out, keep=5)
        process, job = begun("resume")
        assert orphan not in told_by("squeue", "-h", "-o", "%F"), "what the killed run has left is ended"
        told_by("scancel", job)
        status, _, errors = ended(process)
        assert status == 1, errors
        assert re.match(r"PrepareError: part 5: the Slurm job ended without it .*--resume", errors)
        status, _, errors = ended(start("slurm", corpus, out, "resume", env=env))
        assert status == 0 and same(out, expected), errors
        bad.write_text(corpus.read_text() + "{no json\n")
        status, _, errors = ended(start("slurm", bad, tmp_path / "none", env=env))
        assert status == 1 and f"{bad}: line 101" in errors and errors.startswith("PrepareError"), errors
        assert "PENDING" not in told_by("squeue", "-h", "-o", "%T")


def test_missing_commands_are_named(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PrepareError, match="no sbatch here"):
        prepare([corpus], tmp_path / "out", Text(tokenizer="bytes"), engine=OnSlurm(2))
