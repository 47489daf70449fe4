"""The same bytes from Ray and from Slurm as from processes of this machine; both run for real."""

from __future__ import annotations

import filecmp
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshfeed.prepare import Local, Text, prepare
from services.needs import needs, needs_root
from services.slurm import slurm

PART_BYTES = 20_000
RUN = """
import sys
from meshfeed.errors import MeshfeedError
from meshfeed.prepare import OnRay, OnSlurm, Text, prepare
engine = {"ray": OnRay, "slurm": OnSlurm}[sys.argv[1]](2)
told = lambda progress: print(progress.doing, progress.done_parts, flush=True)
try:
    prepare([sys.argv[2]], sys.argv[3], Text(tokenizer="bytes"), engine=engine, part_bytes=20_000, on_progress=told,
            resume="resume" in sys.argv)
except MeshfeedError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(7)
    path = tmp_path_factory.mktemp("engines") / "corpus.jsonl"
    lines = [json.dumps({"text": "".join(rng.choices("abc \n", k=rng.randint(0, 4000)))}) for _ in range(100)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(corpus: Path) -> Path:
    out = corpus.with_name("local")
    prepare([corpus], out, Text(tokenizer="bytes"), engine=Local(2), part_bytes=PART_BYTES)
    return out


def start(engine: str, corpus: Path, out: Path, *more: str, env: dict[str, str] | None = None):
    command = [sys.executable, "-c", RUN, engine, str(corpus), str(out), *more]
    if (
        engine == "ray"
    ):  # Ray binds every address; a network of its own keeps it from others and others from it
        needs("unshare", "ip")
        needs_root()
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    return subprocess.Popen(
        command,
        env=env or os.environ.copy(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def same(a: Path, b: Path) -> bool:
    names = sorted(each.name for each in a.iterdir())
    assert names == sorted(each.name for each in b.iterdir())
    return filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def killed_in_the_middle(process: subprocess.Popen[str]) -> None:
    for line in process.stdout:
        if line.split() == ["encoding", "2"]:
            break
    else:
        pytest.fail(f"no part came: {process.communicate(timeout=60)[1]}")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


def test_ray_gives_the_same_bytes_after_a_kill(corpus: Path, expected: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_in_the_middle(start("ray", corpus, out))
    assert not out.exists()
    process = start("ray", corpus, out, "resume")
    said, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert said.split()[1] >= "2", "what was encoded is not encoded again"
    assert same(out, expected)


def test_slurm_gives_the_same_bytes_after_a_kill(corpus: Path, expected: Path, tmp_path: Path) -> None:
    out, bad = tmp_path / "out", tmp_path / "bad.jsonl"
    scratch = tmp_path / "slurm"
    scratch.mkdir()
    with slurm(scratch) as env:
        killed_in_the_middle(start("slurm", corpus, out, env=env))
        process = start("slurm", corpus, out, "resume", env=env)
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
        assert same(out, expected)
        bad.write_text(corpus.read_text() + "{no json\n")
        process = start("slurm", bad, tmp_path / "none", env=env)
        _, errors = process.communicate(timeout=180)
        assert (
            process.returncode == 1 and f"{bad}: line 101" in errors and errors.startswith("PrepareError")
        ), errors
        queued = subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True, check=True).stdout
        assert "PENDING" not in queued


def test_missing_commands_are_named(corpus: Path, tmp_path: Path) -> None:
    process = start("slurm", corpus, tmp_path / "out", env={**os.environ, "PATH": str(tmp_path)})
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "no sbatch here" in errors, errors
