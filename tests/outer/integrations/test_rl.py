"""Drop-in functions for verl, slime and NeMo-RL: every row once, no pack over its cap, as many on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import PlanError
from meshfeed.integrations import rl
from meshfeed.plan import CostModel
from soak import cases

TRACES = Path(__file__).parents[3] / "benchmarks" / "data"
LENGTHS = st.lists(st.integers(0, 60), min_size=24, max_size=80)


def slime_args(**given: Any) -> SimpleNamespace:
    defaults = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": None, "balance_data": False}
    return SimpleNamespace(**{**defaults, "micro_batch_size": None, **given})


def parallel(dp: int = 1, cp: int = 1, group: int = 1) -> dict[str, int]:
    """slime's train_parallel_config; group: microbatches that virtual stages take at a time."""
    return {
        "dp_size": dp,
        "cp_size": cp,
        "vpp_size": 1 + (group > 1),
        "microbatch_group_size_per_vp_stage": group,
    }


def microbatches_of(partitions: list[list[int]], places: list[list[list[int]]]) -> list[list[list[int]]]:
    """The samples of each microbatch of each rank; the places of a rank tile its samples."""
    for own, microbatches in zip(partitions, places, strict=True):
        assert [place for each in microbatches for place in each] == list(range(len(own)))
    return [[[own[at] for at in each] for each in m] for own, m in zip(partitions, places)]


