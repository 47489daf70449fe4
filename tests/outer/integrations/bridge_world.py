"""Megatron-Bridge's `pretrain` without a GPU, on gloo processes. Import it where the checkouts are on the path.

What Bridge assumes of a machine with GPUs, and what stands for it here:

- It imports transformer_engine and nvidia_resiliency_ext, which need CUDA: empty modules, during its import alone. Layers
  are Megatron-core's local ones, and gradients are not clipped, since that checks them for CUDA.
- It calls `initialize_megatron` and `provide_distributed_model` without their arguments for the CPU: with them.
- device="cuda", streams and events: the CPU, or nothing (`OnCpu`, `no_gpu`). Checkpoints leave the random state of the GPU
  out, and there is no dropout.
- Megatron-core runs make in its folder: its compiled helpers come from the installed package.
- Megatron-core compiles small functions with torch.compile, which takes a minute here: they run as they are.
- A checkpoint starts a process for each rank that holds a queue, and imports all of this again: a queue of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch

from hidden import hidden

logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Megatron-core asks for TransformerEngine at its own import, and must not find the empty one
    for name in ("core.extensions.transformer_engine", "core.datasets", "training.models"):
        importlib.import_module(f"megatron.{name}")
    with hidden(["transformer_engine", "nvidia_resiliency_ext"]):
        importlib.import_module("transformer_engine.pytorch.ops")  # named in an annotation
        from megatron.bridge.data.base import DatasetProvider
        from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
        from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
        from megatron.bridge.training import config as configs
        from megatron.bridge.training import gpt_step, initialize, pretrain, setup, vlm_step
        from megatron.bridge.training.callbacks import Callback
        from megatron.bridge.training.tokenizers.config import TokenizerConfig

import megatron.core.datasets  # noqa: E402
import megatron_world as mw  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from qwen_vl import BEGIN, IMAGE, VIDEO  # noqa: E402
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig  # noqa: E402

VOCAB = 512


@dataclass(frozen=True)
class Job:
    """A run of `pretrain`."""

    folder: Path
    tp: int = 2
    pp: int = 2
    vpp: int | None = None
    steps: int = 6
    length: int = 32
    global_batch_size: int = 8
    micro_batch_size: int = 2
    save_interval: int | None = None
    sees: bool = False  # images

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def own_data(self) -> Any:
        """Bridge's own dataset, replicated."""
        return configs.GPTDatasetConfig(
            random_seed=mw.SEED,
            seq_length=self.length,
            blend=([str(self.corpus)], None),
            split="1",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=0,
        )

    def config(self, dataset: Any, **train: Any) -> Any:
        """Bridge's config of this run."""
        checkpoints = str(self.folder / "checkpoints") if self.save_interval else None
        return configs.ConfigContainer(
            model=(SeesOnCpu if self.sees else OnCpuProvider)(
                num_layers=4,
                hidden_size=32,
                num_attention_heads=4,
                seq_length=self.length,
                vocab_size=VOCAB,
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                virtual_pipeline_model_parallel_size=self.vpp,
                transformer_layer_spec=layer_spec,
                pipeline_dtype=torch.float32,
                attention_dropout=0.0,
                hidden_dropout=0.0,
                gradient_accumulation_fusion=False,
                batch_p2p_comm=False,
                deallocate_pipeline_outputs=False,
                share_embeddings_and_output_weights=False,
                masked_softmax_fusion=False,
                bias_activation_fusion=False,
                bias_dropout_fusion=False,
                persist_layer_norm=False,
            ),
            train=configs.TrainingConfig(
                train_iters=self.steps,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                **train,
            ),
            validation=configs.ValidationConfig(eval_interval=2, eval_iters=1),
            optimizer=configs.OptimizerConfig(
                optimizer="adam", lr=1e-2, min_lr=1e-2, use_distributed_optimizer=False, clip_grad=0.0
            ),
            scheduler=configs.SchedulerConfig(
                lr_decay_style="constant",
                lr_warmup_iters=0,
                lr_decay_iters=self.steps,
                start_weight_decay=0.01,
                end_weight_decay=0.01,
                weight_decay_incr_style="constant",
            ),
            ddp=configs.DistributedDataParallelConfig(
                use_distributed_optimizer=False, check_for_nan_in_grad=False
            ),
            dataset=dataset,
            logger=configs.LoggerConfig(log_interval=100),
            tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1),
            checkpoint=configs.CheckpointConfig(
                save=checkpoints,
                load=checkpoints,
                save_interval=self.save_interval,
                ckpt_format="torch_dist",
                save_rng=False,
                load_rng=False,
            ),
            rng=configs.RNGConfig(seed=mw.SEED),
            dist=configs.DistributedInitConfig(distributed_backend="gloo"),
        )


