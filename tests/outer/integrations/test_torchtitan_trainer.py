"""torchtitan's own Trainer owns the loop: killed and resumed, it trains what it would have trained.

With torchtitan 0.3 it trains windows, with its main branch packs: whichever `import torchtitan` finds. It is written for GPUs. What it asks of one and a CPU does not have is stood in for, in processes of the test's own;
its loop, configs, meshes, checkpoints and validator are as they are.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

import loops
import meshfeed as mf
import world
from soak import only_soak

STEPS = 6


def is_main() -> bool:
    """Whether torchtitan is its main branch, which counts tokens instead of rows."""
    return find_spec("torchtitan.components.data") is not None


def stand_in() -> None:
    """For kernels of expert parallelism (triton), loggers, other loaders' datasets, a GPU's memory statistics."""
    names = ["torchtitan.distributed.minimal_async_ep.kernels", "torch.utils.tensorboard"]
    for name in names if is_main() else [*names, "datasets", "datasets.distributed"]:
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


def recipes_of(corpus: str) -> tuple[mf.Recipe, mf.Recipe]:
    """What is trained, and what is held out."""
    store = mf.open(corpus)
    windows, batch = mf.Windows(32), mf.Batch(sequences=8)
    once = mf.Batch(sequences=16) if is_main() else batch  # two lines of eight windows, or four rows twice
    held_out = mf.Recipe(data=store, sequence=windows, batch=once, shuffle="none", epochs=1, steps=2)
    sequence = mf.Documents() if is_main() else windows
    return mf.Recipe(data=store, sequence=sequence, batch=batch, seed=1234), held_out


def config_of(corpus: str, out: Path, dp: int) -> Any:
    """torchtitan's debug model on some replicas, with checkpoints every second step."""
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

    train, held_out = recipes_of(corpus)
    sizes: dict[str, int] = {"local_batch_size": 2, "global_batch_size": 8, "seq_len": 32}
    if is_main():  # two documents of 100 tokens in a pack
        sizes = {"num_tokens_per_microbatch_per_dp_rank": 256, "num_tokens_per_train_step": 4 * 256}
    trained_on = DataLoader.Config(recipe=train, verify=True, microbatches=4 // dp)
    spec = model_registry("debugmodel", attn_backend="stood in for")
    del spec.model.layers[1:]  # for speed
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=1e-3),
        dump_folder=str(out),
        training=TrainingConfig(
            **sizes,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", data_parallel_replicate_degree=dp, data_parallel_shard_degree=1
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=trained_on,
        validator=Validator.Config(enable=True, freq=6, dataloader=DataLoader.Config(recipe=held_out)),
        checkpoint=CheckpointManager.Config(enable=True, interval=2),
    )


def trained(rank: int, corpus: str, out: Path, dp: int = 2, kill_after: int = 0) -> Any:
    """Batches in the order in which they are trained, losses by step, batches that are validated."""
    os.environ["LOCAL_RANK"] = str(rank)
    trainer = config_of(corpus, out, dp).build()
    ledger: list[Any] = []
    validated: list[Any] = []
    losses: dict[int, float] = {}
    theirs, evaluated = trainer.post_dataloading_process, trainer.validator.post_dataloading_process

    def process(fields: Any, labels: Any) -> Any:
        ledger.append((trainer.step - 1, loops.rows(fields["input"].view(-1, 32))))
        if len(ledger) == kill_after:
            world.die_together()
        return theirs(fields, labels)

    def process_validated(fields: Any, labels: Any, parts: Any) -> Any:
        validated.extend(loops.rows(fields["input"].view(-1, 32)))
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


def third(rank: int, corpus: str, out: Path) -> Any:
    stand_in()
    return trained(rank, corpus, out, dp=1)


def simulated(recipe: mf.Recipe, steps: range, dp: int, rank: int) -> list[Any]:
    """(step, rows) of every batch of a rank."""
    from meshfeed.integrations.torchtitan import line, rows

    shape = line(recipe, 2048, 256) if is_main() else rows(recipe, 32, 2)
    made = mf.simulate(recipe, mf.Layout(dp=dp), steps, ranks=[rank], **shape.options)
    return [
        (step.batch.step, loops.rows(each["tokens"].view(-1, 32)))
        for step in made
        for each in step.microbatches
    ]


@only_soak
def test_torchtitans_own_trainer_killed_and_resumed_trains_the_same(tmp_path: Path) -> None:
    corpus = loops.write(tmp_path / "text")
    train, held_out = recipes_of(corpus)
    killed = world.start(first, 2, corpus, tmp_path / "out").join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2, killed
    shutil.copytree(tmp_path / "out", tmp_path / "alone")
    for rank, (resumed, whole) in enumerate(world.run(second, 2, corpus, tmp_path / "out")):
        assert whole[0] == simulated(train, range(STEPS), 2, rank)
        assert resumed[0] == whole[0][2 * 4 :]
        assert resumed[1] == {step: whole[1][step] for step in (5, 6)}
        one_pass = [row for _, rows in simulated(held_out, range(2), 2, rank) for row in rows]
        assert whole[2] == one_pass * 2 and resumed[2] == one_pass  # after steps 1 and 6; after 6
    (alone,) = world.run(
        third, 1, corpus, tmp_path / "alone"
    )  # torchtitan's own loader refuses another degree
    assert alone[0] == simulated(train, range(4, STEPS), 1, 0)
