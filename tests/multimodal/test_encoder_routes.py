"""What ranks send each other of their encoders' outputs, played through without a network."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import PlanError
from meshfeed.multimodal.encoders import encoder_routes, plan_encoder
from meshfeed.plan import Align, CpSplit, Packing, packs_of, plan_step
from planning import outputs_of, some_parts
from soak import cases


@settings(max_examples=cases(150, 600), deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["with sample", "group", "balanced"]),
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from(get_args(CpSplit)),
)
def test_every_rank_receives_the_outputs_of_its_tokens_in_order(
    seed: int, encoder: Any, ranks: int, split: Any
) -> None:
    """Any cp, cut sequences, ranks and microbatches without a part, process groups in another order.

    No row is sent that no token needs, and no rank receives more than its capacity. It encodes no more than the
    capacity of its group, or of all ranks if they share all; and of parts that are cut, for each row, what
    lies outside of it, too: two parts of a row at most. If all share all, a rank has the mean of their work at
    most, and a largest part less its share (Graham 1966).
    """
    rng = np.random.default_rng(seed)
    cp = int(rng.choice([size for size in (1, 2) if ranks % size == 0]))
    lengths = rng.integers(0, 120, int(rng.integers(1, 20)))
    packing = Packing(
        capacity=50,
        policy="dynamic_cp" if cp == 1 and rng.random() < 0.5 else "balanced",
        oversize=rng.choice(["split", "truncate", "drop"]).item(),
        microbatches=None if rng.random() < 0.5 else 40,  # some are dummies
        fixed_shapes=bool(rng.random() < 0.3),
        max_sequences=20,
        align=Align(pack=int(rng.choice([1, 3]))),
    )
    plan = plan_step(lengths, packing, dp=ranks // cp, cp=cp, cp_split=split)
    of, start, tokens = some_parts(rng, lengths)
    work = rng.pareto(1, len(of))
    is_output = [rng.random(count) < rng.choice([0.5, 1.0]) for count in tokens]
    runs = [  # part, first token, tokens
        (part, first + begin, count)
        for part, (first, each) in enumerate(zip(start, is_output))
        for begin, count in runs_of(each) or [(0, 0)]
    ]
    part, begins, counts = np.array(runs).reshape(-1, 3).T
    number = [np.cumsum(each) - 1 for each in is_output]
    rows = [int(each.sum()) for each in is_output]
    made = plan_encoder(plan, of, work, encoder=encoder, start=start, tokens=tokens)
    begin, end = (np.array(each)[made.part] for each in (start, np.add(start, tokens)))
    first = plan.start[made.row]
    held = np.minimum(end, first + plan.lengths[made.row]) - np.maximum(begin, first)
    outside = end - begin - held
    assert np.bincount(made.row[outside > 0]).max(initial=0) <= 2
    place = rng.permutation(ranks).tolist()
    routes = [
        encoder_routes(made, plan, begins, counts, rank, part=part, split=split, order=place)
        for rank in range(ranks)
    ]
    assert {len(each) for each in routes} == {plan.num_microbatches}
    packs = [packs_of(plan, rank) for rank in range(ranks)]
    wanted = [
        [
            [(part, number[part][token]) for part, token in each if is_output[part][token]]
            for each in outputs_of(plan, rank, split, of, start, tokens)
        ]
        for rank in range(ranks)
    ]
    for m, now in enumerate(zip(*routes)):
        encoded = np.concatenate([route.encodes for route in now])
        assert sorted(encoded.tolist()) == np.flatnonzero(made.microbatch == m).tolist(), "each part once"
        room = packing.capacity * ranks
        assert sum(int(route.encoded_rows.sum()) for route in now) <= room + outside[encoded].sum()
        if encoder == "balanced":
            largest = made.work[encoded].max(initial=0)
            assert made.loads[m].max() <= (made.loads[m].mean() + largest * (1 - 1 / ranks)) * (1 + 1e-9)
        outbox: list[dict[int, list[tuple[int, int]]]] = []  # of each rank: receiver -> part and row
        for rank, route in enumerate(now):
            assert (made.rank[route.encodes] == rank).all()
            parts = made.part[route.encodes].tolist()
            outputs = [(part, row) for part in parts for row in range(rows[part])]
            assert route.encoded_rows.tolist() == [len(outputs)]
            assert route.receive_rows.size <= packing.capacity, "a rank has no more tokens"
            if encoder != "balanced":
                room = packing.capacity * packs[rank][m].cp_size
                assert len(outputs) <= room + outside[route.encodes].sum()
            sent = [outputs[row] for row in route.send_rows.tolist()]
            ends = np.cumsum(route.send_counts)
            assert ends[-1] == len(sent)
            outbox.append(
                {to: sent[end - count : end] for to, (end, count) in enumerate(zip(ends, route.send_counts))}
            )
        for rank, route in enumerate(now):
            arrived = []
            for sender in np.argsort(place).tolist():
                box = outbox[sender][place[rank]]
                assert len(box) == route.receive_counts[place[sender]]
                arrived += box
            assert [arrived[row] for row in route.receive_rows.tolist()] == wanted[rank][m]
            assert len(arrived) == len(wanted[rank][m]), "nothing is sent that no token needs"


def runs_of(each: np.ndarray) -> list[tuple[int, int]]:
    """Where runs of True begin, and their sizes."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], each, [False]]).astype(int))).reshape(-1, 2)
    return [(begin, stop - begin) for begin, stop in edges.tolist()]


def test_a_step_without_parts_sends_nothing() -> None:
    plan = plan_step([5, 6], Packing(capacity=64, microbatches=2), dp=4)
    for route in encoder_routes(plan_encoder(plan, [], []), plan, [], [], 3):
        assert not route.encodes.size and not route.receive_rows.size and not route.send_rows.size
        assert route.send_counts.tolist() == route.receive_counts.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([0], [3], 2), {}, "rank=2: the plan is for dp_cp ranks 0 to 1"),
        (([0], [3], 0), {"order": [0, 0]}, "give each of 0 to 1 once"),
        (([0], [3], 0), {"split": "none"}, "cp split 'none'"),
        (([], [], 0), {}, "0 runs: give them in the order of 1 parts"),
        (([0, 1], [3], 0), {}, "start of 2, tokens of 1 and part of 1 runs"),
        (([0], [-1], 0), {}, "part of 1 runs, from -1"),
        (([0, 1], [3, 3], 0), {"part": [0]}, "part of 1 runs"),
        (([0, 1], [3, 3], 0), {"part": [1, 0]}, "2 runs: give them in the order"),
    ],
)
def test_other_arguments_are_refused(arguments: Any, options: Any, message: str) -> None:
    plan = plan_step([5, 6], Packing(capacity=64), dp=2)
    made = plan_encoder(plan, [1], [1.0])
    with pytest.raises(PlanError, match=message):
        encoder_routes(made, plan, *arguments, **options)
