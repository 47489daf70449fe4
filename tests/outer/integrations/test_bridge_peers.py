"""Megatron-Bridge's own tests of its `get_batch`, from a checkout, on eight gloo processes.

Their text runs as it is. Their names `get_batch` and `_forward_step_common` stand for meshfeed's `bridge.get_batch` and
Bridge's forward step around it, in pipelines of the length that each test names. What the rank gets that the test means is
sent to all, and each process checks it. Broadcast loading itself is the pull request 2405, which is not merged and has no
tests on the main branch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from megatron_world import Case, initialized, run, sample_of
from test_megatron_peers import cases_of

import meshfeed as mf
import world
from meshfeed.integrations import megatron
from meshfeed.store import IndexedWriter
from services.needs import checkout

THEIRS = "tests/unit_tests/training/test_gpt_step.py"
TESTED = {
    "test_middle_pp_stage_keeps_non_packed_fast_path": 1,
    "test_middle_pp_stage_without_mtp_keeps_fast_path_when_mtp_enabled": 1,
    "test_standalone_mtp_middle_pp_stage_loads_tokens_and_position_ids": 1,
    "test_standalone_mtp_loss_stage_skips_mtp_inputs": 1,
    "test_forward_common_uses_model_chunk_vp_stage_for_vpp_stage": 1,
    "test_forward_common_uses_model_chunk_vp_stage_instead_of_global_vpp_rank": 1,
    "test_forward_common_passes_packed_padding_mask_to_model": 4,
    "test_forward_common_scatters_packed_padding_mask_on_middle_pp_sp_stage": 1,
}
"""The tests of TestGetBatch that get a batch, and how many cases they have."""
EXCEPTIONS = {
    "test_middle_pp_stage_preserves_full_packed_batch": "it asks for tokens and labels where no stage uses them",
    **dict.fromkeys(
        (
            "test_packed_cp_partition_rejects_multiple_physical_thd_rows",
            "test_partition_current_packed_batch_uses_padded_cu_seqlens",
            "test_partition_packed_batch_trims_negative_sentinel_fallback",
            "test_partition_packed_batch_no_padding_passthrough",
            "test_partition_packed_batch_skips_none_attention_mask",
        ),
        "it tests a private function that cuts for cp; meshfeed's batches are cut",
    ),
    **dict.fromkeys(
        (
            "test_forward_common_passes_unmasked_packed_seq_params_on_middle_pp_stage",
            "test_mcore_expert_bias_padding_mask_compat",
            "test_mcore_schedule_plan_routes_with_chunk_padding_mask",
            "test_packed_padding_mask_rejects_router_scoped_te_cuda_graphs",
            "test_packed_padding_mask_allows_dense_router_scoped_te_cuda_graph",
            "test_hybrid_preprocess_stage_scatters_packed_padding_mask_for_sp",
        ),
        "it tests no get_batch, or its own in its place",
    ),
}


def get_batch(
    corpus: Path,
    data_iterator: Any,
    cfg: Any,
    use_mtp: bool = False,
    *,
    pg_collection: Any,
    vp_stage: Any = None,
) -> Any:
    """What meshfeed gives the pipeline rank that a test means."""
    from megatron.bridge.training import gpt_step

    pp, size, rank = pg_collection.pp, pg_collection.pp.size(), pg_collection.pp.rank()
    if size == 1 and not gpt_step.is_pp_first_stage(pp):
        size, rank = 4, 1  # a middle stage of any pipeline
    given = getattr(data_iterator, "batch", {})
    if "cu_seqlens_q" in given:
        made = batch_of_packs(given, size)
    else:
        made = batch_of_rows(corpus, cfg.model, size, vp_stage or 0)
    sent = [made]
    dist.broadcast_object_list(sent, src=rank * (dist.get_world_size() // size))
    return sent[0]


def batch_of_rows(corpus: Path, model: Any, pp: int, vp_stage: int) -> Any:
    """Of tokens 1, 2, 3, 4 before 5, as these tests have them."""
    from meshfeed.integrations import bridge

    names = ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size", "mtp_num_layers")
    config = SimpleNamespace(
        pipeline_model_parallel_size=pp, **{name: getattr(model, name) for name in names}
    )
    case = Case(pp=pp, vpp=config.virtual_pipeline_model_parallel_size)
    recipe = mf.Recipe(data=mf.open(corpus), sequence=mf.Windows(4), batch=mf.Batch(sequences=8))
    with initialized(case), megatron.feed(recipe, config, readers="broadcast", micro_batch_size=1) as feed:
        stages = megatron.data_iterators(feed)
        batches = [
            bridge.get_batch(stage, None) for stage in (stages if isinstance(stages, list) else [stages])
        ]
    return batches[vp_stage]


def batch_of_packs(given: Any, pp: int) -> Any:
    """Of the sequences of their batch, packed and padded by meshfeed."""
    from meshfeed.integrations import bridge

    starts, lengths = given["cu_seqlens_q_padded"].tolist(), np.diff(given["cu_seqlens_q"].numpy())
    tokens = np.asarray(given["tokens"].tolist())[0]
    samples = [sample_of(tokens[start : start + n]) for start, n in zip(starts, lengths)]
    config = SimpleNamespace(
        pipeline_model_parallel_size=pp,
        sequence_packing_scheduler="in_order",
        max_seqlen_per_dp_cp_rank=starts[-1],
    )
    with (
        initialized(Case(tp=8 // pp, pp=pp)),
        megatron.SequencePacking(align=mf.Align(sequence=4), device="cpu") as wrap,
    ):
        own = iter(samples) if megatron.is_reader(config=config) else None
        iterator, count, *_ = wrap(own, config, len(samples))
        assert count == 1
        return bridge.get_batch(iterator, None)


def job(rank: int, path: Path, corpus: Path) -> dict[str, int]:
    """How many cases of each test passed."""
    import bridge_world as bw

    module, ours = ModuleType("theirs"), partial(get_batch, corpus)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    vars(module).update(
        get_batch=ours,
        _forward_step_common=partial(bw.gpt_step._forward_step_common, _get_batch_fn=ours),
    )
    passed: dict[str, int] = {}
    tests: dict[str, Callable[..., None]] = vars(module.TestGetBatch)
    for name, test in tests.items():
        if name.startswith("test_") and name not in EXCEPTIONS:
            for arguments in cases_of(test):
                with pytest.MonkeyPatch.context() as patch, bw.quiet():
                    test(module.TestGetBatch(), patch, **arguments)
                passed[name] = passed.get(name, 0) + 1
    assert all(hasattr(module.TestGetBatch, name) for name in EXCEPTIONS)
    return passed


def test_bridges_tests_of_get_batch(tmp_path: Path) -> None:
    path = checkout("Megatron-Bridge") / THEIRS
    world.preload("bridge_world")
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document([1, 2, 3, 4, 5])
    assert run(job, 8, path, tmp_path / "corpus") == [TESTED] * 8
