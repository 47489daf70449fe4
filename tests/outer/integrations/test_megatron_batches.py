"""Under Megatron-core's own process groups: layout, readers and every rank's batch are what its own path gives."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_world import (
    TOKEN_KEYS,
    Case,
    gpt_recipe,
    initialized,
    iterators_of,
    megatrons_batch,
    megatrons_datasets,
    plain,
    run,
    sample_of,
    samples_of_step,
    stage_kinds,
    write_documents,
)

import meshfeed as mf
from megatron_calls import growing_batch
from meshfeed.integrations import megatron
from soak import SOAK, only_soak

STEPS, SEQUENCES, MBS = 2, 16, 2
LOADINGS = ("replicated", "broadcast", "shared")

WORLD_8 = [
    Case(tp=2, cp=2, pp=2),
    Case(tp=2, pp=2, vpp=2, order="tp-cp-ep-pp-dp"),
    Case(cp=4, ep=4),
    Case(tp=2, cp=2, ep=2, order="tp-ep-dp-cp-pp"),
    Case(tp=2, pp=4, stages="Et|t|m|L", mtp=1),
    Case(pp=2, vpp=2, stages="Et|t|tm|L", mtp=1, order="tp-cp-ep-pp-dp"),
    Case(pp=4, mtp=1),
]
WORLD_16 = [
    Case(tp=2, cp=2, pp=2, ep=2, order="tp-cp-ep-pp-dp"),
    Case(cp=2, pp=4, vpp=2),
    Case(tp=2, pp=4, vpp=2, stages="Et|t|t|t|t|t|m|L", mtp=1, order="tp-cp-ep-pp-dp"),
]


def check_layout() -> mf.Layout:
    layout, rank = megatron.layout(), dist.get_rank()
    assert layout.table is None
    assert megatron.layout(ProcessGroupCollection.use_mpu_process_groups()) == layout
    theirs = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp-cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "tp-cp": parallel_state.get_tensor_and_context_parallel_group(),
        "tp-pp": parallel_state.get_model_parallel_group(),
        "tp-dp-cp": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    }
    for dims, group in theirs.items():
        assert layout.group_of(rank, dims).tolist() == dist.get_process_group_ranks(group), dims
    coord = layout.coord(rank)
    assert coord.tp == parallel_state.get_tensor_model_parallel_rank()
    assert coord.cp == parallel_state.get_context_parallel_rank()
    assert coord.dp == parallel_state.get_data_parallel_rank()
    assert coord.pp == parallel_state.get_pipeline_model_parallel_rank()
    assert layout.ep == parallel_state.get_expert_model_parallel_world_size()
    return layout


def check_readers(case: Case, recipe: mf.Recipe) -> None:
    """broadcast is Megatron's own rule: tp rank 0 of every stage that needs data, MTP stages included."""
    kinds = [any(stage_kinds(case, v)) for v in range(case.vpp or 1)]
    leads = parallel_state.get_tensor_model_parallel_rank() == 0
    reads = [megatron.is_reader(v, config=case.config, readers="broadcast") for v in range(case.vpp or 1)]
    assert reads == [kind and leads for kind in kinds]
    assert megatron.is_reader(config=case.config) == any(reads)
    assert megatron.is_reader(config=case.config, readers="replicated") == any(kinds)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    assert megatron.is_reader(config=case.config, groups=groups) == any(reads)
    for loading in LOADINGS:
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, megatron.is_reader(config=case.config, readers=loading))
        wanted = megatron.readers(case.config, readers=loading)
        assert tuple(rank for rank, reads in enumerate(told) if reads) == wanted
    assert len(wanted) == parallel_state.get_data_parallel_world_size()  # shared, on one node
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", "4")
        with megatron.feed(recipe, case.config, device="cpu", micro_batch_size=MBS) as feed:
            assert feed.role.reads == megatron.is_reader(config=case.config, readers="shared")
            assert {r.rank for r in feed.roles if r.reads} == {
                *megatron.readers(case.config, readers="shared")
            }


def check_builder(case: Case, path: Path) -> None:
    """Megatron's builder asks every rank whether it builds, without arguments."""
    reads = functools.partial(megatron.is_reader, config=case.config)
    assert (megatrons_datasets(path, reads, STEPS * SEQUENCES) is not None) == reads()


def check_batches(case: Case, path: Path, dataset: Any, loading: Any) -> None:
    """Every microbatch of every virtual stage: ours, and what Megatron's own path gives."""
    recipe = gpt_recipe(path, STEPS * SEQUENCES, SEQUENCES)
    with megatron.feed(
        recipe,
        case.config,
        readers=loading,
        micro_batch_size=MBS,
        device="cpu",
        transport=mf.Transport(timeout_s=600),
    ) as feed:
        assert feed.role.reads == megatron.is_reader(config=case.config, readers=loading)
        iterators = iterators_of(feed)
        for step in range(STEPS):
            for full in samples_of_step(dataset, step, SEQUENCES, MBS):
                for v, iterator in enumerate(iterators):
                    first, last, mtp = stage_kinds(case, v)
                    wanted = megatrons_batch(full, first, last, mtp)
                    batch = megatron.get_batch(iterator)
                    assert list(batch)[:6] == [*megatron.MODEL_KEYS, "packed_seq_params"]
                    assert batch["attention_mask"] is None
                    assert batch["packed_seq_params"] is None
                    for key in TOKEN_KEYS:
                        assert plain(batch[key]) == plain(wanted[key]), (case, loading, step, v, key)
            assert feed.next_step == step + 1
        with pytest.raises(StopIteration):
            next(iterators[0])