@dataclass
class OnCpuProvider(GPTModelProvider):
    """A model in a CPU's memory."""

    def provide_distributed_model(self, *args: Any, **kwargs: Any) -> Any:
        return super().provide_distributed_model(*args, **kwargs | {"use_cpu_initialization": True})


@dataclass
class SeesOnCpu(Qwen25VLModelProvider, OnCpuProvider):
    """A tiny Qwen2.5-VL."""

    mrope_section: list[int] = field(default_factory=lambda: [2, 1, 1])
    vision_config: Any = field(
        default_factory=lambda: Qwen2_5_VLVisionConfig(
            depth=2,
            hidden_size=32,
            out_hidden_size=32,
            intermediate_size=32,
            num_heads=2,
            fullatt_block_indexes=[1],
        )
    )
    image_token_id: int = IMAGE
    video_token_id: int = VIDEO
    vision_start_token_id: int = BEGIN

    def provide(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(
            mw.SEED
        )  # transformers' encoder leaves other random states behind when it is imported
        return super().provide(*args, **kwargs)


@dataclass(kw_only=True)
class Given(DatasetProvider):
    """These batches, one after the other."""

    batches: Any = ()
    dataloader_type: Any = "external"

    def build_datasets(self, context: Any) -> tuple[Any, Any, Any]:
        return iter(self.batches), None, None


def layer_spec(config: Any) -> Any:
    """Megatron-core's local layers, with attention that knows packs."""
    spec: Any = local_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = mw.example.Attention
    return spec


class Nothing:
    """A stream or an event, of which nothing is asked."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def no_gpu() -> None:
    """In this process, from now on: what Bridge and Megatron-core ask of a GPU."""
    for name, value in {
        "Stream": Nothing,
        "Event": Nothing,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: Nothing(),
    }.items():
        setattr(torch.cuda, name, value)
    setup.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    megatron.core.datasets.__path__.append(
        str(distribution("megatron-core").locate_file("megatron/core/datasets"))
    )
    initialize.compile_helpers = lambda: None
    torch._dynamo.config.disable = True
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async.get_write_results_queue = lambda *_: results


class Losses(Callback):
    """The loss of every step, on ranks of the last stage, and of every evaluation."""

    def __init__(self) -> None:
        self.train: dict[int, float] = {}
        self.valid: list[float] = []

    def on_train_step_end(self, context: Any) -> None:
        if context.loss_dict:
            self.train[context.state.train_state.step] = context.loss_dict["lm loss"].item()

    def on_eval_end(self, context: Any) -> None:
        if context.total_loss_dict:
            self.valid.append(context.total_loss_dict["lm loss"].item())


class Opened:
    """Which of some files this process opens, while entered."""

    def __init__(self, path: Path) -> None:
        self._path, self.count, self._on = str(path), 0, False
        sys.addaudithook(self._see)

    def __enter__(self) -> Opened:
        self._on = True
        return self

    def __exit__(self, *_: Any) -> None:
        self._on = False

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if self._on and event == "open" and os.path.abspath(str(args[0])) == self._path:
            self.count += 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what Bridge prints and warns of."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        warnings.catch_warnings(),
        mw.example.OnCpu(),
    ):
        warnings.simplefilter("ignore")
        yield


def train(job: Job, dataset: Any, forward_step: Any, *callbacks: Any, **train: Any) -> Losses:
    """`pretrain` to its end."""
    losses = Losses()
    with quiet():
        pretrain.pretrain(job.config(dataset, **train), forward_step, [*callbacks, losses])
    return losses


own_step = gpt_step.forward_step
own_vision_step = vlm_step.forward_step
