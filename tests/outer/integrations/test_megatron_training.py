"""The page's loops, as text, train Megatron's model through its own schedules; losses are those of its own data path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pretrain_driver
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_world import (
    Case,
    example,
    initialized,
    megatrons_batch,
    megatrons_datasets,
    page_snippets,
    samples_of_step,
    stage_kinds,
    write_documents,
)

import world
from soak import SOAK

STEPS, SEQUENCES, LENGTH, MBS = 3, 16, 64, 2  # of the page, but for its train_iters
VOCAB = 256
LOADINGS = ("replicated", "broadcast", "shared")

# "pretrain": by Megatron's own training loop, which calls the provider and nothing else of ours
CASES = [
    (Case(tp=2, pp=2), [("shared", ""), ("broadcast", "transport=mf.Transport(prefetch=0), ")]),
    (Case(pp=4), [("shared", "transport=mf.Transport(prefetch=0), verify=True, ")]),
    (Case(tp=2, pp=2, vpp=2), [("shared", "verify=True, ")]),
]
if SOAK:
    ways = [
        (load, f"{verify}transport=mf.Transport(prefetch={n}), ")
        for load in LOADINGS
        for verify in ("", "verify=True, ")
        for n in (0, 1, 2)
    ]
    CASES = [(case, ways) for case, _ in CASES]
    CASES += [(Case(tp=2), ways), (Case(pp=2), ways), (Case(pp=2, vpp=2), ways)]


@dataclass
class Trainer:
    """Megatron's model, schedule and optimizer, from the same weights each time; a loss per microbatch."""

    case: Case
    losses: list[float]

    def __post_init__(self) -> None:
        case = self.case
        options = [
            "--corpus",
            "",
            "--out",
            ".",
            "--tp",
            str(case.tp),
            "--pp",
            str(case.pp),
            "--window",
            str(LENGTH),
        ]
        options += ["--vpp", str(case.vpp)] if case.vpp else []
        args: Any = example.arguments([*options, "--vocab", str(VOCAB)])
        self.config = example.config_of(args)
        self.stages = [example.stage_of(args, self.config, v) for v in range(case.vpp or 1)]
        self.optimizer = torch.optim.SGD([p for stage in self.stages for p in stage.parameters()], lr=0.1)

    def scheduled(self, forward_step: Callable[..., Any], iterators: Any, *, forward_only: bool) -> list[Any]:
        """What Megatron's schedule returns of a step."""
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=self.stages,
            num_microbatches=SEQUENCES // (MBS * parallel_state.get_data_parallel_world_size()),
            seq_length=LENGTH,
            micro_batch_size=MBS,
            forward_only=forward_only,
        )

    def step(self, forward_step: Callable[..., Any], iterators: Any) -> None:
        told = self.scheduled(forward_step, iterators, forward_only=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.losses += [each["loss"].item() for each in told]

    def pretrain(self, provider: Callable[..., Any], forward_step: Callable[..., Any]) -> None:
        """What Megatron-LM's function of this name does with a provider."""

        def step(iterators: Any, count: int, name: str) -> None:
            assert name == "train"
            self.step(forward_step, iterators)

        case = self.case
        args = pretrain_driver.arguments(
            train_iters=STEPS,
            eval_iters=0,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
        )
        with pretrain_driver.global_args(args):
            pretrain_driver.Driver(args, step).pretrain(provider)


def loss_func(
    mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = (output * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.detach()}


def megatrons_losses(case: Case, dataset: Any) -> list[float]:
    """By its dataset, its sampler, its broadcast in the tp group."""
    trainer = Trainer(case, [])
    steps = [samples_of_step(dataset, step, SEQUENCES, MBS) for step in range(STEPS)]

    def batches(v: int) -> Iterator[dict[str, Any]]:
        for full in (full for step in steps for full in step):
            yield megatrons_batch(full, *stage_kinds(case, v))

    def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
        batch = next(iterator)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(loss_func, batch["loss_mask"])

    iterators = [batches(v) for v in range(case.vpp or 1)]
    for _ in range(STEPS):
        trainer.step(forward_step, iterators if case.vpp else iterators[0])
    return trainer.losses


def page_losses(case: Case, loading: str, options: str, snippet: str) -> list[float]:
    """By the page's text; the loading and options are set in it."""
    trainer = Trainer(case, [])
    names = {
        "__name__": "page",
        "config": trainer.config,
        "train_iters": STEPS,
        "loss_func": loss_func,
        "train_step": trainer.step,
        "pretrain": trainer.pretrain,
    }
    first, second, *_ = page_snippets()
    if snippet == "pretrain":  # the definitions of the first, and then the second
        first = first.partition("\n\nwith ")[0] + "\n" + second
        first = first.replace("valid=valid)", f"readers={loading!r}, device='cpu')")
    else:
        first = first.replace('readers="shared"', f"readers={loading!r}")
    assert f"readers={loading!r}" in first
    text = first.replace("micro_batch_size=2", f"{options}micro_batch_size=2")
    exec(compile(text, "frameworks.md", "exec"), names)
    return trainer.losses


def job(rank: int, folder: Path, cases: list[tuple[Case, list[tuple[str, str]]]]) -> dict[str, Any]:
    os.chdir(folder)
    dataset = megatrons_datasets(folder / "corpus", lambda: True, STEPS * SEQUENCES, LENGTH)
    seen: dict[str, Any] = {}
    with example.OnCpu():
        for case, ways in cases:
            with initialized(case):
                name = f"tp{case.tp}-pp{case.pp}-vpp{case.vpp}"
                wanted = seen[name] = megatrons_losses(case, dataset)
                for loading, options in ways:
                    seen[f"{name} {loading} {options}"] = (
                        page_losses(case, loading, options, "loop") == wanted
                    )
                if case.vpp or SOAK:
                    seen[f"{name} pretrain"] = page_losses(case, "shared", "", "pretrain") == wanted
    return seen


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("training")
    write_documents(folder / "corpus", count=200, vocab=VOCAB)
    return world.start(job, 4, folder, CASES).results(3600 if SOAK else 600)


def test_losses_are_those_of_megatrons_own_data_path(told: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(told):
        assert [name for name, same in seen.items() if same is False] == [], rank
    for case, _ in CASES:
        losses = [seen[f"tp{case.tp}-pp{case.pp}-vpp{case.vpp}"] for seen in told]
        assert max(map(len, losses)) == STEPS * SEQUENCES // (MBS * (4 // (case.tp * case.pp)))
