"""in_order against Megatron-core's dp_balanced rule, written here from its description.

No published megatron-core has DpBalancedScheduler yet (0.16.1 has not); where one does, this test should
call it.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.plan import Packing, packs_of, plan_step
from soak import cases


def dp_balanced(lengths, limit, multiple, most):
    """Fill a pack until the next sequence does not fit; then split from the tail. None where that runs
    dry."""
    packs = [[]]
    room = limit
    for i, length in enumerate(lengths):
        if length > room or len(packs[-1]) == most:
            packs.append([])
            room = limit
        packs[-1].append(i)
        room -= length
    at = len(packs) - 1
    while len(packs) % multiple:
        while at >= 0 and len(packs[at]) < 2:
            at -= 1
        if at < 0:
            return None
        packs.append([packs[at].pop()])
    return packs


@settings(max_examples=cases(75, 1_500), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1024) | st.sampled_from((256, 512)), min_size=1, max_size=120),
    dp=st.integers(1, 9),
    cp=st.sampled_from((1, 2, 4)),
    quantum=st.integers(1, 4),
    most=st.sampled_from((None, 1, 3)),
)
def test_same_packs_where_it_succeeds(lengths, dp, cp, quantum, most):
    packing = Packing(capacity=1024, policy="in_order", max_sequences=most)
    plan = plan_step(lengths, packing, dp=dp, cp=cp, quantum=quantum)
    padded = plan.align.padded(np.array(lengths), cp)
    packs = dp_balanced(padded.tolist(), 1024 * cp, dp * quantum, most)
    made = [
        packs_of(plan, rank * cp)[m].sequences.tolist()
        for m in range(plan.num_microbatches)
        for rank in range(dp)
    ]
    if packs is not None:
        assert made == packs
    else:  # it raises; here every sequence is a pack of its own and dummies make up the rest
        assert sorted(pack for pack in made if pack) == [[i] for i in range(len(lengths))]
