"""What a trainer's own samples bring travels through SequencePacking as it does through Megatron's schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron_world import Case, initialized, run, sample_of

import meshfeed as mf
from meshfeed.integrations import megatron


def config_of(
    case: Case, scheduler: str = "dp_balanced", capacity: int = 64, **options: Any
) -> SimpleNamespace:
    config = case.config
    config.sequence_packing_scheduler, config.max_seqlen_per_dp_cp_rank = scheduler, capacity
    vars(config).update(options)
    return config


def samples_of(dp_rank: int) -> list[dict[str, Any]]:
    """Position ids that do not count, masks per token, and a last sample that brings neither."""
    made: list[dict[str, Any]] = []
    for n in range(3):
        size = 9 + n + dp_rank
        sample = sample_of(np.full(size, 100 * dp_rank + 10 + n))
        sample["position_ids"] = torch.arange(size) * 2 + n
        sample["attention_mask"] = torch.arange(size) % 3 > 0
        made.append(sample)
    made.append(sample_of(np.full(12, 100 * dp_rank + 50)))
    del made[-1]["position_ids"]
    made[0]["attention_mask"] = torch.ones(
        1, 9, 9, dtype=torch.bool
    )  # as GPTDataset has it: of no use in a pack
    return made


def batches(wrapped: megatron.Wrapped) -> Iterator[dict[str, Any]]:
    iterator, count, _, _ = wrapped
    return (megatron.get_batch(iterator) for _ in range(count))


def own_keys_job(rank: int) -> dict[int, tuple[list[int], list[int]]]:
    """token -> its position ids and mask, as this rank got them."""
    case, seen = Case(cp=2), {}
    with initialized(case), megatron.SequencePacking(loading="replicated", timeout_s=60) as wrap:
        own = samples_of(parallel_state.get_data_parallel_rank())
        for batch in batches(wrap(iter([own]), config_of(case), 1)):
            for token in batch["tokens"].unique().tolist():
                here = batch["tokens"][0] == token
                mask = batch["attention_mask"][0, here].int().tolist()
                seen[token] = batch["position_ids"][0, here].tolist(), mask
    return seen


def test_position_ids_and_masks_of_the_samples_travel() -> None:
    results = run(own_keys_job, 4)
    for dp_rank in range(2):
        for sample in samples_of(dp_rank):
            token, size = int(sample["tokens"][0]), len(sample["tokens"])
            ids = sorted(n for seen in results for n in seen.get(token, ([], []))[0])
            assert ids == sample.get("position_ids", torch.arange(size)).tolist(), token
            mask = sum(sum(seen.get(token, ([], []))[1]) for seen in results)
            brought = sample.get("attention_mask", torch.zeros(1))
            assert mask == (int(brought.sum()) if brought.shape == (size,) else 0)


@pytest.mark.parametrize("group", [None, 3, 4])
def test_microbatches_come_in_the_groups_of_an_interleaved_schedule(group: int | None) -> None:
    case = Case(pp=2, vpp=2)
    config = config_of(case, "balanced", 32, microbatch_group_size_per_vp_stage=group)
    packing = megatron.packing_of(config, mf.Layout(pp=2))
    data = mf.Lengths(np.random.default_rng(0).integers(1, 32, 50))
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(sequences=20))
    counts = {
        step.batch.plan.num_microbatches
        for step in mf.simulate(recipe, mf.Layout(pp=2), 4, ranks=[0], packing=packing)
    }
    assert packing.quantum == group
    assert group is None or {count % group for count in counts} == {0}
    with pytest.raises(mf.PlanError, match="quantum=0"):
        mf.Packing(capacity=8, quantum=0)


def groups_job(rank: int) -> str:
    case = Case()
    with initialized(case):
        config = config_of(Case(pp=1, vpp=2), microbatch_group_size_per_vp_stage=3)
        with megatron.feed(
            mf.Recipe(data=mf.Lengths([5] * 20), sequence=mf.Documents(), batch=mf.Batch(sequences=20)),
            config,
            packing=mf.Packing(capacity=8),
        ) as feed:
            assert feed.packing is not None and feed.packing.quantum == 3
        with pytest.raises(mf.RoleError) as refused:
            megatron.is_reader(SimpleNamespace(tp=None))  # type: ignore[arg-type]
        return str(refused.value)


def test_a_feed_takes_the_group_size_and_process_groups_by_position_are_refused() -> None:
    (told,) = run(groups_job, 1)
    assert "SimpleNamespace as vp_stage" in told and "groups=..." in told
