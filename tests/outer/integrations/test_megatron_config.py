"""Megatron's config: each field that concerns data is honoured or refused, alike by `feed` and `SequencePacking`."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron_world import Case, example, initialized, run, write_documents

import meshfeed as mf
from meshfeed.errors import LayoutError, OptionError, RecipeError
from meshfeed.integrations import megatron
from meshfeed.integrations.megatron import batches, config

CAPACITY = 64

NOT_ABOUT_DATA = frozenset(
    [
        "_cpu_offloading_context",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "activation_func",
        "activation_func_clamp_value",
        "activation_func_fp8_input_store",
        "activation_offload_fraction",
        "actual_vocab_size",
        "add_bias_linear",
        "add_qkv_bias",
        "apply_dsa_kernel_fusion",
        "apply_query_key_layer_scaling",
        "apply_residual_connection_post_layernorm",
        "apply_rope_fusion",
        "async_tensor_model_parallel_allreduce",
        "attention_backend",
        "attention_dropout",
        "attention_output_gate",
        "attention_softmax_in_fp32",
        "autocast_dtype",
        "barrier_with_L1_time",
        "batch_invariant_backend",
        "batch_invariant_mode",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "bf16",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "clone_scatter_output_in_embedding",
        "config_logger_dir",
        "cpu_offloading",
        "cpu_offloading_activations",
        "cpu_offloading_double_buffering",
        "cpu_offloading_num_layers",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "cpu_offloading_weights",
        "cross_entropy_fusion_impl",
        "cross_entropy_loss_fusion",
        "csa_compress_ratios",
        "csa_compress_rotary_base",
        "csa_dense_mode",
        "csa_window_size",
        "cuda_graph_modules",
        "cuda_graph_retain_backward_graph",
        "cuda_graph_scope",
        "cuda_graph_use_single_mempool",
        "cuda_graph_warmup_steps",
        "deallocate_pipeline_outputs",
        "defer_embedding_wgrad_compute",
        "delay_offload_until_cuda_graph",
        "delay_wgrad_compute",
        "delta_offload_bytes_across_pp_ranks",
        "dense_grouped_gemm",
        "deterministic_mode",
        "disable_bf16_reduced_precision_matmul",
        "disable_parameter_transpose_cache",
        "distribute_saved_activations",
        "dsa_indexer_head_dim",
        "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32",
        "dsa_indexer_loss_coeff",
        "dsa_indexer_n_heads",
        "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation",
        "dsa_indexer_scoring_relu",
        "dsa_indexer_skip_topk_offset",
        "dsa_indexer_topk",
        "dsa_indexer_topk_freq",
        "dsa_indexer_use_sparse_loss",
        "dsa_kernel_backend",
        "embedding_init_method",
        "embedding_init_method_std",
        "enable_autocast",
        "enable_cuda_graph",
        "enable_hyper_connections",
        "enable_mhc_connections",
        "ep_overlap_early_attn_memory_release",
        "experimental_attention_variant",
        "experimental_attention_variant_loss_scale_func",
        "expert_gtp_weight_remat_size",
        "expert_tensor_parallel_num_weight_shards",
        "external_cuda_graph",
        "fallback_to_eager_attn",
        "ffn_hidden_size",
        "finalize_model_grads_func",
        "fine_grained_activation_offloading",
        "fine_grained_offloading_max_inflight_offloads",
        "first_last_layers_bf16",
        "flash_attention_version",
        "flash_decode",
        "fp16",
        "fp32_residual_connection",
        "fp4_param",
        "fp4_quantizer_factory",
        "fp4_recipe",
        "fp8_amax_compute_algo",
        "fp8_amax_history_len",
        "fp8_dot_product_attention",
        "fp8_interval",
        "fp8_margin",
        "fp8_multi_head_attention",
        "fp8_output_proj",
        "fp8_param",
        "fp8_quantizer_factory",
        "fp8_wgrad",
        "fused_residual_rmsnorm",
        "fused_single_qkv_rope",
        "gated_linear_unit",
        "gdn_conv_pad_alignment",
        "gdn_pre_gated_delta_rule_fusion",
        "gdp_cutedsl_kernel",
        "gdp_num_chunk_states_to_recompute",
        "gdp_num_householder",
        "glu_linear_offset",
        "grad_scale_func",
        "grad_sync_func",
        "gradient_accumulation_fusion",
        "gtp_remat_opt_in_modules",
        "head_wise_attn_gate",
        "hetereogenous_dist_checkpoint",
        "heterogeneous_block_specs",
        "hidden_dropout",
        "hidden_size",
        "high_priority_a2a_comm_stream",
        "inference_cuda_graph_scope",
        "inference_disable_triton_nvls_kernels",
        "inference_fuse_tp_communication",
        "inference_grouped_gemm_backend",
        "inference_moe_disable_fused_quant_kernels",
        "inference_moe_token_dispatcher_type",
        "inference_rng_tracker",
        "inference_sampling_seed",
        "init_method",
        "init_method_std",
        "init_model_with_meta_device",
        "is_hybrid_model",
        "kitchen_attention_backend",
        "kv_channels",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "linear_attention_freq",
        "linear_attention_type",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "log_max_attention_logit",
        "log_moe_overload_factor",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mamba_state_dim",
        "mamba_training_ssm_states_dtype",
        "masked_softmax_fusion",
        "memory_efficient_layer_norm",
        "mhc_init_gating_factor",
        "mhc_num_residual_streams",
        "mhc_recompute_layer_num",
        "mhc_sinkhorn_iterations",
        "min_offloaded_tensor_size",
        "mlp_chunks_for_prefill",
        "mlp_chunks_for_training",
        "moe_apply_probs_on_input",
        "moe_aux_loss_coeff",
        "moe_combine_bwd_dtype",
        "moe_deepep_num_sms",
        "moe_dispatch_fwd_dtype",
        "moe_enable_deepep",
        "moe_enable_routing_replay",
        "moe_expert_capacity_factor",
        "moe_expert_rank_capacity_factor",
        "moe_extended_tp",
        "moe_ffn_hidden_size",
        "moe_flex_dispatcher_backend",
        "moe_flex_dispatcher_num_sms",
        "moe_grad_scale_func",
        "moe_grouped_gemm",
        "moe_hybridep_num_blocks_permute",
        "moe_hybridep_num_blocks_unpermute",
        "moe_hybridep_num_sms",
        "moe_hybridep_num_sms_preprocessing",
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "moe_hybridep_pad_variable_tokens",
        "moe_input_jitter_eps",
        "moe_latent_size",
        "moe_layer_freq",
        "moe_layer_recompute",
        "moe_mlp_glu_interleave_size",
        "moe_ncclep_static_shape",
        "moe_ncclep_use_symm_mem",
        "moe_ncclep_zero_copy",
        "moe_pad_expert_input_to_capacity",
        "moe_pad_experts_for_cuda_graph_inference",
        "moe_paged_stash",
        "moe_paged_stash_buffer_size_factor_cpu",
        "moe_paged_stash_buffer_size_factor_cuda",
        "moe_paged_stash_page_size",
        "moe_per_layer_logging",
        "moe_permute_fusion",
        "moe_permute_fusion_into_hybridep",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_router_enable_expert_bias",
        "moe_router_force_biased",
        "moe_router_force_load_balancing",
        "moe_router_fusion",
        "moe_router_group_topk",
        "moe_router_load_balancing_type",
        "moe_router_num_groups",
        "moe_router_padding_for_fp8",
        "moe_router_padding_for_quantization",
        "moe_router_pre_softmax",
        "moe_router_quantile_balancing_ema",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_limited_devices",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_glu_interleave_size",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_overlap",
        "moe_single_grouped_bias",
        "moe_single_grouped_weight",
        "moe_token_dispatcher_type",
        "moe_token_drop_policy",
        "moe_token_dropping",
        "moe_use_grouped_tensor",
        "moe_use_legacy_grouped_gemm",
        "moe_z_loss_coeff",
        "mtp_detach_heads",
        "mtp_grad_scale_func",
        "mtp_hsm",
        "mtp_hybrid_override_pattern",
        "mtp_loss_scaling_factor",
        "mtp_use_repeated_layer",
        "multi_latent_attention",
        "mup_attn_scale_power",
        "mup_base_head_dim",
        "mup_base_hidden_size",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_width_mult",
        "nccl_all_reduce_for_prefill",
        "no_rope_freq",
        "no_sync_func",
        "normalization",
        "num_attention_heads",
        "num_layers",
        "num_layers_at_end_in_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "num_microbatches_with_partial_activation_checkpoints",
        "num_moe_experts",
        "num_query_groups",
        "num_residual_streams",
        "offload_modules",
        "output_layer_init_method",
        "overlap_dispatch_backward_with_experts_wgrad",
        "overlap_moe_expert_parallel_comm",
        "overlap_p2p_comm",
        "overlap_p2p_comm_warmup_flush",
        "param_sync_func",
        "params_dtype",
        "perform_initialization",
        "persist_layer_norm",
        "pipeline_dtype",
        "pipeline_model_parallel_comm_backend",
        "qk_clip",
        "qk_clip_alpha",
        "qk_clip_threshold",
        "qk_l2_norm",
        "qk_layernorm",
        "quant_recipe",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
        "rotary_base_per_layer",
        "rotary_interleaved",
        "softmax_scale",
        "softmax_type",
        "symmetric_ar_type",
        "test_mode",
        "timers",
        "tp_comm_atomic_ag",
        "tp_comm_atomic_rs",
        "tp_comm_bootstrap_backend",
        "tp_comm_bulk_dgrad",
        "tp_comm_bulk_wgrad",
        "tp_comm_overlap",
        "tp_comm_overlap_ag",
        "tp_comm_overlap_disable_fc1",
        "tp_comm_overlap_disable_qkv",
        "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad",
        "tp_comm_split_ag",
        "tp_comm_split_rs",
        "tp_only_amax_red",
        "transformer_impl",
        "use_cpu_initialization",
        "use_fused_mhc",
        "use_fused_weighted_squared_relu",
        "use_grouped_gemm_for_dense_mlp",
        "use_grouped_gemm_for_shared_expert",
        "use_inference_optimized_layers",
        "use_kitchen",
        "use_kitchen_attention",
        "use_mamba_mem_eff_path",
        "use_mup",
        "use_ring_exchange_p2p",
        "use_te_activation_func",
        "use_te_rng_tracker",
        "use_transformer_engine_op_fuser",
        "wgrad_deferral_limit",
        "window_attn_skip_freq",
        "window_size",
    ]
)
"""Fields of a TransformerConfig, of 0.16.1 to the development branch of August 2026."""


def test_every_field_of_the_config_is_in_the_table_or_not_about_data() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = fields - NOT_ABOUT_DATA - {*config.CONFIG_FIELDS}
    assert not unknown, (
        f"new fields: honour or refuse those about data, and list the others: {sorted(unknown)}"
    )
    assert not NOT_ABOUT_DATA & {*config.CONFIG_FIELDS}


def test_every_field_of_packed_seq_params_is_set_or_listed() -> None:
    told: dict[str, Any] = dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), torch.tensor([0, 4]))
    told |= {"max_seqlen": 4, "total_tokens": 4, "pad_between_seqs": False}
    made: dict[str, Any] = {}
    fields = [field.name for field in dataclasses.fields(PackedSeqParams)]
    wanted = {*fields, "total_tokens", "pad_between_seqs", "cp_partition_mode", "tokens_per_sample"}

    def params(**given: Any) -> None:
        made.update(given)

    newest = dataclasses.make_dataclass("newest", sorted(wanted), init=False)
    newest.__init__ = lambda self, **given: params(**given)  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.packed_seq_params.PackedSeqParams", newest)
        megatron.get_batch(iter([told]))
    unknown = {*fields} - {*made} - {*batches.LEFT_TO_MEGATRON}
    assert not unknown, f"get_batch neither sets nor lists {sorted(unknown)}"
    assert not {*made} & {*batches.LEFT_TO_MEGATRON}


@dataclasses.dataclass
class NewestParams(PackedSeqParams):
    """With the fields of later releases that matter here."""

    total_tokens: int | None = None
    pad_between_seqs: bool | None = None
    tokens_per_sample: int | None = None
    cp_partition_mode: str = "zigzag"


def apart(path: Path, length: int = 32) -> mf.Recipe:
    rule = mf.Windows(length, reset_attention_mask=True, reset_position_ids=True)
    return mf.Recipe(data=mf.open(path), sequence=rule, batch=mf.Batch(sequences=4))


def packs(path: Path) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=16))


def test_rows_tell_how_long_one_is_and_packs_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron balances experts by row, and would take all rows of a microbatch for one sequence."""
    monkeypatch.setattr("megatron.core.packed_seq_params.PackedSeqParams", NewestParams)
    path = write_documents(tmp_path / "corpus")
    with mf.Feed(apart(path), micro_batch_size=4) as feed:
        params = megatron.get_batch(megatron.data_iterators(feed))["packed_seq_params"]  # type: ignore[arg-type]
        assert (params.tokens_per_sample, params.total_tokens, params.cp_partition_mode) == (
            32,
            128,
            "zigzag",
        )
    with mf.Feed(packs(path), packing=mf.Packing(capacity=64)) as feed:
        params = megatron.get_batch(megatron.data_iterators(feed))["packed_seq_params"]  # type: ignore[arg-type]
        assert params.tokens_per_sample is None


