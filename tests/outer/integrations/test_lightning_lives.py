"""Lives of a Lightning job: wherever a run began, was saved and ended, the next one trains the recipe's steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lives import SEQUENCES, Linear, Truth, sizes, truths

import loops
import meshfeed as mf
from meshfeed.integrations.lightning import DataModule
from soak import cases, some

STEPS = 14


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Run(NamedTuple):
    """One fit of a job."""

    size: int = 2  # sequences of a microbatch
    epoch: tuple[str, int] = ("none", 0)  # its option, and steps
    steps: int = 3  # trained before it ends by max_steps
    breaks: int | None = None  # batches before an error ends it, perhaps within a step
    checks: int | None = None  # batches between validations; None after epochs
    begins: str = "saved"  # in a new process from a checkpoint; or "same" trainer, or "carried" to a new one
    back: int = 0  # which checkpoint, from the newest


runs = st.builds(
    Run,
    size=sizes,
    epoch=st.tuples(st.sampled_from(["none", "limit", "steps_per_epoch"]), st.integers(1, 4)),
    steps=st.integers(1, 4),
    breaks=st.none() | st.integers(0, 12),
    checks=st.sampled_from([None, 1, 3]),
    begins=st.sampled_from(["saved", "saved", "saved", "same", "carried"]),
    back=st.integers(0, 20),
)


class Broken(Exception):
    """What ends a run."""


def module() -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Linear()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            step = self.trainer.datamodule.step
            loss = self.model(batch["tokens"], batch["labels"], batch["loss_mask"])
            return loss * step.num_microbatches / step.valid_tokens

        def validation_step(self, batch: Any, index: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return self.model.optimizer()

    return Module()


class Job:
    """A job over all its runs, in one process: what it has trained, and its checkpoints."""

    def __init__(self, recipe: mf.Recipe, out: Path, truth: Truth) -> None:
        self.recipe, self.out, self.truth = recipe, out, truth
        self.saved: list[tuple[Path, int, int]] = []  # steps before its trainer's, and its trainer's
        self.base, self.ends = 0, list[int]()
        self.trainer = self.module = self.data = self.watch = None
        self.size, self.epoch = SEQUENCES, ("none", 0)
        self.saves = True

    def run(self, run: Run) -> None:
        """One fit, and where its epochs ended."""
        begins, start, self.ends = run.begins if self.trainer else "saved", None, []
        done = self.trainer.global_step if self.trainer else 0
        if begins == "saved":
            start, self.base, done = (
                self.saved[-1 - run.back % len(self.saved)] if self.saved else (None, 0, 0)
            )
            self.size, self.epoch = run.size, run.epoch
            self.module, self.data = module(), self.data_of()
        if begins == "carried":
            self.base, done = self.base + done, 0
        if begins != "same":
            self.watch = watch(self)
            self.trainer = self.trainer_of(run.checks)
        self.watch.left = run.breaks
        most = min(done + run.steps, len(self.truth.given) - self.base)
        self.trainer.fit_loop.epoch_loop.max_steps = most
        try:
            self.trainer.fit(self.module, datamodule=self.data, ckpt_path=start)
        except Broken:
            pass
        else:
            assert self.trainer.global_step == most
        kind, epoch = self.epoch
        last = self.base + most
        if not (kind == "steps_per_epoch" and len(self.truth.given) < STEPS):  # those count what is left out
            assert all(end == last or (kind != "none" and end % epoch == 0) for end in self.ends), self.ends

    def data_of(self) -> DataModule:
        kind, epoch = self.epoch
        per_epoch = {"steps_per_epoch": epoch} if kind == "steps_per_epoch" else {}
        valid = replace(self.recipe, epochs=1, steps=1)
        return DataModule(self.recipe, valid, micro_batch_size=self.size, **per_epoch)

    def trainer_of(self, checks: int | None) -> Any:
        import lightning.pytorch as pl

        kind, epoch = self.epoch
        each = SEQUENCES // self.size
        limit = {"limit_train_batches": epoch * each} if kind == "limit" else {}
        every = {} if checks is None else {"check_val_every_n_epoch": None, "val_check_interval": checks}
        return pl.Trainer(
            accelerator="cpu",
            default_root_dir=self.out,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            accumulate_grad_batches=each,
            callbacks=[self.watch],
            max_steps=STEPS,
            **limit,
            **every,
        )


def watch(job: Job) -> Any:
    """A callback that compares every step, saves in every hook, and breaks."""
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        left: int | None = None  # batches before it breaks

        def save(self, trainer: Any, *_: Any) -> None:
            if not job.saves:
                return
            path = job.out / f"{len(job.saved)}.ckpt"
            trainer.save_checkpoint(path)
            job.saved.append((path, job.base, trainer.global_step))

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            done = job.base + trainer.global_step
            job.truth.check(module, job.truth.given[done - 1] if done else -1)
            self.save(trainer)
            self.left = None if self.left is None else self.left - 1
            if self.left == 0:
                raise Broken

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            job.ends.append(job.base + trainer.global_step)
            self.save(trainer)

        on_train_batch_start = on_validation_start = on_validation_end = save
        on_train_start = on_train_epoch_start = on_train_end = save

    return Watch()


EPOCHS = [
    ("none", 0),
    ("limit", 1),
    ("limit", 2),
    ("limit", 3),
    ("steps_per_epoch", 2),
    ("steps_per_epoch", 3),
]


@some(5)
@pytest.mark.parametrize("now", EPOCHS, ids=str)
@pytest.mark.parametrize("then", EPOCHS, ids=str)
@pytest.mark.parametrize("begun", range(4))
def test_a_checkpoint_of_any_hook_goes_on_under_any_epoch(
    truth: Truth, tmp_path: Path, begun: int, then: tuple[str, int], now: tuple[str, int]
) -> None:
    """Of a run that began at the start, within an epoch or at its end; the next one accumulates as many, or twice as
    many batches."""
    job = Job(truth.recipe, tmp_path, truth)
    if begun:
        job.run(Run(4, then, steps=begun))
        at_end = [path for path, _, steps in job.saved if steps == begun]
        job.saved = [(at_end[0], 0, begun)]  # of the hook at the end of the last batch
    job.run(Run(4, then, steps=3))
    job.saves = False
    for back in range(len(job.saved)):
        job.run(Run(4 - back % 2 * 2, now, steps=3, back=back))


@settings(max_examples=cases(15, 300), deadline=None)
@given(life=st.lists(runs, min_size=2, max_size=4), skips=st.booleans())
def test_lives(
    whole_and_not: list[Truth], tmp_path_factory: pytest.TempPathFactory, life: list[Run], skips: bool
) -> None:
    truth = whole_and_not[skips]
    job = Job(truth.recipe, tmp_path_factory.mktemp("life"), truth)
    for run in life:
        job.run(run)


@pytest.fixture(scope="module")
def whole_and_not(corpus: str) -> list[Truth]:
    return truths(loops.recipe(corpus), STEPS)


@pytest.fixture(scope="module")
def truth(whole_and_not: list[Truth]) -> Truth:
    return whole_and_not[0]
