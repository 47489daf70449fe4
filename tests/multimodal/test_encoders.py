"""Which rank encodes which part: brute force, and every kind of plan."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import PlanError
from meshfeed.multimodal import encoders
from meshfeed.multimodal.encoders import assign, plan_encoder
from meshfeed.plan import Packing, plan_step
from meshfeed.plan.types import Encoder
from planning import some_parts
from services.needs import needs_compiled
from soak import cases

CALM = settings(max_examples=cases(60), deadline=None, derandomize=True)


@CALM
@given(st.integers(0, 2**32 - 1), st.sampled_from(get_args(Encoder)), st.sampled_from([1, 2, 6]))
def test_each_part_is_encoded_once_wherever_its_tokens_are_needed(
    seed: int, encoder: Any, ranks: int
) -> None:
    """Any number of parts, none too; sequences that are split, truncated or dropped; ranks without a part."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 20))
    lengths = rng.integers(0, 120, n)
    packing = Packing(
        capacity=50,
        policy=rng.choice(["balanced", "dynamic_cp"]).item(),
        cp_sizes=None,
        oversize=rng.choice(["split", "truncate", "drop"]).item(),
    )
    plan = plan_step(lengths, packing, dp=ranks)
    of, start, tokens = some_parts(rng, lengths)
    work = rng.pareto(1, len(of)) * rng.choice([0, 1], len(of))
    made = plan_encoder(plan, of, work, encoder=encoder, start=start, tokens=tokens)
    # token by token: where is the output of each part needed?
    needed = {
        (part, row)
        for part, row in product(range(len(of)), range(plan.lengths.size))
        if plan.microbatch[row] >= 0 and plan.sequence[row] == of[part]
        if set(range(start[part], start[part] + tokens[part]))
        & set(range(plan.start[row], plan.start[row] + plan.lengths[row]))
    }
    assert list(zip(made.part.tolist(), made.row.tolist())) == sorted(needed)
    loads, handed = np.zeros((2, plan.num_microbatches, ranks))
    for entry, (part, row) in enumerate(zip(made.part, made.row)):
        assert made.microbatch[entry] == plan.microbatch[row]
        group = range(plan.first_rank[row], plan.first_rank[row] + plan.cp_size[row])
        assert range(made.first_rank[entry], made.first_rank[entry] + made.cp_size[entry]) == group
        assert made.rank[entry] in (range(ranks) if encoder == "balanced" else group)
        loads[made.microbatch[entry], made.rank[entry]] += work[part]
        handed[made.microbatch[entry], list(group) if encoder == "with sample" else made.rank[entry]] += work[
            part
        ]
    np.testing.assert_allclose(made.loads, loads, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(made.handed, handed, rtol=1e-12, atol=1e-12)
    assert 1 - 1e-9 <= made.bound <= made.max_over_mean + 1e-9 <= ranks + 1e-6
    if encoder == "balanced":
        for m, each in enumerate(loads):
            mine = work[made.part[made.microbatch == m]]
            # Graham 1969: longest first is within 4/3 - 1 / (3 ranks) of the optimum
            if ranks**mine.size <= 300_000:
                assert each.max() <= least_top(mine, ranks) * (4 / 3 - 1 / (3 * ranks)) + 1e-9
            assert each.max() <= each.mean() + mine.max(initial=0) + 1e-9


def least_top(work: np.ndarray, ranks: int) -> float:
    """The least work of the busiest rank, of all assignments."""
    if not work.size:
        return 0.0
    at = np.array(list(product(range(ranks), repeat=work.size)))
    loads = np.stack([np.where(at == rank, work, 0).sum(axis=1) for rank in range(ranks)])
    return float(loads.max(axis=0).min())


def test_a_step_without_parts() -> None:
    plan = plan_step([5, 6], Packing(capacity=64, microbatches=2), dp=4)
    made = plan_encoder(plan, [], [])
    assert made.part.size == 0 and made.loads.shape == (plan.num_microbatches, 4)
    assert made.max_over_mean == made.bound == 1
    assert plan_encoder(plan_step([], Packing(capacity=64), dp=4), [], []).loads.shape == (0, 4)


@CALM
@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(1, 9))
def test_the_compiled_loop_takes_the_same_rank(seed: int, num_parts: int, ranks: int) -> None:
    """Pools side by side, of some ranks each, and equal work, where ties decide."""
    needs_compiled()
    rng = np.random.default_rng(seed)
    work, pool = rng.choice([0.0, 1, 1, 2.5, 7], num_parts), rng.integers(0, 3, num_parts)
    begins = np.concatenate([[0], np.cumsum(rng.integers(1, ranks + 1, 3))])
    arguments = work, begins[pool], np.diff(begins)[pool], int(begins[-1])
    given = assign.share(*arguments)
    assert ((begins[pool] <= given) & (given < begins[pool + 1])).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign, "_share", None)
        np.testing.assert_array_equal(assign.share(*arguments), given)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([0, 2], [1.0, 1]), {}, "2 sequences and work on 2 parts; .* of a batch of 2 sequences"),
        (([0], [1.0, 1]), {}, "1 sequences and work on 2 parts"),
        (([0, 1], [1.0, -1]), {}, "work: -1.0 to 1.0"),
        (([0, 1], [1.0, 1]), {}, "the plan has cut sequences: give the start and the tokens of each part"),
        (([0, 1], [1.0, 1]), {"start": [0], "tokens": [1, 1]}, "start of 1, tokens of 2, for 2 parts"),
        (([0, 1], [1.0, 1]), {"encoder": "evenly"}, "choose one of with sample, group, balanced"),
    ],
)
def test_other_arguments_are_refused(arguments: Any, options: Any, message: str) -> None:
    plan = plan_step([5, 600], Packing(capacity=64, oversize="split"), dp=2)
    with pytest.raises(PlanError, match=message):
        encoders.plan_encoder(plan, *arguments, **options)
