"""In place of Megatron-core's HybridCPDataLoaderWrapper: its samples, and what its own schedule does with them."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper as Theirs
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron_world import Case, example, initialized, plain, run, sample_of

import meshfeed as mf
from megatron_calls import on_this_cp_rank
from meshfeed.exchange import Keys
from meshfeed.integrations import megatron
from meshfeed.integrations.megatron import hybrid
from meshfeed.plan import plan_step

HYBRID = [
    ([[24, 7, 90], [12], [3, 3, 3, 3], [30]], 16, 1),
    ([[24, 7, 90], [12]], 32, 4),
    ([[24576 // 64], [], [], [], [], [], [], []], 8192 // 64, 1),
    ([[40960 // 64], [1024 // 64] * 4], 8192 // 64, 2),
    ([[40], [], [], [0]], 8, 2),
]


def hybrid_job(rank: int) -> list[Any]:
    got: list[Any] = []
    for lengths, capacity, cp in HYBRID:
        case = Case(cp=cp, options={"hybrid_context_parallel": True})
        with initialized(case):
            dp_rank = parallel_state.get_data_parallel_rank()
            own = lengths[dp_rank] if dp_rank < len(lengths) else []
            first = sum(len(one) for one in lengths[:dp_rank])
            samples = [sample_of(np.full(n, first + i + 1)) for i, n in enumerate(own)]
            wrapper = megatron.HybridCPDataLoaderWrapper(
                iter([samples]), SimpleNamespace(max_seqlen_per_dp_cp_rank=capacity)
            )
            mine, groups = next(wrapper)
            assert mine is not None
            worked: list[Any] = []
            for group in groups or []:
                for sample in group[parallel_state.get_data_parallel_rank(with_context_parallel=True)]:
                    size = sum(sample in of_rank for of_rank in group)  # as Megatron's schedule counts it
                    batch = {k: v[None].clone() for k, v in mine[sample].items()}
                    if size > 1:
                        cp_group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
                        batch = on_this_cp_rank(batch, cp_group=cp_group)
                    assert batch["tokens"].shape[1] <= capacity
                    worked.append((sample, size, batch["tokens"].tolist(), int(batch["loss_mask"].sum())))
            with pytest.raises(StopIteration):
                next(wrapper)
            none = megatron.HybridCPDataLoaderWrapper(None, SimpleNamespace())
            assert next(none) == (None, None)
            got.append((groups, worked))
    return got


def test_hybrid_samples_go_where_their_groups_say() -> None:
    results = run(hybrid_job, 8)
    for number, (lengths, _, cp) in enumerate(HYBRID):
        every = [n for one in lengths for n in one]
        groups = results[0][number][0]
        assert all(result[number][0] == groups for result in results), "every rank knows the same groups"
        assert all(of_rank for group in groups for of_rank in group), "nobody has nothing"
        ids = {sample for group in groups for of_rank in group for sample in of_rank}
        kept = [i for i, n in enumerate(every) if n]
        index = np.cumsum([n > 0 for n in every]) - 1  # samples without a token have no id
        assert {sample for sample in ids if sample < len(kept)} == {int(index[i]) for i in kept}
        tokens: dict[int, list[int]] = {}
        loss: dict[int, int] = {}
        for result in results:
            for sample, _, held, bearing in result[number][1]:
                tokens.setdefault(sample, []).extend(held[0])
                loss[sample] = loss.get(sample, 0) + bearing
        for i in kept:
            own = tokens[int(index[i])]
            assert sorted(n for n in own if n) == [i + 1] * every[i], (cp, i)
            assert loss[int(index[i])] == every[i] - 1
        assert not any(loss[sample] for sample in ids if sample >= len(kept))
        for group in groups:  # who shares a sample comes to it after the same samples
            for one, other in itertools.combinations(group, 2):
                assert one == other or not set(one) & set(other)


def packed(lengths: list[int], first: int) -> dict[str, torch.Tensor]:
    """One packed sample of sequences that each hold a number of their own."""
    parts = [sample_of(np.full(n, first + i)) for i, n in enumerate(lengths)]
    made = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return made | {"cu_seqlens": ends, "max_seqlen": torch.tensor(max(lengths))}


def theirs_job(rank: int) -> int:
    """The same packed samples through Megatron's wrapper and ours: the same ids for the same samples."""
    compared = 0
    with example.OnCpu(), initialized(Case(cp=2, options={"hybrid_context_parallel": True})):
        dp_rank = parallel_state.get_data_parallel_rank()
        config = SimpleNamespace(max_seqlen_per_dp_cp_rank=64)
        for step in range(3):
            lengths = np.random.default_rng([step, dp_rank]).integers(1, 16, 5) * 16
            batch = [
                packed(lengths[:2].tolist(), 100 * dp_rank + 1),
                packed(lengths[2:].tolist(), 100 * dp_rank + 50),
            ]
            wanted, groups = next(Theirs(iter([batch]), config))
            got, own_groups = next(megatron.HybridCPDataLoaderWrapper(iter([batch]), config))
            held: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(held, {id: plain(s["tokens"]) for id, s in got.items()})
            everywhere = {id: tokens for of_rank in held for id, tokens in of_rank.items()}
            assert {i for g in groups for r in g for i in r} <= set(everywhere)
            for sample, item in wanted.items():
                assert plain(item["tokens"]) == everywhere[sample]
                compared += 1
                if sample in got:
                    assert set(got[sample]) == set(item)
                    assert all(plain(got[sample][k]) == plain(item[k]) for k in item)
            assert len(own_groups[0]) == len(groups[0])
    return compared


