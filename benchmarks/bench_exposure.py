"""Which steps saw a million documents of a run over 10¹² tokens, by the command as a user runs it.

`meshfeed exposure RECIPE LIST --json`, in a process of its own, for windows and for whole documents of a
mixture of four sources with 10⁸ documents. Its CPU includes the start of Python, the lengths of documents,
the reading of LIST and every line that it prints. A scan would at least have to draw every step: some steps
all over the run are drawn, and the time of all of them follows.
"""

from __future__ import annotations

import json
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import measure
import numpy as np
from measure import Row

from meshfeed.order import draws_of_step

SOURCES, DOCUMENTS, WANTED = 4, 10**8, 10**6
MEAN, WINDOW, BATCH = 10_000, 8_192, 1_024  # tokens, tokens, sequences
MINUTE_S = 60
DRAWN = 200  # steps

RECIPE = """
import numpy as np
import meshfeed as mf

def store(source):
    lengths = np.random.default_rng(source).integers(1, {most}, {documents}, np.int32)
    return mf.Lengths(lengths)

recipe = mf.Recipe(
    data=mf.Mixture({{str(source): (store(source), 0.25) for source in range({sources})}}),
    sequence={rule},
    batch=mf.Batch(sequences={batch}),
)
"""


def measured(short: bool) -> Iterator[Row]:
    """Windows and documents."""
    documents, wanted = (20_000, 100) if short else (DOCUMENTS, WANTED)
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(9)
        each = documents // SOURCES
        numbers = rng.choice(each * SOURCES, wanted, replace=False)
        lines = (f"{number // each}\t{number % each}\n" for number in numbers.tolist())
        (folder / "removal.txt").write_text("".join(lines))
        num_windows = documents * MEAN // WINDOW
        rules = {
            "windows": (f"mf.Windows({WINDOW})", num_windows),
            "documents": ("mf.Documents()", documents),
        }
        for kind, (rule, sequences) in rules.items():
            text = RECIPE.format(most=2 * MEAN, documents=each, sources=SOURCES, rule=rule, batch=BATCH)
            (folder / "recipe.py").write_text(text)
            steps = sequences // BATCH
            spent_s = exposure_s(folder, steps, wanted)
            what = f"exposure of 10⁶ documents in 10¹² tokens, {kind}"
            yield Row(name=what, value=spent_s, unit="s of CPU", aim=MINUTE_S)
            yield Row(name=what, against="drawing every step", value=spent_s / drawing_s(folder, steps))


def exposure_s(folder: Path, steps: int, wanted: int) -> float:
    """Seconds of CPU of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "found.jsonl").open("w+b") as out:
        command = [sys.executable, "-m", "meshfeed", "exposure", "recipe.py", "removal.txt", "--json"]
        subprocess.run([*command, "--until", str(steps)], cwd=folder, stdout=out, check=True)
        out.seek(0)
        found = json.loads(out.readline())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found["documents"] == wanted
    assert found["seen"] > 0.9 * wanted  # the last step may have reached an epoch's end in some sources only
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def drawing_s(folder: Path, steps: int) -> float:
    """Seconds of CPU to draw all steps, from those of some."""
    recipe = runpy.run_path(str(folder / "recipe.py"))["recipe"]
    some = np.linspace(0, steps, min(steps, DRAWN), endpoint=False, dtype=np.int64)
    draws_of_step(recipe, 0)
    began = time.process_time()
    for step in some.tolist():
        draws_of_step(recipe, step)
    return (time.process_time() - began) / some.size * steps


if __name__ == "__main__":
    measure.main(__doc__, measured)
