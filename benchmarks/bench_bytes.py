"""Bytes fetched for each byte consumed on a node, by how many ranks of a replica want it.

The corpus (8 MB of tokens, one epoch) lies behind nginx, whose access log counts every byte of every answer,
index and headers included. Real ranks on gloo read it whole at tp * cp * pp = 1, 2, 4, 8: as meshfeed does
by itself (delivery auto, which is share here), by direct reads through the node's cache, and the usual way,
every rank for itself.

    python benchmarks/bench_bytes.py        needs nginx
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from measure import verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

LAYOUTS = ("tp1", "tp2", "tp2-cp2", "tp2-cp2-pp2")
WAYS = {
    "auto": ("auto", False),
    "direct, node's cache": ("direct", False),
    "direct, each for itself": ("direct", True),
}
AIM = 1.02


def main() -> None:
    """Run and print."""
    import meshfeed as mf
    import world
    from corpus import write_corpus
    from services.nginx import Nginx
    from test_far import NUM_TOKENS, one_epoch

    print(
        f"bytes fetched / bytes consumed, {NUM_TOKENS:,} tokens\n{'':14}" + "".join(f"{w:>26}" for w in WAYS)
    )
    found: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "served").mkdir()
        write_corpus(folder / "served/corpus", num_tokens=NUM_TOKENS, mean=2_000)
        consumed = sum(file.stat().st_size for file in (folder / "served").iterdir())
        for layout in LAYOUTS:
            for way, (delivery, alone) in WAYS.items():
                ranks = mf.Layout.parse(layout).world_size
                with Nginx(folder / "served") as server:
                    cache = folder / f"{layout} {way}"
                    world.run(one_epoch, ranks, f"{server.url}/corpus", str(cache), layout, delivery, alone)
                    found[layout, way] = server.fetched_bytes() / consumed
            print(f"{layout:14}" + "".join(f"{found[layout, way]:>26.3f}" for way in WAYS), flush=True)
    worst = max(found[layout, "auto"] for layout in LAYOUTS)
    print(verdict("auto, the worst layout", worst, AIM, at_least=False))


if __name__ == "__main__":
    main()