PADDED = [  # what the config says beside the capacity, the scheduler, and (align.pack, max_sequences, fixed)
    ({}, "balanced", (1, None, False)),
    ({"sequence_parallel": True}, "balanced", (4, None, False)),
    ({"fp8": "hybrid"}, "balanced", (16, None, False)),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "sequence_parallel": True}, "empty", (32, None, False)),
    ({"fp4": "e2m1"}, "balanced", (32, None, False)),
    ({"thd_max_packed_sequences": 8}, "balanced", (1, 8, False)),
    ({"thd_max_packed_sequences": 8}, "empty", (1, None, False)),
    ({"pad_packed_seq_alignment": 16}, "balanced", (16, None, False)),
    ({"pad_packed_seq_alignment": 16, "thd_tail_padding_policy": "extend_last"}, "empty", (16, None, False)),
    (
        {"pad_packed_seq_alignment": 12, "sequence_parallel": True, "fp8": "e4m3"},
        "balanced",
        (48, None, False),
    ),
    ({"pad_packed_seq_alignment": CAPACITY}, "balanced", (CAPACITY, None, False)),
    ({"pad_packed_seq_alignment": "max"}, "dp_balanced", (CAPACITY, None, False)),
    ({"pad_packed_seq_alignment": 16, "thd_max_packed_sequences": 8}, "balanced", (16, 8, False)),
    *(
        ({"pad_packed_seq_alignment": pad, "thd_max_packed_sequences": 8, **more}, name, (1, 7, True))
        for pad in ("max", CAPACITY)
        for name, more in [
            ("balanced", {}),
            ("dp_balanced", {"thd_tail_padding_policy": "append_dummy_seq"}),
            ("balanced", {"cuda_graph_impl": "local"}),
            ("empty", {"cuda_graph_impl": SimpleNamespace(value="transformer_engine")}),
        ]
    ),
    ({"pad_packed_seq_alignment": "max", "thd_max_packed_sequences": 8}, "empty", (CAPACITY, None, False)),
]