def test_samples_and_their_ids_are_megatrons() -> None:
    assert all(run(theirs_job, 8))


class Model(torch.nn.Module):
    """Sums what the ranks of a sample's cp group hold; they hang where one of them comes out of turn."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.weight = config, torch.nn.Parameter(torch.ones(()))
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor: Any) -> None:
        """Of pipelines."""


def schedule_job(rank: int) -> tuple[float, int]:
    """Megatron's own schedule of hybrid cp, from our wrapper, with tp ranks that have no iterator."""
    seen: list[float] = []

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = [next(iterator) if iterator is not None else None]
        tp = parallel_state.get_tensor_model_parallel_group()
        dist.broadcast_object_list(batch, parallel_state.get_tensor_model_parallel_src_rank(), group=tp)
        (sample,) = batch
        size, mask = int(sample.pop("local_cp_size")), {"loss_mask": sample["loss_mask"][None]}
        if size > 1:
            cp_group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
            mask = on_this_cp_rank(mask, cp_group=cp_group)
            total = mask["loss_mask"].sum()
            dist.all_reduce(total, group=cp_group)
            assert total == sample["loss_mask"].sum(), "the group works on one sample"
        tokens = mask["loss_mask"].sum()
        seen.append(float(tokens))
        return model.weight * tokens, lambda out: (out, tokens.int(), {"tokens": tokens})

    with example.OnCpu(), initialized(Case(tp=2, cp=2, options={"hybrid_context_parallel": True})):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=4,
            num_attention_heads=1,
            context_parallel_size=2,
            calculate_per_token_loss=True,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        config.hybrid_context_parallel, config.max_seqlen_per_dp_cp_rank = True, 64
        dp_rank = parallel_state.get_data_parallel_rank()
        lengths = [[200, 7], [5, 30, 90, 2]][dp_rank]
        reads = megatron.is_reader(config=config)
        iterator = iter([[sample_of(np.full(n, 1)) for n in lengths]]) if reads else None
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=megatron.HybridCPDataLoaderWrapper(iterator, config),
            model=Model(config),
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        return sum(seen), len(seen)


