"""The role table of 16,384 ranks (tp8-cp4-dp32-pp16), and of 131,072: seconds, medians of 7."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import measure
from measure import Row, in_turn

import meshfeed as mf


def measured(short: bool) -> Iterator[Row]:
    """Each size and delivery."""
    fields = mf.Windows(4096).fields
    for text in ("tp8-cp4-dp32-pp16",) if short else ("tp8-cp4-dp32-pp16", "tp8-cp4-dp256-pp16"):
        layout = mf.Layout.parse(text, ranks_per_node=8)
        tables = {
            delivery: partial(mf.roles.assign_roles, layout, mf.StageMap(pp=16), fields, delivery)
            for delivery in ("direct", "broadcast", "share", "tree")
        }
        took = in_turn(
            {name: lambda table=table: list(table()) for name, table in tables.items()}, 1 if short else 7
        )
        for delivery, times in took.items():
            yield Row(
                name=f"role table of {layout.world_size:,} ranks, {delivery}",
                value=statistics.median(times),
                unit="s",
                aim=2.0 if layout.world_size == 16_384 else None,
            )


if __name__ == "__main__":
    measure.main(__doc__, measured)
