"""Kill `meshfeed prepare` at random moments, go on, and compare with a run that was left alone.

python tests/outer/prepare/kills.py --kills 100 --workers 1 2 5
unshare -n sh -c 'ip link set lo up; exec python tests/outer/prepare/kills.py --engine ray --seconds 600 --workers 2'
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from texts import jsonl, left_behind, texts, tree

_STEPS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def dies_at(step, work):
    """Run `work` in a fork that ends, as by SIGKILL, right before its step-th change to a folder."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = step

    def hook(event, args):
        nonlocal left
        made = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if event in _STEPS or made:
            left -= 1
            if left == 0:
                os._exit(9)

    sys.addaudithook(hook)
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def command(folder: Path, out: Path, workers: int, engine: str, python: str) -> list[str]:
    options = [
        "--train-bpe",
        "300",
        "--eod",
        "--dedup",
        "exact",
        "--validation",
        "0.2",
        "--max-errors",
        "1",
        "--resume",
    ]
    given = [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]
    return [
        *(python, "-m", "meshfeed", "prepare", *given),
        *("--out", str(out), "--workers", str(workers), "--engine", engine, *options),
    ]


def make_corpus(folder: Path, count: int) -> None:
    some = texts(count, 8)
    jsonl(folder / "a.jsonl", some + some[:50])
    with (folder / "a.jsonl").open("a") as stream:
        stream.write("{broken\n")
    jsonl(folder / "b.jsonl.gz", texts(count // 4, 9))
    (folder / "c.txt").write_text("the last one")


def killed(words: list[str], after_s: float, *, workers_too: bool) -> bool:
    """Whether a run was killed, and did not end before."""
    ended, held = os.pipe()
    with tempfile.TemporaryFile() as said, os.fdopen(ended, "rb") as end:
        process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True, pass_fds=[held])
        os.close(held)
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            (os.killpg if workers_too else os.kill)(process.pid, signal.SIGKILL)
            process.wait()
            end.read()  # a fork that ran for this process has ended, too
            return True
        said.seek(0)
        assert process.returncode == 0, said.read().decode()
    return False


def run(
    folder: Path,
    num_kills: int,
    workers: list[int],
    seed: int,
    count: int = 20_000,
    engine: str = "local",
    limit_s: float = float("inf"),
    python: str = sys.executable,
) -> dict[str, int]:
    """Raises AssertionError where a killed run comes to something else; else how often what was done.

    python: who runs the command. A quick one is no process of the group that dies together.
    """
    rng = random.Random(seed)
    make_corpus(folder, count)
    begun = time.monotonic()
    assert not killed(command(folder, folder / "whole", workers[0], "local", python), 600, workers_too=False)
    whole_s, whole = time.monotonic() - begun, tree(folder / "whole")
    if engine != "local":
        begun = time.monotonic()
        assert not killed(
            command(folder, folder / "timed", workers[0], engine, python), 600, workers_too=False
        )
        whole_s = time.monotonic() - begun
    kills = finished = chain = 0
    while kills < num_kills or chain:
        if time.monotonic() - begun > limit_s:
            num_kills = kills
        out, count_ = folder / "out", workers[kills % len(workers)]
        more = kills < num_kills and chain < 8  # or one run would hardly ever reach its end
        after_s = rng.uniform(0.2, 1.0) * whole_s if more else 600
        if killed(command(folder, out, count_, engine, python), after_s, workers_too=rng.random() < 0.5):
            kills, chain = kills + 1, chain + 1
            continue
        assert tree(out) == whole, f"after {chain} kills the output differs"
        assert left_behind(out) == [], left_behind(out)
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        finished, chain = finished + 1, 0
    return {"kills": kills, "finished": finished}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 5])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="kill no more after so many")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(
            json.dumps(
                run(
                    Path(place),
                    args.kills,
                    args.workers,
                    args.seed,
                    args.documents,
                    args.engine,
                    args.seconds,
                )
            )
        )