def test_megatrons_own_schedule_runs_on_it() -> None:
    results = run(schedule_job, 8)
    assert sum(tokens for tokens, _ in results) == 2 * sum(n - 1 for n in (200, 7, 5, 30, 90, 2))
    assert all(count for _, count in results)


def failing_job(rank: int) -> list[str]:
    """Iterators that end apart, one that raises, and samples that are padded for sequence parallelism."""
    told: list[str] = []

    def broken() -> Any:
        yield [sample_of(np.ones(5))]
        raise LookupError("no more of them")

    with initialized(Case(tp=4, options={"hybrid_context_parallel": True})):
        dp_rank = parallel_state.get_data_parallel_rank()
        config = SimpleNamespace(max_seqlen_per_dp_cp_rank=16, sequence_parallel=True)
        steps = [[sample_of(np.ones(7 + dp_rank))]] * (1 + 2 * dp_rank)
        wrapper = megatron.HybridCPDataLoaderWrapper(iter(steps), config)
        widths = [{len(sample["tokens"]) for sample in mine.values()} for mine, _ in wrapper]
        told += [str(widths), str(len(widths))]
        wrapper = megatron.HybridCPDataLoaderWrapper(broken() if dp_rank else iter(steps * 2), config)
        next(wrapper)
        with pytest.raises(mf.MeshfeedError) as refused:
            next(wrapper)
        told.append(str(refused.value))
        wrapper = megatron.HybridCPDataLoaderWrapper(iter([[sample_of(np.ones(1000))]]), config)
        with pytest.raises(mf.errors.PlanError, match="1000"):
            next(wrapper)
    with initialized(Case(cp=2, order="tp-dp-cp-ep-pp")):
        wrapper = megatron.HybridCPDataLoaderWrapper(iter([[sample_of(np.ones(5))]]), config)
        with pytest.raises(mf.errors.LayoutError, match="let cp vary faster"):
            next(wrapper)
    with initialized(Case(options={"create_gloo_process_groups": False})):
        given = iter([[sample_of(np.ones(5))]] * 2)
        samples, _ = next(megatron.HybridCPDataLoaderWrapper(given, config))
        assert samples
        members = dist.get_process_group_ranks(
            parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.dp_cp = dist.new_group(members, backend="cuda:gloo")  # as NCCL: nothing of the CPU's
        assert torch.device("cpu") not in groups.dp_cp._device_types
        samples, _ = next(megatron.HybridCPDataLoaderWrapper(given, config, groups))
        assert samples
    return told


def idle_job(rank: int) -> Any:
    """One sample for two data-parallel ranks, by a policy that leaves the second nothing."""
    packing = mf.Packing(capacity=64, policy="balanced")
    with initialized(Case(tp=2)), pytest.MonkeyPatch.context() as patched:
        patched.setattr(hybrid, "packing_of", lambda *_: packing)
        dp_rank = parallel_state.get_data_parallel_rank()
        given = [[sample_of(np.full(9, 5))], []][dp_rank]
        mine, groups = next(megatron.HybridCPDataLoaderWrapper(iter([given]), SimpleNamespace()))
        return groups, {id: {k: v.tolist() for k, v in sample.items()} for id, sample in mine.items()}


def test_who_would_have_nothing_has_a_sample_without_loss() -> None:
    results = run(idle_job, 4)
    assert {str(groups) for groups, _ in results} == {"[[[0], [2]]]"}
    assert [list(mine) for _, mine in results] == [[0], [0], [2], [2]]
    dummy = results[2][1][2]
    assert set(dummy) == set(results[0][1][0])
    assert (dummy["tokens"], dummy["loss_mask"]) == ([0], [0.0])
    plan = plan_step(np.array([3]), mf.Packing(capacity=8, policy="balanced"), dp=3, cp=2)
    assert hybrid.groups_of(plan) == [[[0], [0], [3], [3], [5], [5]]], "a cp group shares its dummy"


def test_ends_and_errors_reach_every_rank() -> None:
    for widths, count, error in run(failing_job, 8):
        assert {int(n) for n in re.findall(r"\d+", widths)} <= {4, 8, 12}
        assert count == "3"
        assert "no more of them" in error


def beside_job(rank: int) -> dict[str, Any]:
    """What is not per token, in shapes that could be; and what is, by the user's word."""
    sample = sample_of(
        np.full(7, 5),
        image=torch.ones(7, 2, 2),
        small=torch.ones(3, 2, 2),
        number=torch.tensor(5),
        weights=torch.ones(7, 2),
    )
    labels = mf.Field(name="labels", dtype="any", split=True, pad=-100)
    keys = Keys(mf.Field(name="weights", dtype="any", split=True), labels)
    config = SimpleNamespace(max_seqlen_per_dp_cp_rank=16, sequence_parallel=True)
    with initialized(Case(tp=4)):
        mine, _ = next(megatron.HybridCPDataLoaderWrapper(iter([[sample]]), config, keys=keys))
        assert mine[0]["labels"][7:].tolist() == [-100]
        return {name: tuple(value.shape) for name, value in mine[0].items()}


def test_only_what_is_per_token_is_padded() -> None:
    per_token = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), (8,))
    beside = {"image": (7, 2, 2), "small": (3, 2, 2), "number": (), "weights": (8, 2)}
    assert run(beside_job, 4) == [per_token | beside] * 4


