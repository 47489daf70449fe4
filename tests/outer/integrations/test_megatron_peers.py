"""Megatron-LM's own tests of what `SequencePacking` and `get_batch` replace, from a checkout, on eight gloo processes.

Their text runs as it is, but for the device. Their imports find meshfeed's functions under Megatron's names; what else
the names stand for differs only as `Renamed` says.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_world import Case, example, initialized, run

import meshfeed as mf
from meshfeed.exchange import Keys
from meshfeed.integrations import megatron
from services.needs import checkout

THEIRS = "tests/unit_tests/test_sequence_packing.py"
EXCEPTIONS = {
    "test_scheduler_thd_padding_mask_from_cu_seqlens": "it tests a private function; get_batch gives padding_mask",
    "test_scheduler_sanitizes_thd_padding_values": "it tests a private function; meshfeed makes the padding itself",
}
BOTH_ENDS = Keys(
    *(
        mf.Field(name=name, dtype=dtype, stages=("first", "last"), split=True)
        for name, dtype in (("tokens", "int64"), ("labels", "int64"), ("loss_mask", "float32"))
    )
)


class Renamed:
    """Megatron's names for meshfeed's functions.

    Exceptions, which the test's own text asks for: totals are floats, tp ranks other than 0 have no iterator, both ends
    of a pipeline have all keys, and a pack is whole, not cut for its cp rank.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def wrap_data_iterator(self, data_iterator: Any, config: Any, num_microbatches: int) -> tuple[Any, ...]:
        wrap = self._stack.enter_context(megatron.SequencePacking(keys=BOTH_ENDS, device="cpu"))
        made, count, tokens, sum_sq = wrap(data_iterator, config, num_microbatches)
        stages = made if isinstance(made, list) else [made]
        whole = [[self._whole(next(stage)) for _ in range(count)] for stage in stages]
        given: list[Any] = [
            None if parallel_state.get_tensor_model_parallel_rank() else iter(one) for one in whole
        ]
        return given if isinstance(made, list) else given[0], count, float(tokens), float(sum_sq)

    def get_batch(self, data_iterator: Any, **_: Any) -> tuple[Any, ...]:
        config = SimpleNamespace(sequence_packing_scheduler="empty", max_seqlen_per_dp_cp_rank=8192)
        wrap = self._stack.enter_context(megatron.SequencePacking(device="cpu"))
        batch = megatron.get_batch(wrap(data_iterator, config, 1)[0], padded_cu_seqlens=True)
        return tuple(batch[name] for name in (*megatron.MODEL_KEYS, "packed_seq_params", "padding_mask"))

    @staticmethod
    def _whole(batch: dict[str, Any]) -> dict[str, Any]:
        """A microbatch with what all cp ranks of its pack have, one after the other."""
        group = parallel_state.get_context_parallel_group()
        made = dict(batch)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            if name in batch:
                shards = [torch.empty_like(batch[name]) for _ in range(group.size())]
                dist.all_gather(shards, batch[name], group=group)
                made[name] = torch.cat(shards, dim=1)
        return made


def their_module(path: Path, renamed: Renamed) -> ModuleType:
    """Their tests, with meshfeed behind the names that they import."""

    class Utils:
        def initialize_model_parallel(tp: int, pp: int, vpp: Any, context_parallel_size: int) -> None:
            Utils.stack = ExitStack()
            Utils.stack.enter_context(initialized(Case(tp=tp, pp=pp, vpp=vpp, cp=context_parallel_size)))

        def destroy_model_parallel() -> None:
            Utils.stack.close()

    given = {
        "megatron.core.datasets.data_schedule": {
            "_build_thd_padding_mask": None,
            "_sanitize_thd_padding_values": None,
            "get_batch_on_this_rank_for_sequence_packing": renamed.get_batch,
            "wrap_data_iterator": renamed.wrap_data_iterator,
        },
        "megatron.training": {},
        "megatron.training.global_vars": {"unset_global_variables": lambda: None},
        "tests": {},
        "tests.unit_tests": {},
        "tests.unit_tests.test_utilities": {"Utils": Utils},
    }
    for name, values in given.items():
        sys.modules[name] = made = ModuleType(name)
        vars(made).update(values)
    text = re.sub(r"""['"]cuda['"](, torch.cuda.current_device\(\))?""", "'cpu'", path.read_text())
    module = ModuleType("theirs")
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def cases_of(test: Any) -> Iterator[dict[str, Any]]:
    """The arguments that a test's marks give it."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    names = [[name] if isinstance(name, str) else name for name, _ in marks]
    for values in itertools.product(*(each for _, each in marks)):
        yield {n: v for of, one in zip(names, values) for n, v in zip(of, one if len(of) > 1 else [one])}


def job(rank: int, path: Path) -> dict[str, int]:
    """How many cases of each test passed."""
    passed: dict[str, int] = {}
    with example.OnCpu(), ExitStack() as stack:
        module = their_module(path, Renamed(stack))
        for name, test in vars(module).items():
            if name.startswith("test_") and name not in EXCEPTIONS:
                for arguments in cases_of(test):
                    module.random.seed(7)  # type: ignore[attr-defined]  # all ranks draw the same lengths
                    torch.manual_seed(7)
                    test(**arguments)
                    passed[name] = passed.get(name, 0) + 1
    return passed


def test_megatrons_tests_of_sequence_packing() -> None:
    path = checkout("Megatron-LM") / THEIRS
    results = run(job, 8, path)
    text = path.read_text()
    assert all(result == results[0] for result in results)
    assert {*results[0], *EXCEPTIONS} == {
        line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def test_")
    }
