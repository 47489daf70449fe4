"""What `import meshfeed` costs beyond `import torch`: seconds, medians of 9, in processes of their own.

python benchmarks/bench_import.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = (
    "import time, torch, torch.distributed, numpy; began = time.perf_counter(); import meshfeed; "
    "print(time.perf_counter() - began)"
)


def main() -> None:
    """Run and print."""
    times: list[float] = []
    for _ in range(9):
        done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
        times.append(float(done.stdout))
    print(f"import meshfeed after torch: {statistics.median(times):.3f} s (aim < 0.3 s)")


if __name__ == "__main__":
    main()
