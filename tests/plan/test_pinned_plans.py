"""What the planner makes of some random steps, byte for byte: no change of code changes a plan unseen.

A better plan is welcome; `python tests/plan/test_pinned_plans.py > tests/plan/plans.json` pins it. Every rank plans alone,
so that all machines must make the same.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evened import plan_step
from meshfeed.plan import Align, CostModel, Packing

CASES: dict[str, dict[str, Any]] = {
    "balanced": {},
    "dynamic": {"policy": "dynamic_cp"},
    "in order": {"policy": "in_order"},
    "few sequences": {"max_sequences": 3},
    "dynamic, few sequences": {"policy": "dynamic_cp", "max_sequences": 2},
    "aligned": {"align": Align(sequence=16, pack=64)},
    "dynamic, aligned": {"policy": "dynamic_cp", "align": Align(sequence=8)},
    "fixed shapes": {"fixed_shapes": True, "max_sequences": 16},
    "fewest": {"microbatches": "fewest"},
    "nine": {"microbatches": 9},
    "dynamic, nine": {"policy": "dynamic_cp", "microbatches": 9},
    "window": {"cost": CostModel(alpha=300, window=700)},
    "dynamic, ring": {"policy": "dynamic_cp", "cost": CostModel(alpha=300, ring_tokens=670)},
    "dynamic, window, ring": {"policy": "dynamic_cp", "cost": CostModel(alpha=3000, window=900, ring_tokens=100)},
    "quadratic": {"cost": CostModel(alpha=1)},
    "dear microbatches": {"cost": CostModel(alpha=300, overhead=1e9)},
    "truncate": {"oversize": "truncate"},
    "drop": {"oversize": "drop"},
}  # fmt: skip


def digest_of(name: str, encoders: int) -> str:
    """Of the plans of ten steps: few and many sequences, alike and unlike, some empty, some giant."""
    options = {"capacity": 4096, "oversize": "split"} | CASES[name]
    held = hashlib.blake2b(digest_size=8)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        ranks, n = (1, 2, 4, 6, 8)[seed % 5], (3, 40, 150)[seed % 3]
        lengths = rng.integers(0, 1 << rng.integers(4, 14, n))
        lengths[rng.random(n) < (0, 0, 0.5)[rng.integers(3)]] = lengths[0]
        work = rng.integers(0, 9, (encoders, n)) * rng.integers(1, 1 << rng.integers(1, 9, n))
        pipeline = ({}, {"pp": 4}, {"pp": 2, "vpp": 2})[rng.integers(3)]
        plan = plan_step(
            lengths, Packing(**options), dp=ranks, encoder_work=work if encoders else None, **pipeline
        )
        arrays = (plan.microbatch, plan.first_rank, plan.cp_size, plan.sequence, plan.start, plan.lengths)
        held.update(
            f"{plan.num_microbatches} ".encode() + b"".join(each.astype("<i8").tobytes() for each in arrays)
        )
    return held.hexdigest()


def pinned() -> dict[str, list[str]]:
    return {name: [digest_of(name, encoders) for encoders in (0, 1, 2)] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_what_they_were(name: str) -> None:
    saved = json.loads(Path(__file__).with_name("plans.json").read_text())
    assert [digest_of(name, encoders) for encoders in (0, 1, 2)] == saved[name]


if __name__ == "__main__":
    print(json.dumps(pinned(), indent=1))