def config_of(scheduler: Any = None, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(
        max_seqlen_per_dp_cp_rank=CAPACITY, sequence_packing_scheduler=scheduler, **options
    )


@pytest.mark.parametrize(("options", "scheduler", "wanted"), PADDED)
def test_packs_are_padded_as_the_config_says(options: dict[str, Any], scheduler: str, wanted: Any) -> None:
    made = megatron.packing_of(config_of(scheduler, **options), mf.Layout(tp=4, dp=2))
    assert (made.align.pack, made.max_sequences, made.fixed_shapes) == wanted


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pad_packed_seq_alignment": 0}, "give 'max' or a whole number"),
        ({"pad_packed_seq_alignment": "most"}, "give 'max' or a whole number"),
        ({"pad_packed_seq_alignment": "max", "thd_max_packed_sequences": 1}, "at least 2"),
        (
            {"pad_packed_seq_alignment": 16, "thd_tail_padding_policy": "append_dummy_seq"},
            "leave the policy out",
        ),
        (
            {
                "pad_packed_seq_alignment": "max",
                "thd_max_packed_sequences": 8,
                "thd_tail_padding_policy": "extend_last",
            },
            "leave the policy out",
        ),
        ({"max_seqlen_per_dp_cp_rank": None}, "no max_seqlen_per_dp_cp_rank"),
    ],
)
def test_padding_that_cannot_be_is_refused(options: dict[str, Any], match: str) -> None:
    told = SimpleNamespace(**vars(config_of("balanced")) | options)
    with pytest.raises(RecipeError, match=match):
        megatron.packing_of(told, mf.Layout())


