"""Megatron-LM's `pretrain` without a GPU, on gloo processes. Import it where its checkout is on the path.

What it assumes of a machine with GPUs, and what stands for it here:

- It asks for CUDA at its start, and initializes as its own option for the CPU does. device="cuda", streams and
  events: the CPU, or nothing (`OnCpu`, `no_gpu`). There is no dropout, and random states are not saved.
- Layers are Megatron-core's local ones with attention by PyTorch; gradients are not clipped.
- A checkpoint starts a process for each rank that holds a queue, and imports all of this again: a queue of its own.
- Megatron-core runs make in its folder: its compiled helpers come from the installed package.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("megatron.core.extensions.transformer_engine")
    importlib.import_module("megatron.core.datasets")
    importlib.import_module("megatron.core.tokenizers.text")  # which every run needs
    from megatron.training import argument_utils, arguments, global_vars, initialize, training

import megatron.core.datasets  # noqa: E402
import megatron_world as mw  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402

VOCAB = 512


class Nothing:
    """A stream or an event, of which nothing is asked."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


def no_gpu() -> None:
    """In this process, from now on: what Megatron-LM and Megatron-core ask of a GPU."""
    for name, value in {
        "Stream": Nothing,
        "Event": Nothing,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: Nothing(),
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, total_memory=1 << 30),
        "get_device_capability": lambda *_: (9, 0),
        "set_device": lambda *_: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "device_count": lambda: 1,  # then it makes its groups
    }.items():
        setattr(torch.cuda, name, value)
    training.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize.tensor_parallel.model_parallel_cuda_manual_seed = lambda *_, **__: None
    initialize._compile_dependencies = lambda: None
    helpers = distribution("megatron-core").locate_file("megatron/core/datasets")
    megatron.core.datasets.__path__.append(str(helpers))
    torch._dynamo.config.disable = True
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async.get_write_results_queue = lambda *_: results


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> Any:
    args = global_vars.get_args()
    config = arguments.core_transformer_config_from_args(args)
    spec: Any = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = mw.example.Attention
    torch.manual_seed(1234)
    return GPTModel(
        config,
        spec,
        VOCAB,
        args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def options(job: dict[str, Any], skip: list[int]) -> list[str]:
    """The command line of a run. skip: iterations, counted from 1."""
    told: dict[str, Any] = {
        "num-layers": 4,
        "hidden-size": 32,
        "num-attention-heads": 4,
        "seq-length": 64,
        "max-position-embeddings": 64,
        "micro-batch-size": 2,
        "global-batch-size": 16,
        "lr": 0.01,
        "lr-decay-style": "constant",
        "clip-grad": 0,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCAB - 1,
        "dataloader-type": "external",
        "distributed-backend": "gloo",
        "transformer-impl": "local",
        "log-interval": 100,
        "rerun-mode": "disabled",
    } | job
    return [
        *(f"--{name}={value}" for name, value in told.items() if value is not None and value is not True),
        *(f"--{name}" for name, value in told.items() if value is True),
        "--use-cpu-initialization",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-dropout-fusion",
        "--no-persist-layer-norm",
        "--no-rope-fusion",
        "--untie-embeddings-and-output-weights",
        "--no-check-for-nan-in-loss-and-grad",
        "--no-save-rng",
        "--no-load-rng",
        *(["--iterations-to-skip", *map(str, skip)] if skip else []),
    ]


def pretrain(
    job: dict[str, Any],
    skip: list[int],
    provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    model_provider: Callable[..., Any] = model_provider,
) -> None:
    """Megatron-LM's `pretrain` to its end."""
    with (
        mw.example.OnCpu(),
        warnings.catch_warnings(),
        patch.object(sys, "argv", ["pretrain", *options(job, skip)]),
    ):
        warnings.simplefilter("ignore")
        args = arguments.parse_and_validate_args()
        config = argument_utils.pretrain_cfg_container_from_args(args)
        training.pretrain(
            config, provider, ModelType.encoder_or_decoder, forward_step, model_provider=model_provider
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