class Cut(megatron.HybridCPDataLoaderWrapper):
    """Samples of at most 50 tokens."""

    def unpack_batch(self, batch: Any) -> list[dict[str, Any]]:
        return [
            {name: value[:50] for name, value in sample.items()} for sample in super().unpack_batch(batch)
        ]


class Gathering(megatron.HybridCPDataLoaderWrapper):
    """Lengths by a collective of its own."""

    def get_global_seqlens(self, subsample_seqlens: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        each: list[Any] = [None] * self.dp_group.size()
        dist.all_gather_object(each, subsample_seqlens.tolist(), group=self.dp_group)
        counts = torch.tensor([len(one) for one in each], dtype=torch.int32)
        return [size for one in each for size in one], (counts.cumsum(0) - counts).int()


class Backwards(megatron.HybridCPDataLoaderWrapper):
    """The last sample of a rank has its first id."""

    def get_global_id_seqlens(self, num_local: int, offsets: Any, seqlens: Any) -> Any:
        pairs, own = super().get_global_id_seqlens(num_local, offsets, seqlens)
        ends = [*offsets.tolist()[1:], len(pairs)]
        other = [
            stop - 1 + start - at for start, stop in zip(offsets.tolist(), ends) for at in range(start, stop)
        ]
        return [(other[sample], size) for sample, size in pairs], own.flip(0)


class Asking(megatron.HybridCPDataLoaderWrapper):
    """The sender, from the process groups."""

    def _gid_to_src_rank(self, gid: int, offsets: Any) -> int:
        sender = dist.get_process_group_ranks(self.dp_group)[int((offsets <= gid).sum()) - 1]
        return dist.get_process_group_ranks(self.dp_cp_group).index(sender)


class Marking(megatron.HybridCPDataLoaderWrapper):
    """A further key, sent beside the others."""

    def reroute_samples_to_hdp_ranks(self, batch: Any, *told: Any) -> Any:
        marked = [{**sample, "weights": sample["tokens"] * 2} for sample in batch]
        return super().reroute_samples_to_hdp_ranks(marked, *told)


class All(Cut, Gathering, Backwards, Asking, Marking):
    """Every method that Megatron's class has."""


class Scheduled(megatron.HybridCPDataLoaderWrapper):
    """The groups of Megatron's scheduler."""

    def reroute_samples_to_hdp_ranks(
        self, batch: Any, own: Any, id_seqlens: Any, groups: Any, offsets: Any
    ) -> Any:
        scheduler = BalancedCPScheduler(self.config.max_seqlen_per_dp_cp_rank, self.dp_cp_group)
        groups[:] = scheduler.get_groups_and_subsamples(id_seqlens, self.config)[1]
        return super().reroute_samples_to_hdp_ranks(batch, own, id_seqlens, groups, offsets)


class Wrong(megatron.HybridCPDataLoaderWrapper):
    def _gid_to_src_rank(self, gid: int, offsets: Any) -> int:
        return -1


def subclass_job(rank: int) -> list[Any]:
    """[wrapper] -> (ids of all ranks, id -> values of this rank's samples), on tp rank 0 of both stages."""
    keys = Keys(mf.Field(name="weights", dtype="any", split=True))
    config, got = SimpleNamespace(max_seqlen_per_dp_cp_rank=64), list[Any]()
    with initialized(Case(tp=2, pp=2, options={"hybrid_context_parallel": True})):
        if parallel_state.get_tensor_model_parallel_rank():
            return got
        dp_rank = parallel_state.get_data_parallel_rank()
        lengths = [[100, 20, 30], [60, 7]][dp_rank]
        samples = [sample_of(np.full(n, 10 * dp_rank + at + 1)) for at, n in enumerate(lengths)]
        for kind in (
            megatron.HybridCPDataLoaderWrapper,
            Cut,
            Gathering,
            Backwards,
            Asking,
            Marking,
            All,
            Scheduled,
        ):
            wrapper = kind(iter([samples]), config, keys=keys)
            mine, groups = next(wrapper)
            with pytest.raises(StopIteration):
                next(wrapper)
            got.append((groups, {at: {k: plain(v) for k, v in each.items()} for at, each in mine.items()}))
        with pytest.raises(mf.errors.LayoutError, match="dp_cp rank -1"):
            next(Wrong(iter([samples]), config))
        for kind, fails in ((megatron.HybridCPDataLoaderWrapper, 1), (All, 0)):
            given = [[{"labels": torch.ones(3)}] if dp_rank == fails else samples]
            with pytest.raises(mf.MeshfeedError, match="sample 0 has no 'tokens'"):
                next(kind(iter(given), config, keys=keys))
        cut = [{name: value[:50] for name, value in sample.items()} for sample in samples]
        mine, groups = next(megatron.HybridCPDataLoaderWrapper(iter([cut]), config))
        got.append((groups, {at: {k: plain(v) for k, v in each.items()} for at, each in mine.items()}))
    return got


def test_a_subclass_can_override_what_megatrons_can() -> None:
    results = [each for each in run(subclass_job, 8) if each]
    assert len(results) == 4
    numbers = {0: 1, 1: 2, 2: 3, 3: 11, 4: 12}  # of the tokens of each sample
    for own, cut, gathering, backwards, asking, marking, every, scheduled, of_cut in results:
        assert own == gathering == asking != cut == of_cut
        assert all(
            made.pop("weights")[2] == [2 * n for n in made["tokens"][2]] for made in marking[1].values()
        )
        assert marking == own
        for groups, mine in (backwards, every):
            ids = {sample for group in groups for of_rank in group for sample in of_rank}
            assert ids >= set(numbers)
            for sample, made in mine.items():
                assert sample > 4 or {*made["tokens"][2]} - {0} == {numbers[[2, 1, 0, 4, 3][sample]]}
        for sample, made in scheduled[1].items():
            assert {*made["tokens"][2]} - {0} == {numbers[sample]}
        assert {sample for group in scheduled[0] for of_rank in group for sample in of_rank} == {*numbers}
        assert all("weights" in made for made in every[1].values())
        assert max(sum(made["loss_mask"][2]) for made in every[1].values()) <= 50
    held = [{*own[1]} for own, *_ in results]
    assert held[0] | held[1] >= {*numbers} and held[:2] == held[2:], "both stages have the same samples"