@pytest.mark.parametrize("options", [options for options, name, _ in PADDED if name == "balanced"])
def test_a_feed_and_a_scheduler_read_the_config_alike(tmp_path: Path, options: dict[str, Any]) -> None:
    """A Packing that is given gets what the config says, and one that is not given is the scheduler's."""
    rule, layout = packs(write_documents(tmp_path / "corpus")).sequence, mf.Layout(tp=4, dp=2)
    told = config_of("balanced", **options, cp_partition_mode="contiguous")
    wanted = megatron.packing_of(told, layout)
    if not wanted.fixed_shapes and "cuda_graph_impl" in options:
        return
    for given in (None, mf.Packing(capacity=CAPACITY)):
        assert config.options_of(told, rule, layout, given, None) == (wanted, "pack_contiguous")


def test_how_cp_splits_is_the_configs() -> None:
    contiguous = SimpleNamespace(cp_partition_mode="contiguous")
    split = partial(config.cp_split_of, contiguous)
    assert [split(packed=True), split(packed=False), split(packed=False, apart=True)] == [
        "pack_contiguous",
        "zigzag",
        "contiguous",
    ]
    for none in (SimpleNamespace(), SimpleNamespace(cp_partition_mode="zigzag")):
        assert config.cp_split_of(none, packed=True) == "zigzag"


