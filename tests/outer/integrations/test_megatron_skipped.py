"""Iterations that Megatron-LM skips, which it pulls on tp rank 0 alone: what is trained then is the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pretrain_driver
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron_world import LENGTH, Case, gpt_recipe, initialized, run, write_documents

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.integrations import megatron
from meshfeed.integrations.megatron import iterations

STEPS, SEQUENCES, ROWS = 9, 8, 1
COUNT = SEQUENCES // ROWS
"""Microbatches of a step without data parallelism: more than are read ahead."""


def arguments(**changed: Any) -> SimpleNamespace:
    return pretrain_driver.arguments(
        **{"curr_iteration": 0, "micro_batch_size": ROWS, "seq_length": LENGTH} | changed
    )


def pretrained(
    args: SimpleNamespace, iterator: Any, start: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Each iteration that Megatron-LM's `train` trains, from 0, and what it gets; those to skip as it does it."""
    for iteration in range(start, STEPS):
        if iteration + 1 in args.iterations_to_skip:
            for _ in range(COUNT):
                pretrain_driver.skipped(args, iterator)
        else:
            args.curr_iteration = iteration
            yield iteration, [in_turn(iterator) for _ in range(COUNT)]


def in_turn(iterator: Any) -> dict[str, Any]:
    """A microbatch inside a schedule: a stage takes it when the one before has sent its own."""
    sent = torch.zeros(1)
    if not parallel_state.is_pipeline_first_stage():
        dist.recv(sent, parallel_state.get_pipeline_model_parallel_prev_rank())
    batch = megatron.get_batch(iterator)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(sent, parallel_state.get_pipeline_model_parallel_next_rank())
    return batch


WAYS = [
    ([1], 0, {"readers": "shared"}),
    ([3, 4, 5], 0, {"readers": "broadcast", "verify": True}),
    ([1, 2, 9], 0, {"readers": "replicated", "transport": mf.Transport(prefetch=0)}),
    ([5, 6, 8], 4, {"readers": "broadcast"}),  # after a checkpoint, the first two at once
]


def trained_job(rank: int, path: Path, case: Case) -> list[dict[int, Any]]:
    """The tokens, or labels, of each iteration that was trained, of each way and of all steps without Megatron."""
    recipe, made = gpt_recipe(path, STEPS * SEQUENCES, SEQUENCES), []
    key = "tokens" if case.pp == 1 or rank < dist.get_world_size() // 2 else "labels"
    with initialized(case):
        ways: list[Any] = [([], 0, {}), *WAYS]
        for skip, start, options in ways:
            args = arguments(iterations_to_skip=skip)
            with megatron.feed(recipe, case.config, device="cpu", micro_batch_size=ROWS, **options) as feed:
                feed.run(start)
                made_iterators: Any = megatron.data_iterators(feed, args=args, num_microbatches=lambda: COUNT)
                iterator: Any = RerunDataIterator(made_iterators)
                seen = {
                    at: [batch[key].tolist() for batch in got]
                    for at, got in pretrained(args, iterator, start)
                }
                made.append(seen)
    return made


@pytest.mark.parametrize(
    "case", [Case(tp=2), Case(tp=2, pp=2), Case(tp=2, cp=2)], ids=["tp2", "tp2-pp2", "tp2-cp2"]
)
def test_all_ranks_train_the_iterations_that_are_not_skipped(tmp_path: Path, case: Case) -> None:
    path = write_documents(tmp_path / "corpus")
    for whole, *ways in run(trained_job, case.tp * case.pp * case.cp, path, case):
        assert [*whole] == list(range(STEPS))
        for (skip, start, _), seen in zip(WAYS, ways):
            kept = [at for at in range(start, STEPS) if at + 1 not in skip]
            assert seen == {at: whole[at] for at in kept}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[mf.Feed]:
    path = write_documents(tmp_path / "corpus")
    with mf.Feed(gpt_recipe(path, STEPS * SEQUENCES, SEQUENCES)) as feed:
        yield feed


def followed(feed: mf.Feed, args: SimpleNamespace, start: int = 0) -> Any:
    feed.run(start)
    return megatron.data_iterators(feed, args=args, num_microbatches=lambda: COUNT)


def test_a_schedule_that_takes_more_than_a_step_has_is_refused(alone: mf.Feed) -> None:
    iterator = followed(alone, arguments())
    for _ in range(COUNT):
        next(iterator)
    with pytest.raises(
        RecipeError, match=r"iteration 0 .* step 1 of the data comes next: the schedule takes more"
    ):
        next(iterator)


@pytest.mark.parametrize(("start", "now"), [(0, 3), (3, 0)])
def test_a_feed_that_begins_at_another_iteration_is_refused(alone: mf.Feed, start: int, now: int) -> None:
    iterator = followed(alone, arguments(curr_iteration=now), start)
    with pytest.raises(RecipeError, match=rf"iteration {now} .* step {start} of the data"):
        next(iterator)
    iterator = followed(alone, arguments(curr_iteration=now), start)
    with pytest.raises(RecipeError, match=rf"iteration {now} .* step {start} of the data"):
        megatron.begin(iterator)


def test_begin_goes_to_megatrons_iteration(alone: mf.Feed) -> None:
    args = arguments(iterations_to_skip=[1, 2])
    iterator = followed(alone, args)
    args.curr_iteration = 2
    assert megatron.begin(iterator).index == 2
    with pytest.raises(RecipeError, match="begin one step in each iteration"):
        megatron.begin(iterator)


@pytest.mark.parametrize("name", ["virtual_pipeline_model_parallel_size", "hybrid_context_parallel"])
def test_what_megatron_cannot_skip_is_refused(alone: mf.Feed, name: str) -> None:
    with pytest.raises(RecipeError, match=f"iterations_to_skip=.* with {name}=2"):
        followed(alone, arguments(iterations_to_skip=[4], **{name: 2}))


def test_arguments_without_an_iteration_are_refused(alone: mf.Feed) -> None:
    args = arguments()
    del args.curr_iteration
    with pytest.raises(RecipeError, match="args has no curr_iteration"):
        next(followed(alone, args))


def test_iterators_that_do_not_follow_a_loop_with_skips_are_refused(
    alone: mf.Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = SimpleNamespace(_GLOBAL_ARGS=arguments(iterations_to_skip=[4]))
    monkeypatch.setitem(iterations.sys.modules, "megatron.training.global_vars", variables)
    with pytest.raises(RecipeError, match=r"skips iterations \[4\]"):
        megatron.data_iterators(alone)
    variables._GLOBAL_ARGS.iterations_to_skip = []
    assert isinstance(megatron.data_iterators(alone), megatron.StageIterator)


def test_zeros_have_what_other_ranks_expect() -> None:
    made = iterations.zeros(arguments(micro_batch_size=2, dataloader_inter_document_masking=True))
    assert "attention_mask" not in made
    assert made["cu_seqlens"].tolist() == [[0, LENGTH]] * 2
    assert made["max_seqlen"].tolist() == [LENGTH] * 2
    assert all(not made[name].any() and made[name].shape == (2, LENGTH) for name in ("tokens", "loss_mask"))
    assert np.dtype(np.int32) == made["cu_seqlens"].numpy().dtype