def job(rank: int, path: Path, cases: list[Case]) -> int:
    dataset = megatrons_datasets(path, lambda: True, STEPS * SEQUENCES)  # all receive by its shapes
    for at, case in enumerate(cases):
        with initialized(case):
            check_layout()
            check_readers(case, gpt_recipe(path, STEPS * SEQUENCES, SEQUENCES))
            check_builder(case, path)
            for loading in LOADINGS if SOAK else (LOADINGS[at % 3],):
                check_batches(case, path, dataset, loading)
    return len(cases)


def test_eight_ranks_get_what_megatrons_own_path_gives(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    assert run(job, 8, path, WORLD_8) == [len(WORLD_8)] * 8


def groups_job(rank: int, path: Path) -> list[str]:
    """All that takes process groups, by groups of the user's own; parallel_state knows of none."""
    own: dict[str, Any] = {}
    for dims in ("tp", "cp", "dp", "pp", "dp-cp"):
        made = [(ranks, dist.new_group(ranks)) for ranks in mf.Layout(tp=2, dp=2, pp=2).groups(dims).tolist()]
        (own[dims.replace("-", "_")],) = [group for ranks, group in made if rank in ranks]
    groups = ProcessGroupCollection(**own)
    config = Case(tp=2, pp=2).config
    config.sequence_packing_scheduler, config.max_seqlen_per_dp_cp_rank = "balanced", 64
    assert not parallel_state.model_parallel_is_initialized()
    layout = megatron.layout(groups)
    assert layout == mf.Layout(tp=2, dp=2, pp=2)
    recipe = mf.Recipe(data=mf.open(path), sequence=mf.Windows(8), batch=mf.Batch(sequences=8))
    (step,) = mf.simulate(recipe, layout, 1, ranks=[rank], micro_batch_size=2)
    for loading in LOADINGS:
        with megatron.feed(recipe, config, readers=loading, groups=groups, micro_batch_size=2) as feed:
            iterator = megatron.data_iterators(feed)
            for wanted in step.microbatches:
                batch = megatron.get_batch(iterator)
                assert plain(batch["tokens"]) == plain(wanted.fields.get("tokens")), loading
                assert plain(batch["labels"]) == plain(wanted.fields.get("labels")), loading
    reads = megatron.is_reader(config=config, groups=groups)
    assert (rank in megatron.readers(config, groups=groups)) == reads == (rank % 2 == 0)
    told: list[str] = []
    dp = layout.coord(rank).dp
    samples = [sample_of(np.full(9 + dp, 100 * dp + n)) for n in range(3)]
    with megatron.SequencePacking(device="cpu", timeout_s=600) as wrap:
        iterator, count, *numbers = wrap(iter([samples]) if reads else None, config, 1, groups)
        batches = [megatron.get_batch(iterator) for _ in range(count)]
        told.append(f"{numbers} {sum(int(b['packed_seq_params'].cu_seqlens_q[-1]) for b in batches)}")
    wrapper = megatron.HybridCPDataLoaderWrapper(iter([samples]), config, groups, device="cpu")
    told.append(str(next(wrapper)[1]))
    return told


def test_process_groups_of_ones_own_do_instead_of_parallel_state(tmp_path: Path) -> None:
    results = run(groups_job, 8, write_documents(tmp_path / "corpus"))
    numbers, lengths = {told[0] for told in results}, [9] * 3 + [10] * 3
    assert {text.rpartition(" ")[0] for text in numbers} == {
        f"[{sum(lengths)}, {sum(n * n for n in lengths)}]"
    }
    for stage in (results[:4], results[4:]):
        assert len({told[1] for told in stage}) == 1
        assert sum(int(told[0].split()[-1]) for told in stage[::2]) == sum(lengths)


def test_steps_and_megatrons_microbatches_must_agree(tmp_path: Path) -> None:
    """By its own calculator, under its ramp-up of the batch size."""
    data = mf.open(write_documents(tmp_path / "corpus"))

    def begun(batch: mf.Batch, steps: int) -> list[int]:
        recipe, consumed = mf.Recipe(data=data, sequence=mf.Windows(8), batch=batch), 0
        growing_batch({0: 4, 8: 8, 16: 12}, micro_batch_size=2)
        try:
            with mf.Feed(recipe, micro_batch_size=2) as feed:
                iterator = megatron.data_iterators(feed, num_microbatches=microbatches.get_num_microbatches)
                seen: list[int] = []
                for _ in range(steps):
                    microbatches.update_num_microbatches(consumed, consistency_check=False)
                    seen.append(megatron.begin(iterator).num_microbatches)
                    consumed += microbatches.get_current_global_batch_size()
                return seen
        finally:
            microbatches.destroy_num_microbatches_calculator()

    assert begun(mf.Batch(sequences=4).then(2, 8).then(3, 12), 5) == [2, 2, 4, 6, 6]
    told = r"step 2 is 4 sequences, 2 micro.*micro_batch_size=2.*num_microbatches is 4; .*global_batch_size is, 8"
    with pytest.raises(mf.errors.RecipeError, match=told):
        begun(mf.Batch(sequences=4), 3)


@only_soak
def test_sixteen_ranks_get_what_megatrons_own_path_gives(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    assert run(job, 16, path, WORLD_16) == [len(WORLD_16)] * 16