@pytest.mark.parametrize(
    ("error", "options", "given", "match"),
    [
        (OptionError, {"cp_partition_mode": "zigzag"}, {"cp_split": "pack_contiguous"}, "leave cp_split out"),
        (LayoutError, {"gtp_weight_remat_size": 2}, {}, "tensor_parallel_num_weight_shards out"),
        (RecipeError, {"cuda_graph_impl": "local"}, {}, "needs packs of one shape"),
        (RecipeError, {"variable_seq_lengths": False}, {}, "set variable_seq_lengths=True, .*alltoall"),
        (RecipeError, {}, {"packing": mf.Packing(capacity=CAPACITY + 1)}, "make them equal"),
        (
            RecipeError,
            {"pad_packed_seq_alignment": "max"},
            {"packing": mf.Packing(capacity=CAPACITY - 2)},
            "make them equal",
        ),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, error: Any, options: dict[str, Any], given: dict[str, Any], match: str
) -> None:
    rule = packs(write_documents(tmp_path / "corpus")).sequence
    told = {"packing": mf.Packing(capacity=CAPACITY), "cp_split": None} | given
    with pytest.raises(error, match=match):
        config.options_of(
            config_of(**options), rule, mf.Layout(cp=2, pp=2), told["packing"], told["cp_split"]
        )


def test_rows_that_sequence_parallel_cannot_share_are_refused() -> None:
    told = SimpleNamespace(sequence_parallel=True)
    with pytest.raises(RecipeError, match="make the length a multiple of 6"):
        config.options_of(told, mf.Windows(32), mf.Layout(tp=3, cp=2), None, None)
    assert config.options_of(told, mf.Windows(36), mf.Layout(tp=3, cp=2), None, None) == (None, "zigzag")


def split_job(rank: int, path: Path) -> list[Any]:
    """Packs and rows at cp2 by a config of contiguous runs, and what is refused."""
    seen: list[Any] = []
    with initialized(Case(cp=2)), pytest.MonkeyPatch.context() as patch:
        told, refused = SimpleNamespace(cp_partition_mode="contiguous"), "cannot be attended to by document"
        with pytest.raises(RecipeError, match=refused):  # this Megatron-core cannot say so
            megatron.feed(apart(path), told, micro_batch_size=1)
        patch.setattr("megatron.core.packed_seq_params.PackedSeqParams", NewestParams)
        for config, rows, length in ((told, 2, 32), (None, 1, 32), (told, 1, 30)):
            with pytest.raises(RecipeError, match=refused):
                megatron.feed(apart(path, length), config, micro_batch_size=rows)
        with mf.Feed(apart(path), mf.Layout(cp=2)) as feed, pytest.raises(RecipeError, match=refused):
            megatron.data_iterators(feed)
        for recipe, options in (
            (apart(path), {"micro_batch_size": 1}),
            (packs(path), {"packing": mf.Packing(capacity=128)}),
        ):
            with megatron.feed(recipe, told, device="cpu", **options) as feed:
                made = megatron.get_batch(megatron.data_iterators(feed))  # type: ignore[arg-type]
                params = made["packed_seq_params"]
                numbers = (params.cp_partition_mode, params.tokens_per_sample, params.total_tokens)
                seen.append((made["tokens"].tolist(), params.cu_seqlens_q_padded.tolist(), numbers))
    return seen


def test_packs_and_rows_are_cut_into_one_run_for_each_rank(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    first, second = run(split_job, 2, path)
    whole = [mf.Feed(apart(path)), mf.Feed(packs(path), packing=mf.Packing(capacity=256))]
    for (half, ends, numbers), (other, beside, _), feed in zip(first, second, whole):
        with feed:
            batch = next(iter(next(iter(feed)).microbatches))
            assert ends == beside
            assert (numbers[0], numbers[2]) == ("contiguous", ends[-1])
            tokens = np.array([*half[0], *other[0]])
            assert tokens[: batch["tokens"].numel()].tolist() == batch["tokens"].reshape(-1).tolist()
            assert tokens.size == ends[-1]
    assert first[0][2][1] == 32


def trained_job(rank: int, path: Path) -> list[float]:
    """The losses of Megatron's model with sequence parallelism, on packs of the page's kind."""
    losses: list[float] = []
    args: Any = example.arguments(
        ["--corpus", "", "--out", ".", "--tp", "2", "--vocab", "256", "--window", "64"]
    )
    args.capacity = CAPACITY
    with example.OnCpu(), initialized(Case(tp=2)), pytest.MonkeyPatch.context() as patch:
        # PyTorch's norm is the same for a part of the tokens, which Megatron's wrapper of it refuses
        norm = "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__"
        tracker = "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork"  # of a GPU's random state
        patch.setattr(tracker, lambda *_: contextlib.nullcontext())
        patch.setattr(norm, lambda _, config, hidden_size, eps, **__: torch.nn.LayerNorm(hidden_size, eps))
        config = example.config_of(args)
        config.sequence_parallel = True
        stage = example.stage_of(args, config, 0)
        packing = mf.Packing(capacity=CAPACITY)
        with megatron.feed(packs(path), config, packing=packing, device="cpu") as feed:
            iterators = megatron.data_iterators(feed)
            step = megatron.begin(iterators)
            told = get_forward_backward_func()(
                forward_step_func=partial(example.forward_step, valid_tokens=step.valid_tokens),
                data_iterator=iterators,
                model=[stage],
                num_microbatches=step.num_microbatches,
                seq_length=CAPACITY,
                micro_batch_size=1,
                forward_only=True,
            )
            losses += [float(each["loss"]) for each in told]
    return losses


def test_packs_train_under_sequence_parallelism(tmp_path: Path) -> None:
    first, second = run(trained_job, 2, write_documents(tmp_path / "corpus", vocab=256))
    assert len(first) > 1
    assert first == second
    assert all(np.isfinite(first))
