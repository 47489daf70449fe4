"""The role table of 16,384 ranks (tp8-cp4-dp32-pp16), and of 131,072: seconds, median of 7.

python benchmarks/bench_roles.py
"""

from __future__ import annotations

import statistics
import time

import meshfeed as mf


def main() -> None:
    """Run and print."""
    fields = mf.Windows(4096).fields
    for text in ("tp8-cp4-dp32-pp16", "tp8-cp4-dp256-pp16"):
        layout = mf.Layout.parse(text, ranks_per_node=8)
        for delivery in ("direct", "broadcast", "share", "tree"):
            times: list[float] = []
            for _ in range(7):
                began = time.perf_counter()
                roles = list(mf.assign_roles(layout, mf.StageMap(pp=16), fields, delivery))
                times.append(time.perf_counter() - began)
            readers = sum(role.reads for role in roles)
            aim = "  (aim < 2 s)" if layout.world_size == 16_384 else ""
            print(f"{text:20} {delivery:10} {readers:>7,} readers  {statistics.median(times):.3f} s{aim}")


if __name__ == "__main__":
    main()
