"""Lives of a FeedTrainer: wherever it is saved, ended and resumed, it takes the steps of the recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lives import SEQUENCES, Linear, Truth, sizes, truths

import loops
from meshfeed.integrations.transformers import FeedTrainer
from soak import cases

STEPS = 12


class Run(NamedTuple):
    """One call of train."""

    size: int = 2  # sequences of a microbatch
    steps: int = 3  # before it ends by max_steps
    saves: int = 1  # steps between checkpoints
    evaluates: int = 2  # steps between evaluations
    ends: str = "never"  # how else: an error, a stop of the training, a stop of its epoch
    at: int = 5  # the microbatch after which it does
    again: bool = False  # by the trainer of the run before, if that has the same size
    back: int = 0  # which checkpoint, from the newest


runs = st.builds(
    Run,
    size=sizes,
    steps=st.integers(1, 5),
    saves=st.integers(1, 3),
    evaluates=st.integers(1, 3),
    ends=st.sampled_from(["never", "error", "stop", "epoch"]),
    at=st.integers(1, 20),
    again=st.booleans(),
    back=st.integers(0, 5),
)


class Broken(Exception):
    """What ends a run."""


class Model(Linear):
    """Takes what transformers gives a causal model."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Any, shift_labels: Any, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        num = (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": super().forward(input_ids, shift_labels) / num}


class Job:
    """A job over all its runs."""

    def __init__(self, truth: Truth, out: Path) -> None:
        self.truth, self.out, self.trainer, self.size = truth, out, None, 0

    def run(self, run: Run) -> None:
        from transformers.trainer_utils import get_last_checkpoint

        saved = sorted(self.out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        for path in saved[len(saved) - run.back % len(saved) :] if saved else ():
            path.rename(self.out / f"lost-{path.name}-{len(list(self.out.iterdir()))}")
        start: Any = get_last_checkpoint(str(self.out))
        done = int(start.rpartition("-")[2]) if start else 0
        most = min(done + run.steps, len(self.truth.given))
        # without a checkpoint, a Trainer that trains again begins at step 0 with the weights that it has
        if self.trainer is None or not run.again or run.size != self.size or start is None:
            self.trainer, self.size = self.trainer_of(run), run.size
        self.trainer.args.max_steps = most
        self.watch.left, self.watch.ends = run.at, run.ends
        try:
            self.trainer.train(resume_from_checkpoint=start)
        except Broken:
            self.trainer = None  # its gradients and its process are gone
        else:
            assert self.trainer.state.global_step == most or run.ends == "stop"

    def trainer_of(self, run: Run) -> Any:
        from transformers import TrainingArguments

        args = TrainingArguments(
            str(self.out),
            max_steps=len(self.truth.given),
            per_device_train_batch_size=run.size,
            gradient_accumulation_steps=SEQUENCES // run.size,
            save_steps=run.saves,
            eval_strategy="steps",
            eval_steps=run.evaluates,
            max_grad_norm=0.0,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        model = Model()
        optimizer = model.optimizer()
        self.watch = watch(self)
        loops.forget_accelerate()
        return FeedTrainer(
            model,
            args,
            train_dataset=self.truth.recipe,
            eval_dataset=replace(self.truth.recipe, steps=1),
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            callbacks=[self.watch],
        )


def watch(job: Job) -> Any:
    """A callback that compares every step, and ends a run."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        left, ends = 0, "never"

        def count(self, control: Any) -> None:
            self.left -= 1
            if self.left == 0 and self.ends == "error":
                raise Broken
            control.should_training_stop |= self.left == 0 and self.ends == "stop"
            control.should_epoch_stop |= self.left == 0 and self.ends == "epoch"

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.count(control)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            job.truth.check(model, job.truth.given[state.global_step - 1])
            self.count(control)

    return Watch()


@pytest.fixture(scope="module")
def whole_and_not(corpus: str) -> list[Truth]:
    return truths(loops.recipe(corpus, steps=STEPS), STEPS)


@settings(max_examples=cases(8, 300), deadline=None)
@given(life=st.lists(runs, min_size=2, max_size=5), skips=st.booleans())
def test_lives(
    whole_and_not: list[Truth], tmp_path_factory: pytest.TempPathFactory, life: list[Run], skips: bool
) -> None:
    job = Job(whole_and_not[skips], tmp_path_factory.mktemp("life"))
    for run in life:
        job.run(run)
