"""What Megatron-LM's `pretrain` does with a provider, without its models, optimizers and checkpoints.

Its training.py is in its repository alone; test_megatron_pretrain_peers.py runs that, where there is a checkout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

ForwardStep = Callable[[Any, int, str], None]
"""(iterator or list of them, number of microbatches, "train", "valid" or "test")."""


def arguments(**changed: Any) -> SimpleNamespace:
    """Those of Megatron-LM's arguments that concern data, as its command line gives them without options."""
    told: dict[str, Any] = {
        "dataloader_type": "external",
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "seq_length": 64,
        "train_iters": 6,
        "eval_iters": 1,
        "eval_interval": 3,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "iterations_to_skip": [],
        "skip_train": False,
        "create_attention_mask_in_dataloader": True,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "hybrid_context_parallel": False,
        "mtp_num_layers": None,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**told | changed)


@contextmanager
def global_args(args: SimpleNamespace) -> Iterator[None]:
    """Megatron-LM's arguments under their own name, and its number of microbatches."""
    variables: Any = ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS, variables.get_args = args, lambda: args
    dp = parallel_state.get_data_parallel_world_size()
    calculator.init_num_microbatches_calculator(
        dist.get_rank(), None, args.global_batch_size, args.micro_batch_size, dp
    )
    try:
        with patch.dict("sys.modules", {"megatron.training.global_vars": variables}):
            yield
    finally:
        calculator.unset_num_microbatches_calculator()


@dataclass
class Driver:
    """`pretrain` from its provider on: training, evaluations within and after it, and a test."""

    args: SimpleNamespace
    forward_step: ForwardStep

    def pretrain(self, provider: Callable[..., Any]) -> None:
        args, points = self.args, self.args.train_iters // self.args.eval_interval + 1
        evaluated = args.eval_iters * args.global_batch_size
        samples = (args.train_iters * args.global_batch_size, points * evaluated, evaluated)
        stages = args.virtual_pipeline_model_parallel_size
        if stages is None:
            train, valid, test = self._iterators(provider(samples))
        else:
            assert "vp_stage" in inspect.signature(provider).parameters
            made = [self._iterators(partial(provider, vp_stage=v)(samples)) for v in range(stages)]
            train, valid, test = (list(each) for each in zip(*made))
        assert provider.is_distributed  # type: ignore[attr-defined]
        args.curr_iteration = 0
        for iteration in range(args.iteration, args.train_iters):
            if iteration + 1 in args.iterations_to_skip:
                self._skip(train)
                args.consumed_train_samples += args.global_batch_size
                continue
            args.curr_iteration = iteration
            self.forward_step(train, calculator.get_num_microbatches(), "train")
            args.consumed_train_samples += args.global_batch_size
            if args.eval_iters and (iteration + 1) % args.eval_interval == 0:
                self._evaluate(valid, "valid")
        if args.eval_iters:
            self._evaluate(valid, "valid")
            if test not in (None, [None] * (stages or 0)):
                self._evaluate(test, "test")

    def _iterators(self, datasets: tuple[Any, ...]) -> list[Any]:
        return [None if each is None else RerunDataIterator(each) for each in datasets]

    def _evaluate(self, iterator: Any, name: str) -> None:
        for _ in range(self.args.eval_iters):
            self.forward_step(iterator, calculator.get_num_microbatches(), name)
            self.args.consumed_valid_samples += self.args.global_batch_size

    def _skip(self, iterator: Any) -> None:
        """Its dummy_train_step: tp rank 0 pulls and broadcasts, and the other ranks know the shapes."""
        for _ in range(calculator.get_num_microbatches()):
            skipped(self.args, iterator)


def skipped(args: SimpleNamespace, iterator: Any) -> None:
    """A microbatch of Megatron-LM's `dummy_train_step`: tp rank 0 alone pulls, and the others know the shapes."""
    shape, group = (args.micro_batch_size, args.seq_length), parallel_state.get_tensor_model_parallel_group()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    wanted = {"tokens": torch.int64, "position_ids": torch.int64} if first else {}
    wanted |= {"labels": torch.int64, "loss_mask": torch.float32} if last else {}
    batch = {name: torch.empty(shape, dtype=dtype) for name, dtype in wanted.items()}
    batch["attention_mask"] = torch.empty((shape[0], 1, shape[1], shape[1]), dtype=torch.bool)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        given = next(iterator)
        assert {name: (each.shape, each.dtype) for name, each in batch.items()} == {
            name: (given[name].shape, given[name].dtype) for name in batch
        }
        batch = {name: given[name] for name in batch}
    for name in sorted(batch):
        dist.broadcast(batch[name], parallel_state.get_tensor_model_parallel_src_rank(), group=group)
