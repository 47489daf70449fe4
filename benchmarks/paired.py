"""What a step costs here and at another commit, in instructions: a busy machine cannot blur the comparison.

    python benchmarks/paired.py COMMIT        needs git, a C compiler and valgrind (apt install valgrind)

Times on a shared machine differ by 15 % from run to run. Valgrind counts the instructions of the same steps
in both trees; repeated, the counts differ by less than 0.1 %. It sees neither the kernel nor waits, which
bench_*.py measure. Each workload takes some steps first, so that nothing counts that is done once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
WARM, COUNTED, BATCH = 2, 4, 256
WORSE = 1.03  # what no change may cost


def main() -> None:
    """Both trees, and a line for each workload; exits with 1 if one costs more than it may."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the tree to compare with")
    parser.add_argument("--in-valgrind", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_valgrind:
        count(args.in_valgrind)
        return
    with tempfile.TemporaryDirectory() as name:
        other = Path(name) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), args.commit], check=True)
        try:
            subprocess.run([sys.executable, "hatch_build.py"], cwd=other, check=True)
            corpus = Path(name) / "corpus"
            write(corpus)
            before, now = (instructions(tree / "src", corpus) for tree in (other, ROOT))
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    title = f"million instructions of {COUNTED} steps"
    print(f"{title:46} {args.commit[:10]:>10} {'here':>10} {'ratio':>7}")
    for workload in (each for each in before if each in now):
        old, new = before[workload] / 1e6, now[workload] / 1e6
        print(f"{workload:46} {old:10.3f} {new:10.3f} {new / old:7.3f}")
    for workload in before.keys() ^ now.keys():
        print(f"{workload:46} in one tree only")
    worse = any(count > WORSE * before.get(each, count) for each, count in now.items())
    sys.exit(worse or not before or not before.keys() <= now.keys())


def write(corpus: Path) -> None:
    """20,000 documents, some 700 tokens each."""
    import numpy as np

    import meshfeed as mf

    rng = np.random.default_rng(0)
    with mf.IndexedWriter(corpus, np.uint16) as writer:
        for length in np.minimum(rng.lognormal(6, 1, 20_000).astype(int) + 1, 4096):
            writer.add_document(rng.integers(0, 50_000, length).astype(np.uint16))


def instructions(src: Path, corpus: Path) -> dict[str, int]:
    """Those of each workload by the package in src."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(src)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "out"
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={found}"]
        child = [sys.executable, str(HERE), "-", "--in-valgrind", str(corpus)]
        paths = {"PYTHONPATH": str(src), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        paths["MESHFEED_CACHE"] = f"{folder}/cache"  # of its own: each tree copies the index
        done = subprocess.run([*callgrind, *child], env=os.environ | paths, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        counts = dict[str, int]()
        for dump in sorted(Path(folder).glob("out.*")):
            text = dump.read_text()
            workload, total = (
                re.search(r"dump (.*)", text),
                re.search(r"^(?:summary|totals): (\d+)", text, re.M),
            )
            if workload and total:
                counts[workload[1]] = int(total[1])
        return counts


def count(corpus: Path) -> None:
    """The start, then the steps of each workload; tells valgrind when to count."""
    import torch  # its own start is the same in both trees

    torch.set_num_threads(1)
    gc.disable()  # a collection of everything would fall into the steps of one tree alone
    with counted("import, opening, first step"):
        first = fed("windows", corpus, "dp1", micro_batch_size=1)
        next(first)
    for name, steps in workloads(corpus):
        try:
            for _ in range(WARM):
                next(steps)
        except TypeError as unknown:  # an option that this tree lacks
            print(f"{name}: {unknown}", file=sys.stderr)
            continue
        with counted(name):
            for _ in range(COUNTED):
                next(steps)


@contextlib.contextmanager
def counted(name: str) -> Iterator[None]:
    """Have the instructions of a block counted under a name by the valgrind in which this process runs."""
    tell("--instr=on")
    tell("--zero")
    yield
    tell(f"--dump={name}")
    tell("--instr=off")


def tell(what: str) -> None:
    """Give a command to the valgrind in which this process runs."""
    subprocess.run(["callgrind_control", what, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def workloads(corpus: Path) -> Iterator[tuple[str, Iterator[None]]]:
    """A name and its steps."""
    import meshfeed as mf

    for layout in ("dp1", "tp2-dp4-pp2"):
        for size in (1, 32):
            steps = fed("windows", corpus, layout, micro_batch_size=size)
            yield f"windows, {layout}, batches of {size}", steps
    for layout in ("dp1", "dp8", "cp2-dp4"):
        steps = fed("documents", corpus, layout, packing=mf.Packing(capacity=16_384))
        yield f"packed documents, {layout}", steps
    yield "draws of a mixture of 10", drawn()


def fed(rule: str, corpus: Path, layout: str, **options: object) -> Iterator[None]:
    """Steps of a feed of rank 0."""
    import meshfeed as mf

    sequence = mf.Windows(4096) if rule == "windows" else mf.Documents()
    recipe = mf.Recipe(data=mf.open(corpus), sequence=sequence, batch=mf.Batch(sequences=BATCH), seed=1)
    each = {
        "layout": mf.Layout.parse(layout),
        "rank": 0,
        "transport": mf.Transport(delivery="direct", prefetch=0),
    }
    with mf.Feed(recipe, **each, **options) as feed:
        for step in feed:
            for microbatch in step.microbatches:
                microbatch["tokens"]
            yield


def drawn() -> Iterator[None]:
    """Draws of steps, far from the start."""
    import meshfeed as mf
    from meshfeed.order import draws_of_step

    sources = {str(k): (mf.Lengths([1] * (1000 + k)), k + 1.0) for k in range(10)}
    recipe = mf.Recipe(data=mf.Mixture(sources), sequence=mf.Documents(), batch=mf.Batch(sequences=BATCH))
    for step in itertools.count(10**6):
        draws_of_step(recipe, step)
        yield


if __name__ == "__main__":
    main()
