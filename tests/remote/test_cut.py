"""How an object is cut into blocks: of one size, or where shards meet."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshfeed.remote.cut import LEAST, Cut, cut_at


@given(size=st.integers(0, 5_000), block=st.integers(1, 700))
def test_blocks_of_one_size(size: int, block: int) -> None:
    cut = Cut(size, block)
    assert cut.edges.tolist() == [*range(0, size, block), size]
    assert cut.name(3) == "3"


@given(
    size=st.integers(1, 20_000),
    units=st.integers(1, 40),
    unit=st.integers(1, 64),
    shard=st.integers(1, 3_000),
    overlap=st.integers(0, 200),
)
def test_blocks_end_where_shards_meet(size: int, units: int, unit: int, shard: int, overlap: int) -> None:
    begins = np.arange(shard, size, shard)
    ends = begins + overlap
    block = units * unit
    cut = cut_at((begins, ends), size, block, unit)
    edges = cut.edges
    if not cut.ends:
        assert size < block // LEAST * (begins.size + 1) and not cut.shared
        return
    assert edges[0] == 0 and edges[-1] == size and (np.diff(edges) > 0).all()
    assert (np.diff(edges) <= block).all() and (edges[:-1] % unit == 0).all()
    # a shard reads its own blocks, and none that ends in another one, but for what rounding takes
    low, high = begins // unit * unit, np.minimum(-(-ends // unit) * unit, size)
    assert set(low.tolist()) | set(high.tolist()) <= set(edges.tolist())
    inside = [
        block
        for block, (begin, end) in enumerate(zip(edges.tolist(), edges[1:].tolist()))
        if ((low <= begin) & (end <= high)).any()
    ]
    assert sorted(cut.shared) == inside
    assert {cut.name(each) for each in inside} == {f"{each}+" for each in inside}


def test_a_block_is_no_shorter_than_it_must_be() -> None:
    cut = cut_at((np.array([1000]), np.array([1010])), 2000, 400, 1)
    assert cut.edges.tolist() == [0, 334, 668, 1000, 1010, 1340, 1670, 2000] and cut.shared == {3}