@settings(max_examples=cases(12), deadline=None)
@given(LENGTHS, st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(1, 3))
def test_slime(lengths: list[int], dp: int, cp: int, group: int, per_rollout: int) -> None:
    """Samples of a rollout are in one step, and what fills no step is left out."""
    lengths = lengths[: len(lengths) // per_rollout * per_rollout]
    rollouts = [sample // per_rollout for sample in range(len(lengths))]
    size = -(-24 // per_rollout)
    if max(rollouts) + 1 < size:
        return
    args = slime_args(max_tokens_per_gpu=40, pipeline_model_parallel_size=2 * group)
    partitions, places, counts, sizes = rl.build_dp_schedule(
        args, parallel(dp, cp, group), lengths, global_batch_size=size, rollout_indices=rollouts
    )
    assert sizes == [size] * ((max(rollouts) + 1) // size) and len(counts) == len(sizes)
    packs, done = microbatches_of(partitions, places), 0
    for step, count in enumerate(counts):
        assert count % group == 0
        taken = [each[done : done + count] for each in packs]
        done += count
        assert all(all(each) and len(each) == count for each in taken)  # as many on every rank, none empty
        for pack in (pack for each in taken for pack in each):
            padded = [-(-max(lengths[sample], 1) // (2 * cp)) * 2 * cp for sample in pack] if cp > 1 else []
            assert sum(padded or [lengths[sample] for sample in pack]) <= 40 * cp or len(pack) == 1
        samples = sorted(sample for each in taken for pack in each for sample in pack)
        assert samples == [s for s, rollout in enumerate(rollouts) if rollout // size == step]
    assert all(len(each) == done for each in packs)


@pytest.mark.parametrize("balance", [False, True])
def test_slime_with_microbatches_of_so_many_samples(balance: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 5000, 48).tolist()
    args = slime_args(use_dynamic_batch_size=False, micro_batch_size=3, balance_data=balance)
    given = {"global_batch_size": 24, "rollout_indices": range(48)}
    partitions, places, counts, _ = rl.build_dp_schedule(args, parallel(4), lengths, **given)
    assert counts == [2, 2]
    assert all(len(pack) == 3 for each in places for pack in each)
    assert sorted(sample for own in partitions for sample in own) == list(range(48))
    work = np.array([sum(lengths[sample] for sample in own) for own in partitions])
    assert (work.max() < 1.1 * work.mean()) == balance
    with pytest.raises(PlanError, match="24 samples in microbatches of 3 do not divide among 5 ranks"):
        rl.build_dp_schedule(args, parallel(5), lengths, **given)
    with pytest.raises(PlanError, match="48 rollouts: a step has global_batch_size=49"):
        rl.build_dp_schedule(args, parallel(4), lengths, global_batch_size=49, rollout_indices=range(48))


@settings(max_examples=cases(12), deadline=None)
@given(LENGTHS, st.integers(1, 6), st.integers(0, 2))
def test_nemo_rl(lengths: list[int], ranks: int, more: int) -> None:
    packer = rl.get_packer("first_fit", 60, min_bin_count=(1 + more) * ranks, bin_count_multiple=ranks)
    packs = packer.pack(lengths)
    assert len(packs) % ranks == 0 and len(packs) >= (1 + more) * ranks and all(packs)
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= 60
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one function that the adapter calls, for a dict of tensors."""
    module = ModuleType("verl.utils.tensordict_utils")
    module.index_select_tensor_dict = lambda batch, rows: {key: value[rows] for key, value in batch.items()}  # type: ignore[attr-defined]
    for name in ("verl", "verl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def rows(lengths: list[int], width: int = 60) -> dict[str, torch.Tensor]:
    """A batch of verl's, padded on the right."""
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.arange(mask.numel()).reshape(mask.shape), "attention_mask": mask}


@pytest.mark.usefixtures("verl")
@settings(max_examples=cases(12), deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 3]), st.sampled_from([None, 1, 9]))
def test_verl(lengths: list[int], multiple: int, least: int | None) -> None:
    batch = rows(lengths)
    made, taken = rl.rearrange_micro_batches(
        batch, 75, num_batches_divided_by=multiple, min_num_micro_batch=least
    )
    assert len(made) % multiple == 0 and len(made) >= (least or 1) and all(taken)
    assert all(each["attention_mask"].sum() <= 75 for each in made)
    # results of all microbatches return to the order of the rows
    results = torch.cat([each["input_ids"] for each in made])
    back = rl.get_reverse_idx([row for pack in taken for row in pack])
    assert torch.equal(results[back], batch["input_ids"])
    work = [rl.CostModel(alpha=25_100).work(np.maximum(lengths, 1)[pack]).sum() for pack in taken]
    top = int(np.argmax(work))
    assert work[:top] == sorted(work[:top]) and work[top:] == sorted(work[top:])[::-1]


@pytest.mark.usefixtures("verl")
@settings(max_examples=cases(12), deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.booleans())
def test_groups_of_verl_stay_together(lengths: list[int], multiple: int, size: int, balance: bool) -> None:
    lengths = [length for length in lengths for _ in range(size)]
    lengths[0] = 1  # rows of a group differ
    batch = rows(lengths)
    made, taken = rl.rearrange_micro_batches(
        batch, 250, None, multiple, True, None, balance, force_group_size=size
    )
    assert len(made) % multiple == 0 and all(taken)
    assert all(each["attention_mask"].sum() <= 250 for each in made)
    groups = [pack[at : at + size] for pack in taken for at in range(0, len(pack), size)]
    assert sorted(groups) == [[*range(at, at + size)] for at in range(0, len(lengths), size)]
    assert all(torch.equal(each["input_ids"], batch["input_ids"][pack]) for each, pack in zip(made, taken))


@pytest.mark.usefixtures("verl")
def test_groups_of_verl_are_even_in_work() -> None:
    # four groups of 40 tokens, one in two long rows, and two of 20: each microbatch gets 60
    batch = rows([10] * 4 + [20, 20] + [10] * 8 + [5] * 8, 60)
    with pytest.raises(PlanError, match=r"^22 rows do not divide into groups of force_group_size=4"):
        rl.rearrange_micro_batches(batch, 60, force_group_size=4)
    batch = rows([10] * 4 + [20, 20, 0, 0] + [10] * 8 + [5] * 8, 60)
    made, _ = rl.rearrange_micro_batches(batch, 60, num_batches_divided_by=2, force_group_size=4)
    assert sorted(int(each["attention_mask"].sum()) for each in made) == [40, 40, 60, 60]
    with pytest.raises(PlanError, match=r"^rows 0 to 3: 40 tokens, and max_token_len=39 \(4 such groups\)"):
        rl.rearrange_micro_batches(batch, 39, force_group_size=4)
    with pytest.raises(PlanError, match=r"^force_group_size=0: "):
        rl.rearrange_micro_batches(batch, 60, force_group_size=0)


@pytest.mark.usefixtures("verl")
def test_ranks_of_verl_agree_on_the_number_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rows([30, 30, 5, 30, 30, 5, 5, 7, 20])
    own = len(rl.rearrange_micro_batches(batch, 60)[0])

    def all_gather(told: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        assert group == "dp"
        told[:] = [mine, torch.tensor(others[0])]

    others = [(own + 3, 20, False)]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "all_gather", all_gather)
    made, taken = rl.rearrange_micro_batches(batch, 60, dp_group="dp")  # type: ignore[arg-type]
    assert len(made) == own + 3 and all(taken)
    assert sorted(row for pack in taken for row in pack) == list(range(9))
    alone, _ = rl.rearrange_micro_batches(batch, 60, dp_group="dp", same_micro_num_in_dp=False)  # type: ignore[arg-type]
    assert len(alone) == own
    for others[0], told in (
        ((0, 20, True), "^rank 1 of the group cannot pack its rows"),
        ((own + 3, own + 2, False), f"^rank 1 of the group: {own + 2} rows for {own + 3} microbatches"),
        ((10, 20, False), "^rank 0 of the group: 9 rows for 10 microbatches"),
    ):
        with pytest.raises(PlanError, match=told):
            rl.rearrange_micro_batches(batch, 60, dp_group="dp")  # type: ignore[arg-type]
    others[0] = (2, 20, False)
    with pytest.raises(
        PlanError, match=r"^row 0: 30 tokens, and max_token_len=29 \(4 such rows\)"
    ):  # after all have been told
        rl.rearrange_micro_batches(batch, 29, dp_group="dp")  # type: ignore[arg-type]
    told_of: list[list[int]] = []
    monkeypatch.setattr(dist, "all_gather", lambda told, mine, group: told_of.append(mine.tolist()))
    with pytest.raises(PlanError, match="there are no rows"):
        rl.rearrange_micro_batches(rows([]), 60, dp_group="dp")  # type: ignore[arg-type]
    assert told_of == [[0, 0, 1]], "the others do not wait in vain"
    with pytest.raises(PlanError, match="9 rows for 12 microbatches"):
        rl.rearrange_micro_batches(batch, 60, same_micro_num_in_dp=False, min_num_micro_batch=12)
    with pytest.raises(PlanError, match=r"^row 0: 30 tokens, and max_token_len=29"):
        rl.rearrange_micro_batches(batch, 29, same_micro_num_in_dp=False)


@settings(max_examples=cases(12), deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60), st.integers(1, 6))
def test_parts_of_equal_sums(amounts: list[int], parts: int) -> None:
    if len(amounts) >= parts:
        found = rl.get_seqlen_balanced_partitions(amounts, parts, equal_size=False)
        assert len(found) == parts and all(found)
        assert sorted(row for part in found for row in part) == list(range(len(amounts)))
        sums = [sum(amounts[row] for row in part) for part in found]
        assert max(sums) <= sum(amounts) / parts + max(amounts) + len(amounts) * 1000
    equal = amounts * parts
    found = rl.get_seqlen_balanced_partitions(equal, parts, equal_size=True)
    assert [len(part) for part in found] == [len(amounts)] * parts
    assert sorted(row for part in found for row in part) == list(range(len(equal)))
    assert all(part == sorted(part) for part in found)
    narrow = np.array(equal) % 2**31  # their sum is too wide for their type
    found = rl.get_seqlen_balanced_partitions(narrow.astype(np.int32), parts, equal_size=True)
    assert found == rl.get_seqlen_balanced_partitions(narrow.tolist(), parts, equal_size=True)
    with pytest.raises(PlanError, match="equal size"):
        rl.get_seqlen_balanced_partitions([1] * (parts + 1), parts + 2, equal_size=True)
    with pytest.raises(PlanError, match="k_partitions=0"):
        rl.get_seqlen_balanced_partitions(amounts, 0, equal_size=True)


@pytest.mark.parametrize("trace", ["longtail", "mixed", "short"])
def test_a_step_is_near_the_ideal(trace: str) -> None:
    """The sum over microbatches of the busiest rank's work, over what equal work would take."""
    lengths = np.minimum(np.loadtxt(TRACES / f"{trace}.txt", dtype=np.int64)[:256], 8192)
    work = CostModel(alpha=25_100).work(lengths)
    packs = rl.get_packer("any", 16_384, min_bin_count=8, bin_count_multiple=8).pack(lengths.tolist())
    assert max(lengths[pack].sum() for pack in packs) <= 16_384
    busy = np.array([work[pack].sum() for pack in packs]).reshape(-1, 8)
    assert busy.max(axis=1).sum() <= 1.011 * work.sum() / 8


@pytest.mark.parametrize(
    ("lengths", "said"),
    [([], "no rows"), ([5, -300], "row 1: -300 tokens"), ([4, 5.9], r"row 1: 5\.9 tokens; .* whole number")],
)
def test_what_is_no_length_is_refused(lengths: list[Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        rl.get_packer("any", 10).pack(lengths)


@pytest.mark.usefixtures("verl")
def test_arguments_are_named_as_the_framework_names_them() -> None:
    def slime(args: dict[str, Any], **config: int) -> None:
        given = {"global_batch_size": config.pop("global_batch_size", 2), "rollout_indices": range(4)}
        rl.build_dp_schedule(slime_args(**args), parallel() | config, [5] * 4, **given)

    fixed = {"use_dynamic_batch_size": False}
    for said, call in (
        ("max_token_len=0:", lambda: rl.rearrange_micro_batches(rows([5]), 0)),
        ("num_batches_divided_by=-2:", lambda: rl.rearrange_micro_batches(rows([5]), 9, None, -2)),
        ("k_partitions=1.5:", lambda: rl.get_seqlen_balanced_partitions([5], 1.5, False)),  # type: ignore[arg-type]
        ("max_tokens_per_gpu=None:", lambda: slime({})),
        ("max_tokens_per_gpu=1: .* from 2", lambda: slime({"max_tokens_per_gpu": 1}, cp_size=2)),
        ("micro_batch_size=None:", lambda: slime(fixed)),
        ("dp_size=0:", lambda: slime({"max_tokens_per_gpu": 9}, dp_size=0)),
        ("global_batch_size=0:", lambda: slime({"max_tokens_per_gpu": 9}, global_batch_size=0)),
        ("bin_capacity=nan:", lambda: rl.get_packer("any", float("nan"))),  # type: ignore[arg-type]
        ("bin_count_multiple=-1:", lambda: rl.get_packer("any", 9, bin_count_multiple=-1)),
        ("row 1: 7 tokens, and bin_capacity=6", lambda: rl.get_packer("any", 6).pack([6, 7])),
    ):
        with pytest.raises(PlanError, match=f"^{said}"):
            call()
