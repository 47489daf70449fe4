"""Lives of a loop on accelerate: however often it is saved and loaded, it takes the steps of the recipe."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lives import SEQUENCES, Linear, Truth, sizes, truths

import loops
import meshfeed as mf
import world
from meshfeed.integrations.accelerate import FeedLoader, layout_of
from soak import cases

STEPS = 12


class Run(NamedTuple):
    """One process of a job, or a part of one that goes back to a checkpoint."""

    size: int = 2  # sequences of a microbatch
    epoch: int | None = None  # steps
    batches: int = 9  # entered before it ends, perhaps within a step
    loads: bool = False  # in the process of the run before, if that run had the same size
    back: int = 0  # which checkpoint, from the newest
    evaluates: int = 3  # batches between evaluations by a DataLoader of accelerate's
    saves: int = 1  # batches between checkpoints


runs = st.builds(
    Run,
    size=sizes,
    epoch=st.none() | st.integers(1, 4),
    batches=st.integers(1, 24),
    loads=st.booleans(),
    back=st.integers(0, 30),
    evaluates=st.integers(1, 9),
    saves=st.integers(2, 7),
)


class Job:
    """What a job has saved, and its process."""

    def __init__(self, truth: Truth, out: Path) -> None:
        self.truth, self.out, self.num_saved, self.size = truth, out, 0, 0

    def start(self, run: Run) -> None:
        """A new process: everything is made again."""
        from accelerate import Accelerator

        loops.forget_accelerate()
        self.size = run.size
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=SEQUENCES // run.size)
        model = Linear()
        held_out = torch.utils.data.DataLoader([0, 1, 2])  # pyright: ignore[reportArgumentType]
        self.model, self.optimizer, self.held_out = self.accelerator.prepare(
            model, model.optimizer(), held_out
        )
        feed = mf.Feed(self.truth.recipe, micro_batch_size=run.size)
        self.loader = self.accelerator.prepare(FeedLoader(feed, self.accelerator, steps_per_epoch=run.epoch))
        self.accelerator.register_for_checkpointing(self.loader)

    def run(self, run: Run) -> None:
        # within a step, which a loop may end in, nothing goes on in one process without a checkpoint
        if not (run.loads and run.size == self.size and self.num_saved):
            self.start(run)
        if self.num_saved:
            self.accelerator.load_state(str(self.out / str(self.num_saved - 1 - run.back % self.num_saved)))
        left = run.batches
        while left > 0 and self.loader.num_left != 0:
            left = self.epoch(left, run)

    def epoch(self, left: int, run: Run) -> int:
        """The microbatches that are left, to the end of an epoch."""
        for batch in self.loader:
            if not left:  # the batch has been handed out, and is not trained
                break
            if left % run.saves == 0:
                self.save()
            with self.accelerator.accumulate(self.model):
                step = self.loader.step
                loss = self.model(batch["tokens"], batch["labels"], batch["loss_mask"])
                self.accelerator.backward(loss * step.num_microbatches / step.valid_tokens)
                self.optimizer.step()
                self.optimizer.zero_grad()
            left -= 1
            if self.accelerator.sync_gradients:
                self.truth.check(self.model, step.index)
            if left % run.evaluates == 0:
                list(self.held_out)
            if left % run.saves < 2:
                self.save()
            if not left:
                break
        return left

    def save(self) -> None:
        """A checkpoint, or a refusal within a step."""
        if done := self.loader.num_done:
            with pytest.raises(mf.errors.StateError, match=f"after {done} of .* after the optimizer's step"):
                self.loader.state_dict()
            return
        self.accelerator.save_state(str(self.out / str(self.num_saved)))
        self.num_saved += 1


@pytest.fixture(scope="module")
def whole_and_not(corpus: str) -> list[Truth]:
    return truths(loops.recipe(corpus, steps=STEPS), STEPS)


@pytest.fixture(scope="module")
def truth(whole_and_not: list[Truth]) -> Truth:
    return whole_and_not[0]


@settings(max_examples=cases(6, 300), deadline=None)
@given(life=st.lists(runs, min_size=2, max_size=5), skips=st.booleans())
def test_lives(
    whole_and_not: list[Truth], tmp_path_factory: pytest.TempPathFactory, life: list[Run], skips: bool
) -> None:
    job = Job(whole_and_not[skips], tmp_path_factory.mktemp("life"))
    for run in life:
        job.run(run)


def test_a_state_loads_with_another_accumulation(truth: Truth, tmp_path: Path) -> None:
    job = Job(truth, tmp_path)
    job.run(Run(size=2, batches=12))
    assert job.accelerator.step == 4  # of 12, which accelerate's own count would be
    job.run(Run(size=1, batches=16))
    assert job.loader.position == 5


@pytest.mark.parametrize(("times", "place"), [(0, 1), (2, 1)])
def test_a_batch_that_does_not_accumulate_once_is_refused(
    truth: Truth, tmp_path: Path, times: int, place: int
) -> None:
    job: Any = Job(truth, tmp_path)
    job.start(Run())
    told = f"microbatch {place} of 4 of step 0: the loop entered accelerator.accumulate {times} times"
    with pytest.raises(mf.errors.RecipeError, match=told):
        for _ in job.loader:
            for _ in range(times):
                with job.accelerator.accumulate(job.model):
                    pass


def test_accumulation_must_be_the_recipes(truth: Truth) -> None:
    from accelerate import Accelerator

    loops.forget_accelerate()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader = FeedLoader(mf.Feed(truth.recipe, micro_batch_size=2), accelerator)
    with pytest.raises(
        mf.errors.RecipeError, match=r"4 microbatches .* but gradient_accumulation_steps is 3"
    ):
        next(iter(loader))


def test_ranks_of_deepspeeds_tensor_parallelism_share_rows(truth: Truth) -> None:
    """For which accelerate has no ParallelismConfig; its own loaders take process_index // autotp_size."""
    config = {"tensor_parallel": {"autotp_size": 2}}
    accelerator = SimpleNamespace(num_processes=8, deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    layout = layout_of(accelerator)
    assert [layout.coord(rank).dp for rank in range(8)] == [rank // 2 for rank in range(8)]
    with pytest.raises(mf.errors.LayoutError, match=r"share rows .*give the feed layout_of\(accelerator\)"):
        FeedLoader(mf.Feed(truth.recipe, mf.Layout(dp=8), 0), accelerator)
    assert layout_of(SimpleNamespace(num_processes=8, deepspeed_plugin=None)) == mf.Layout(dp=8)


def test_ranks_of_megatron_lm_within_accelerate_are_refused() -> None:
    """Its plugin has their tp and pp; all of them were taken for data parallelism."""
    from accelerate import DistributedType

    accelerator = SimpleNamespace(num_processes=8, distributed_type=DistributedType.MEGATRON_LM)
    with pytest.raises(mf.errors.LayoutError, match=r"MegatronLMPlugin: .* use meshfeed\.integrations\.meg"):
        layout_of(accelerator)


def rows_of_a_tp_rank(rank: int, corpus: str) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ParallelismConfig._validate_accelerator = lambda *_: None  # it asks for GPUs
    config = ParallelismConfig(tp_size=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, parallelism_config=config)
    recipe = loops.recipe(corpus)
    for other in (mf.Layout(dp=2), mf.Layout(cp=2)):
        with pytest.raises(
            mf.errors.LayoutError, match=r"share rows .*give the feed layout_of\(accelerator\)"
        ):
            FeedLoader(mf.Feed(recipe, other, rank, micro_batch_size=2), accelerator)
    feed = mf.Feed(recipe, layout_of(accelerator), rank, micro_batch_size=2)
    return loops.rows(next(iter(FeedLoader(feed, accelerator)))["tokens"])


def test_ranks_of_a_tp_group_get_the_same_rows(corpus: str) -> None:
    first, second = world.run(rows_of_a_tp_rank, 2, corpus)
    assert first == second
