"""Bytes fetched for each byte consumed on a node, by how many ranks of a replica want it.

The corpus (8 MB of tokens, one epoch) lies behind nginx, whose access log counts every byte of every answer,
index and headers included. Real ranks on gloo read it whole at tp * cp * pp = 1, 2, 4, 8: as meshfeed does
by itself (delivery auto, which is share here), by direct reads through the node's cache, and the usual way,
every rank for itself.

Needs nginx.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import measure
from measure import Row

LAYOUTS = ("tp1", "tp2", "tp2-cp2", "tp2-cp2-pp2")
WAYS = {
    "delivery auto": ("auto", False),
    "direct, through the node's cache": ("direct", False),
    "every rank for itself": ("direct", True),
}


def measured(short: bool) -> Iterator[Row]:
    """Each layout and way."""
    measure.needs("nginx")
    import meshfeed as mf
    import world
    from corpus import write_corpus
    from services.nginx import Nginx
    from test_far import NUM_TOKENS, one_epoch

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "served").mkdir()
        write_corpus(folder / "served/corpus", num_tokens=NUM_TOKENS, mean=2_000)
        consumed = sum(file.stat().st_size for file in (folder / "served").iterdir())
        for layout in LAYOUTS[1:2] if short else LAYOUTS:
            for way, (delivery, alone) in WAYS.items():
                ranks = mf.Layout.parse(layout).world_size
                with Nginx(folder / "served") as server:
                    cache = folder / f"{layout} {way}"
                    world.run(one_epoch, ranks, f"{server.url}/corpus", str(cache), layout, delivery, alone)
                    fetched = server.fetched_bytes() / consumed
                yield Row(
                    name=f"bytes fetched on a node for each byte consumed, {layout}, {way}",
                    value=fetched,
                    unit="",
                    aim=None if alone else 1.02,
                )


if __name__ == "__main__":
    measure.main(__doc__, measured)
