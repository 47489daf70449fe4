"""What a trainer's own samples bring travels through SequencePacking as it does through Megatron's schedulers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
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
    made[0]["visual_inputs"] = SimpleNamespace(pixel_values=torch.full((2, 3), dp_rank), grids=[{"t": 1}])
    made[0]["attention_mask"] = torch.ones(1, len(made[0]["tokens"]), len(made[0]["tokens"])).tril() < 0.5
    return made


def batches(wrapped: megatron.Wrapped) -> Iterator[dict[str, Any]]:
    iterator, count, _, _ = wrapped
    return (megatron.get_batch(iterator) for _ in range(count))


def own_keys_job(rank: int) -> dict[int, tuple[list[int], list[int]]]:
    """token -> its position ids and mask, as this rank got them."""
    case, seen = Case(cp=2), {}
    with initialized(case), megatron.SequencePacking(readers="replicated", timeout_s=60) as wrap:
        own = samples_of(parallel_state.get_data_parallel_rank())
        for batch in batches(wrap(iter([own]), config_of(case), 1)):
            images = [v for v in batch.get("visual_inputs", ()) if v is not None]
            assert [v.grids for v in images] == [[{"t": 1}]] * len(images)
            owners = [int(v.pixel_values[1, 2]) for v in images]
            assert sorted(owners) == [t // 100 for t in batch["tokens"].unique().tolist() if t % 100 == 10]
            for token in batch["tokens"].unique().tolist():
                here = batch["tokens"][0] == token
                mask = batch["attention_mask"][0, here].int().tolist()
                seen[token] = batch["position_ids"][0, here].tolist(), mask
    return seen


def options_job(rank: int) -> list[Any]:
    """A collated batch with further keys, by the multiples of fp8, with padded lengths in both fields."""
    case, seen = Case(tp=2), list[Any]()
    rows = torch.arange(1, 3)[:, None].expand(2, 10) + 10 * (rank // 2)
    batch = {"tokens": rows, "labels": rows, "loss_mask": rows > 0, "uid": ["a", "b"], "image": rows[:, :3]}
    with (
        initialized(case),
        megatron.SequencePacking(align=mf.Align(sequence=8, pack=16), timeout_s=60) as wrap,
    ):
        iterator, count, _, _ = wrap(
            iter([batch] if rank % 2 == 0 else []) if rank % 2 == 0 else None, config_of(case), 1
        )
        for _ in range(count):
            made = megatron.get_batch(iterator, padded_cu_seqlens=True)
            params = made["packed_seq_params"]
            assert params.cu_seqlens_q.tolist() == params.cu_seqlens_q_padded.tolist()
            assert not (params.cu_seqlens_q % 8).any() and made["tokens"].numel() % 16 == 0
            firsts = made["tokens"][0, params.cu_seqlens_q[:-1]].tolist()
            seen += zip(firsts, made["uid"], [image.tolist() for image in made["image"]])
    with (
        initialized(case),
        megatron.SequencePacking(timeout_s=60) as wrap,
    ):  # packs of 1, 2 and 3 samples stay
        own = [
            [sample_of(np.full(3 + n, 100 * (rank // 2) + 10 * at + n)) for n in range(at)]
            for at in (1, 2, 3)
        ]
        static = {
            "thd_max_packed_sequences": 3,
            "pad_packed_seq_alignment": "max",
        }  # without graphs, a pack may have more
        source, config = iter(own) if rank % 2 == 0 else None, config_of(case, "empty", **static)
        iterator, count, *_ = wrap(source, config, 3)
        batches = [megatron.get_batch(iterator) for _ in range(count)]
        assert [batch["tokens"].numel() for batch in batches] == [64] * count
        kept = [batch["tokens"][batch["tokens"] > 0].unique_consecutive().tolist() for batch in batches]
        assert kept == [[int(sample["tokens"][0]) for sample in pack] for pack in own]
        assert not [name for batch in batches for name in batch if name.startswith("(")]
        with pytest.raises(
            mf.errors.PlanError, match=r"pack 0 of data-parallel rank 0 has 70 tokens.*holds 64"
        ):
            wrap(iter([[sample_of(np.ones(70))]]) if rank % 2 == 0 else None, config, 1)
    items, packing = iter([{"tokens": rows[0]}]), mf.Packing(capacity=64)
    with mf.Exchange(
        items, mf.Layout(dp=2, pp=2), packing=packing, transport=mf.Transport(timeout_s=60)
    ) as exchange:
        iterators = megatron.data_iterators(exchange)
        with pytest.raises(mf.errors.RecipeError, match=r"call megatron\.begin"):
            megatron.get_batch(iterators)  # type: ignore[arg-type]
    return seen


def both_jobs(rank: int) -> tuple[dict[int, tuple[list[int], list[int]]], list[Any]]:
    return own_keys_job(rank), options_job(rank)


@pytest.fixture(scope="module")
def told() -> list[tuple[dict[int, tuple[list[int], list[int]]], list[Any]]]:
    return run(both_jobs, 4)


def test_collated_rows_keep_their_further_keys_and_alignment_is_the_users(told: list[Any]) -> None:
    seen = [each for rank in (0, 2) for each in told[rank][1]]
    wanted = [(n + 10 * dp, b"ab"[n - 1 : n], [n + 10 * dp] * 3) for dp in range(2) for n in (1, 2)]
    assert sorted(seen) == wanted
    assert told[0][1] == told[1][1] and told[2][1] == told[3][1]


def test_position_ids_and_masks_of_the_samples_travel(told: list[Any]) -> None:
    results = [own for own, _ in told]
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
    with pytest.raises(mf.errors.PlanError, match="quantum=0"):
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
        with pytest.raises(mf.errors.RoleError) as refused:
            megatron.is_reader(SimpleNamespace(tp=None))
        return str(refused.value)


def test_a_feed_takes_the_group_size_and_other_things_by_position_are_refused() -> None:
    (told,) = run(groups_job, 1)
    assert "SimpleNamespace as vp_stage" in told and "groups=..." in told


def readers_job(rank: int) -> list[bool]:
    """As Megatron-Bridge, Megatron-LM and Megatron-LM with packs call `is_dataset_built_on_rank`."""
    with initialized(Case(pp=3)):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return [
            megatron.is_reader(groups),
            megatron.is_reader(vp_stage=0, is_packed_sequence=False),
            megatron.is_reader(vp_stage=0, is_packed_sequence=True),
        ]


def test_a_rank_reads_however_megatron_asks() -> None:
    assert run(readers_job, 3) == [[True] * 3, [False, False, True], [True] * 3]


def test_lengths_of_megatrons_mock_datasets(tmp_path: Path) -> None:
    told = {"mode": "distribution", "type": "lognormal", "lognormal_sigma": 1.1}
    told |= {"min_seq_len": 100, "max_seq_len": 4096, "mean_seq_len": 2048}
    np.random.seed(0)  # as its dataset draws them
    wanted = np.random.lognormal(np.log(2048) - 1.1**2 / 2, 1.1, 1_000_000).clip(100, 4096).astype(int)
    (tmp_path / "mock.json").write_text(json.dumps(told))
    for form in (told, json.dumps(told), tmp_path / "mock.json"):
        store = megatron.mock_lengths(form)
        assert np.array_equal(store.lengths(np.arange(store.num_documents)), wanted)
    (tmp_path / "lengths.csv").write_text("length\n30\n40\n")
    store = megatron.mock_lengths({"mode": "file", "path": tmp_path / "lengths.csv"})
    assert store.lengths(np.arange(2)).tolist() == [30, 40]
    for bad in ({"mode": "verification"}, "{}", tmp_path / "missing.json", {"mode": "distribution"}):
        with pytest.raises(mf.errors.StoreError, match="mock dataset config"):
            megatron.mock_lengths(bad)
