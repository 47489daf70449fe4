"""What tests of Megatron-core share: its process groups, and its own way to every rank's batch."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.distributed import distributed_c10d

import meshfeed as mf
import world
from megatron_calls import on_this_cp_rank, takes
from meshfeed.integrations import megatron
from meshfeed.store import IndexedWriter

sys.path.append(str(Path(__file__).parents[3] / "examples"))
import megatron_gpt as example  # noqa: F401

world.preload("megatron_world")
EOD, SEED, LENGTH = 7, 1234, 32
TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True)
class Case:
    """How Megatron is initialized, and what its config says of stages."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    order: str = "tp-cp-ep-dp-pp"
    stages: str | None = None
    mtp: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
            pipeline_model_parallel_layout=self.stages,
            mtp_num_layers=self.mtp,
        )


@contextlib.contextmanager
def initialized(case: Case) -> Iterator[None]:
    """Megatron's process groups, over gloo. They end with it: each has a thread that wakes up a hundred times a second."""
    groups = distributed_c10d._world.pg_map
    others = {*groups}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
            context_parallel_size=case.cp,
            expert_model_parallel_size=case.ep,
            order=case.order,
            **case.options,
        )
    try:
        yield
        dist.barrier()  # no rank uses them any more
    finally:
        parallel_state.destroy_model_parallel()
        for group in groups.keys() - others:
            dist.destroy_process_group(group)


def write_documents(path: Path, *, seed: int = 0, count: int = 120, vocab: int = 30_000) -> Path:
    """Documents that end in EOD and have none inside."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(path, np.uint16) as writer:
        for length in rng.integers(1, 60, count).tolist():
            writer.add_document([*rng.integers(EOD + 1, vocab, length - 1).tolist(), EOD])
    return path


def page_snippets(framework: str = "Megatron-core") -> list[str]:
    """What docs/frameworks.md shows for a framework, in its order."""
    page = (Path(__file__).parents[3] / "docs" / "frameworks.md").read_text()
    (section,) = re.findall(rf"^## {framework}\n(.*?)(?=^## |\Z)", page, re.S | re.M)
    return re.findall(r"```python\n(.*?)```", section, re.S)


def megatrons_datasets(path: Path, is_reader: Any, samples: int, length: int = LENGTH) -> Any:
    """Its training set, built by its builder on the ranks that read."""
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=([str(path)], None),
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=EOD, vocab_size=30_000, unique_identifiers={}),  # type: ignore[arg-type]
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, None, None], is_reader, config).build()[0]


def run(job: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`world.run`, with patience for a busy machine."""
    return world.start(job, world_size, *args).results()


def plain(value: Any) -> Any:
    """A tensor as something to send and compare; dtype and shape included."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    return value


def samples_of_step(dataset: Any, step: int, sequences: int, mbs: int) -> list[dict[str, torch.Tensor]]:
    """The microbatches of this data-parallel rank, as Megatron's pretraining sampler and collation make them."""
    dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    made: list[dict[str, torch.Tensor]] = []
    for first in range(step * sequences, (step + 1) * sequences, mbs * dp):
        rows = [dataset[first + dp_rank * mbs + row] for row in range(mbs)]
        made.append({key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in TOKEN_KEYS})
    return made


def on_this_tp_rank(full: dict[str, torch.Tensor], first: bool, last: bool, mtp: bool) -> dict[str, Any]:
    """Megatron's broadcasts in the tp group, key by key, of what a stage needs.

    Its own function is in its training scripts, not in the package, and puts everything on CUDA; this one
    sends the same keys over the same group from the same rank.
    """
    batch: dict[str, Any] = dict.fromkeys(TOKEN_KEYS)
    needed = (("tokens", "position_ids") if first or mtp else ()) + (("labels", "loss_mask") if last else ())
    for key in needed:
        sends = parallel_state.get_tensor_model_parallel_rank() == 0
        tensor = full[key].clone() if sends else torch.empty_like(full[key])
        source = parallel_state.get_tensor_model_parallel_src_rank()
        dist.broadcast(tensor, source, group=parallel_state.get_tensor_model_parallel_group())
        batch[key] = tensor
    return batch


def megatrons_batch(full: dict[str, torch.Tensor], first: bool, last: bool, mtp: bool) -> dict[str, Any]:
    """What Megatron's `get_batch` gives this rank of a microbatch: tp, then its own cut for cp."""
    return on_this_cp_rank(on_this_tp_rank(full, first, last, mtp))


def stage_kinds(case: Case, vp_stage: int) -> tuple[bool, bool, bool]:
    """(first, last, mtp) of this rank's virtual stage, by Megatron's own functions."""
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = None if case.stages is None else PipelineParallelLayerLayout(case.stages, case.pp)
    config: Any = SimpleNamespace(pipeline_model_parallel_layout=layout, mtp_num_layers=case.mtp)
    told = (config,) if takes(mtp_on_this_rank, "config") else (layout, case.mtp)  # since 0.18
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        mtp_on_this_rank(*told, ignore_virtual=False, vp_stage=vp_stage),
    )


def iterators_of(source: Any) -> list[Any]:
    """`data_iterators`, as a list also without virtual stages."""
    made = megatron.data_iterators(source)
    return made if isinstance(made, list) else [made]


def gpt_recipe(path: Path, samples: int, sequences: int) -> mf.Recipe:
    """Megatron's samples in Megatron's order."""
    return mf.Recipe(
        data=mf.open(str(path)),
        sequence=mf.MegatronGPT(LENGTH, samples=samples),
        batch=mf.Batch(sequences=sequences),
        seed=SEED,
    )


def sample_of(tokens: np.ndarray, **beside: Any) -> dict[str, Any]:
    """As Megatron's datasets for packing give it."""
    mask = np.ones(tokens.size, np.float32)
    mask[-1:] = 0
    return {
        "tokens": torch.from_numpy(tokens.astype(np.int64)),
        "labels": torch.from_numpy(np.append(tokens[1:], 0)[: tokens.size].astype(np.int64)),
        "loss_mask": torch.from_numpy(mask),
        "position_ids": torch.arange(tokens.size),
        **beside,
    }
