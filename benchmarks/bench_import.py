"""What importing `meshfeed.Feed` costs beyond `import torch`: seconds, medians of 9 processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

import measure
from measure import Row

CODE = (
    "import time, torch, torch.distributed, numpy; began = time.perf_counter(); from meshfeed import Feed; "
    "print(time.perf_counter() - began)"
)


def measured(short: bool) -> Iterator[Row]:
    """The one figure."""
    times: list[float] = []
    for _ in range(1 if short else 9):
        done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
        times.append(float(done.stdout))
    yield Row(name="import of Feed, after torch", value=statistics.median(times), unit="s", aim=0.3)


if __name__ == "__main__":
    measure.main(__doc__, measured)
