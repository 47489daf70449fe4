"""torchtitan's own Trainer owns the loop: killed and resumed, it trains what it would have trained.

It is written for GPUs. What it asks of one and a CPU does not have is stood in for, in processes of the test's own;
its loop, configs, meshes, checkpoints and validator are as they are.
"""

from __future__ import annotations

import importlib.machinery
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

import loops
import meshfeed as mf
import world
from soak import only_soak

STEPS = 6


def stand_in() -> None:
    """For kernels of expert parallelism (triton), loggers, other loaders' datasets, a GPU's memory statistics."""
    for name in (
        "torchtitan.distributed.minimal_async_ep.kernels",
        "torch.utils.tensorboard",
        "datasets",
        "datasets.distributed",
    ):
        module: Any = MagicMock(name=name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module
    torch._utils._get_available_device_type = lambda: "cpu"  # it takes no device for CUDA
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class Memory:
        device_name = "CPU"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            pass

    metrics.build_device_memory_monitor = Memory
    utils.set_pg_timeouts = lambda **given: None  # a barrier by device number
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()


def config_of(corpus: str, out: Path) -> Any:
    """torchtitan's debug model on two replicas, with checkpoints every second step."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    from meshfeed.integrations.torchtitan import DataLoader

    class NoTokenizer(BaseTokenizer):
        """The corpus is tokens already."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **given: Any) -> None:
            self.eos_id = 0

        encode = decode = get_vocab_size = None

    shared = {"data": mf.open(corpus), "sequence": mf.Windows(32), "batch": mf.Batch(sequences=8)}
    train = mf.Recipe(**shared, seed=1234)
    held_out = mf.Recipe(**shared, shuffle="none", epochs=1, steps=2)
    spec = model_registry("debugmodel", attn_backend="stood in for")
    del spec.model.layers[1:]  # for speed
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=1e-3),
        dump_folder=str(out),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=8,
            seq_len=32,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", data_parallel_replicate_degree=2, data_parallel_shard_degree=1
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=DataLoader.Config(recipe=train, verify=True),
        validator=Validator.Config(enable=True, freq=6, dataloader=DataLoader.Config(recipe=held_out)),
        checkpoint=CheckpointManager.Config(enable=True, interval=2),
    )


def trained(rank: int, corpus: str, out: Path, kill_after: int = 0) -> Any:
    """Rows in the order in which they are trained, losses by step, rows that are validated."""
    os.environ["LOCAL_RANK"] = str(rank)
    trainer = config_of(corpus, out).build()
    ledger: list[Any] = []
    validated: list[Any] = []
    losses: dict[int, float] = {}
    theirs, evaluated = trainer.post_dataloading_process, trainer.validator.post_dataloading_process

    def process(fields: Any, labels: Any) -> Any:
        ledger.append((trainer.step - 1, loops.rows(fields["input"])))
        if len(ledger) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return theirs(fields, labels)

    def process_validated(fields: Any, labels: Any, parts: Any) -> Any:
        validated.append(loops.rows(fields["input"]))
        return evaluated(fields, labels, parts)

    def log(step: int, loss: float, *given: Any, **named: Any) -> None:
        losses[step] = loss

    trainer.post_dataloading_process, trainer.metrics_processor.log = process, log
    trainer.validator.post_dataloading_process = process_validated
    trainer.train()
    trainer.close()
    return ledger, losses, validated


def first(rank: int, corpus: str, out: Path) -> None:
    stand_in()
    trained(rank, corpus, out, kill_after=11)  # within step 5 of 0, 1, ...; that of step 4 was saved


def second(rank: int, corpus: str, out: Path) -> Any:
    stand_in()
    return trained(rank, corpus, out), trained(rank, corpus, out.with_name("whole"))


@only_soak
def test_torchtitans_own_trainer_killed_and_resumed_trains_the_same(tmp_path: Path) -> None:
    corpus = loops.write(tmp_path / "text")
    killed = world.start(first, 2, corpus, tmp_path / "out").join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2, killed
    for rank, (resumed, whole) in enumerate(world.run(second, 2, corpus, tmp_path / "out")):
        assert whole[0] == loops.wanted(corpus, range(STEPS), rank, window=32, sequences=8)
        assert resumed[0] == whole[0][2 * 4 :]
        assert resumed[1] == {step: whole[1][step] for step in (5, 6)}
        one_pass = loops.wanted(corpus, range(2), rank, window=32, sequences=8, shuffle="none")
        one_pass = [rows for _, rows in one_pass]
        assert whole[2] == one_pass * 2 and resumed[2] == one_pass  # after steps 1 and 6; after 6
