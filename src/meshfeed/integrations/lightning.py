"""Lightning: a data module whose train loader resumes, and whose other loaders never do.

A Lightning batch is a microbatch. `accumulate_grad_batches` must equal the microbatches of a step, so
gradients are synchronised once a step. Lightning fetches batches before it trains them, so the state follows
the trainer's own progress.

Weights do not change within a step. So a checkpoint saved within a step resumes at the beginning of that
step. Lightning accumulates by its own count of an epoch's batches, and ends epochs by it. When a fit begins,
this count is set to what the recipe says of the position, whatever a checkpoint has; at every batch it is
compared. So a run may resume with another `accumulate_grad_batches`, or with epochs of another length.

    data = DataModule(train=recipe, validate=other, micro_batch_size=2)
    Trainer(max_steps=1000, accumulate_grad_batches=4).fit(model, datamodule=data, ckpt_path="last")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshfeed.errors import LayoutError, RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Step
from meshfeed.integrations.loader import (
    BatchOf,
    EvalLoader,
    Settings,
    TrainLoader,
    check_feed_options,
    for_evaluation,
    framework,
    num_given,
    num_microbatches,
    refuse_options,
)
from meshfeed.layout import Layout
from meshfeed.recipe import Recipe
from meshfeed.state import State

CONFIG_FIELDS: dict[str, str] = {
    "accumulate_grad_batches": "honoured: microbatches of a step, which must be those of the recipe",
    "max_steps": "honoured: refused beyond the end of the stream",
    "max_epochs": "honoured: an epoch is the stream, DataModule(steps_per_epoch=) or limit_train_batches",
    "limit_train_batches": "honoured: an integer, a multiple of accumulate_grad_batches; others are refused",
    "limit_val_batches": "honoured: an endless set needs an integer",
    "limit_test_batches": "honoured: an endless set needs an integer",
    "limit_predict_batches": "honoured: an endless set needs an integer",
    "val_check_interval": "honoured: by the Trainer; a share needs an epoch with a length",
    "check_val_every_n_epoch": "honoured: by the Trainer",
    "num_sanity_val_steps": "honoured: the validation after it begins at the start again",
    "fast_dev_run": "honoured: takes any number of microbatches, and keeps the position",
    "strategy": "honoured: its device mesh is the layout; DataModule(layout=) overrides it",
    "devices": "honoured: ranks of the layout",
    "num_nodes": "honoured: ranks of the layout",
    "overfit_batches": "refused: a stream does not repeat its first batches; train on a small corpus",
    "reload_dataloaders_every_n_epochs": "refused: each epoch continues where the last one ended",
    "use_distributed_sampler": "no effect on data: Lightning inserts no sampler; each rank gets its own data",
    "min_epochs": "no effect on data: a stream does not end earlier or later",
    "min_steps": "no effect on data: a stream does not end earlier or later",
    "max_time": "no effect on data: the next run continues where this one stopped",
}
"""How each option of Lightning's Trainer that concerns data is treated."""
_MESH_NAMES = {"data_parallel": "dp", "tensor_parallel": "tp"}  # of Lightning's ModelParallelStrategy
_SETTINGS = Settings(
    accumulated="accumulate_grad_batches",
    epoch="steps_per_epoch=..., or limit_train_batches a multiple of accumulate_grad_batches",
)
_REFUSED = [name for name, told in CONFIG_FIELDS.items() if told.startswith("refused: ")]

Recipes = Recipe | Sequence[Recipe]


_Base: Any = framework("lightning.pytorch", "lightning").LightningDataModule
_BatchSizeFinder: Any = framework("lightning.pytorch.callbacks", "lightning").BatchSizeFinder


class DataModule(_Base):
    """A LightningDataModule of recipes.

    train, validate, test, predict: the recipe of each role; validate, test and predict also take a list.
    layout: of all ranks; None takes the strategy's device mesh, or plain data parallelism.
    batch_of: microbatch -> the batch that the LightningModule gets; by default a dict of its fields.
    steps_per_epoch: optimizer steps in a Lightning epoch; None for the whole stream.
    feed_options: other arguments of `Feed`, for every role: micro_batch_size, packing, delivery, ... ledger
        and metrics are of training alone.

    Given to another trainer, a module resumes where it stopped; make a new one to start from the beginning.
    """

    def __init__(
        self,
        train: Recipe | None = None,
        validate: Recipes | None = None,
        test: Recipes | None = None,
        predict: Recipes | None = None,
        *,
        layout: Layout | None = None,
        batch_of: BatchOf = dict,
        steps_per_epoch: int | None = None,
        **feed_options: Any,
    ) -> None:
        super().__init__()
        check_feed_options("DataModule()", feed_options)  # now, not when the Trainer first asks for a loader
        self._recipes = {"train": train, "validate": validate, "test": test, "predict": predict}
        self._layout, self._batch_of, self._steps_per_epoch = layout, batch_of, steps_per_epoch
        self._feed_options = feed_options
        self._loader: _Loader | None = None
        self._state: dict[str, Any] | None = None
        self._evaluating: list[Feed] = []
        self._cut: str | None = None  # why the next fit cannot go on from the last one

    @property
    def step(self) -> Step | None:
        """The step in training, with its index, valid_tokens and stats; None outside fit."""
        return self._loader.step if self._loader is not None else None

    def train_dataloader(self) -> TrainLoader:
        """The training stream, from the checkpoint on."""
        train = self._recipes["train"]
        if not isinstance(train, Recipe):
            raise RecipeError(f"fit needs one recipe: DataModule(train=recipe), not {type(train).__name__}")
        if self._loader is None:
            if self._cut is not None:
                raise StateError(self._cut)
            self._loader = _Loader(
                self.trainer,
                self._feed(train, self._feed_options),
                self._batch_of,
                steps_per_epoch=self._steps_per_epoch,
                accumulated=self._accumulated,
                state=self._state,
            )
            if not self.trainer.fast_dev_run:
                self._loader.align()
            self._check_limit(self._loader)
            self._check_max_steps(self._loader)
        return self._loader

    def val_dataloader(self) -> list[EvalLoader]:
        """The validation sets, each from its beginning."""
        return self._evaluated("validate")

    def test_dataloader(self) -> list[EvalLoader]:
        """The test sets, each from its beginning."""
        return self._evaluated("test")

    def predict_dataloader(self) -> list[EvalLoader]:
        """The sets to predict, each from its beginning."""
        return self._evaluated("predict")

    def state_dict(self) -> dict[str, Any]:
        """The position of training, for Lightning's checkpoint; {} outside fit before it began.

        Raises StateError within a step under manual optimization, which may have changed the weights since
        the beginning of the step.
        """
        if self._loader is None:
            train, run = self._recipes["train"], self.trainer and self.trainer.state.fn
            if self._state is None and isinstance(train, Recipe) and run == "fit":
                return State.at(train, 0).to_json()
            if self._cut is not None:
                raise StateError(self._cut)
            return self._state or {}
        if cut := self._loader.cut:
            raise StateError(cut)
        self._loader.compare()
        return self._loader.saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume training there. A checkpoint loaded to validate, test or predict changes nothing."""
        if state_dict and isinstance(self._recipes["train"], Recipe) and self.trainer.state.fn == "fit":
            self._state, self._cut = dict(state_dict), None
            # during a fit, as lr_find restores its start: the next loader begins there
            if self._loader is not None:
                self._loader.close()
                self._loader = None

    def setup(self, stage: str) -> None:
        """Raises RecipeError for a search of a batch size, which removes itself before it asks for data."""
        if any(isinstance(each, _BatchSizeFinder) for each in self.trainer.callbacks):
            raise RecipeError(
                "BatchSizeFinder, or Tuner.scale_batch_size, would change a batch_size without effect on a "
                "mf.Recipe; try DataModule(micro_batch_size=): its product with the data-parallel ranks and "
                "accumulate_grad_batches is the recipe's sequences per step"
            )

    def teardown(self, stage: str) -> None:
        """Keep the position and close files and connections. A fast_dev_run keeps the old position."""
        try:
            if self._loader is not None:
                self._loader.compare()
        finally:
            self._let_go()

    def on_exception(self, exception: BaseException) -> None:
        """As `teardown`, after an error: the next run resumes at the first step that is not fully trained."""
        self._let_go(exception)

    def _let_go(self, during: BaseException | None = None) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            if not self.trainer.fast_dev_run:
                self._state, self._cut = loader.saved, loader.cut
            loader.close(during)
        while self._evaluating:  # an unfinished pass leaves its feed open
            self._evaluating.pop().__exit__(None, during, None)

    def _check_limit(self, loader: TrainLoader) -> None:
        """Refuse an epoch that ends within a step: Lightning would train on part of the step."""
        limit, each = self.trainer.limit_train_batches, self._accumulated()
        if isinstance(limit, float) and limit != 1.0:
            raise RecipeError(
                f"limit_train_batches={limit}: an epoch cannot be a share of a stream; give a multiple of "
                f"accumulate_grad_batches, or DataModule(steps_per_epoch=...)"
            )
        whole = (self._steps_per_epoch or 0) * (each or 0)
        is_one = self.trainer.max_epochs == 1 or 0 <= self.trainer.max_steps * (each or 0) <= limit
        if not isinstance(limit, float) and limit < whole and not is_one:
            raise RecipeError(
                f"limit_train_batches={limit} is less than the {whole} microbatches of steps_per_epoch="
                f"{self._steps_per_epoch}, and epochs would end at one or the other; give one of them"
            )
        if isinstance(limit, float) or each is None or limit % each == 0:
            return
        with contextlib.suppress(TypeError):  # an endless stream has no length
            if limit >= len(loader):
                return
        raise RecipeError(
            f"limit_train_batches={limit}: a step is {each} microbatches (accumulate_grad_batches), and the "
            f"last of the epoch would have {limit % each}; give {limit // each * each or each} or another "
            f"multiple"
        )

    def _check_max_steps(self, loader: TrainLoader) -> None:
        """Refuse max_steps beyond the end of the stream now, before training reaches that end."""
        trainer, left = self.trainer, loader.num_left
        if left is None or trainer.max_epochs != -1 or self._manual or trainer.fast_dev_run:
            return
        if trainer.max_steps > trainer.global_step + left:
            raise RecipeError(
                f"max_steps={trainer.max_steps}, {trainer.global_step} of them done, but the stream has only "
                f"{left} more; set max_steps={trainer.global_step + left}, or give the recipe more "
                f"(epochs=, steps=)"
            )

    def _evaluated(self, role: str) -> list[EvalLoader]:
        recipes = self._recipes[role] or ()
        if not recipes and self.trainer.state.fn == role:
            raise RecipeError(f"{role} needs a recipe: DataModule({role}=recipe), or a list of them")
        several = [recipes] if isinstance(recipes, Recipe) else recipes
        feeds = [self._feed(recipe, for_evaluation(self._feed_options, recipe)) for recipe in several]
        limit = f"limit_{role.replace('validate', 'val')}_batches"  # a whole number, or a share
        if isinstance(getattr(self.trainer, limit), float) and any(feed.num_steps is None for feed in feeds):
            raise RecipeError(
                f"a stream to {role} never ends; give its recipe epochs=1 or steps=..., or the Trainer "
                f"{limit}=, a whole number"
            )
        self._evaluating += feeds
        return [EvalLoader(feed, self._batch_of) for feed in feeds]

    def _feed(self, recipe: Recipe, options: Mapping[str, Any]) -> Feed:
        without_effect = {name: getattr(self.trainer, name) for name in _REFUSED}
        refuse_options({name: value for name, value in without_effect.items() if value}, CONFIG_FIELDS)
        strategy = self.trainer.strategy
        mesh = getattr(strategy, "device_mesh", None)
        layout = self._layout
        if layout is None and mesh is not None:
            layout = Layout.from_device_mesh(mesh, names=_MESH_NAMES)
        elif layout is None:
            told: Any = getattr(strategy, "distributed_sampler_kwargs", {})
            ranks = self.trainer.world_size
            if (replicas := told.get("num_replicas", ranks)) != ranks:
                raise LayoutError(
                    f"{type(strategy).__name__} counts {replicas} replicas of {ranks} ranks, without a "
                    f"device_mesh that says who shares data; give DataModule(layout=)"
                )
            layout = Layout(dp=ranks)
        options = {"device": strategy.root_device, **options}
        return Feed(recipe, layout, self.trainer.global_rank, **options)

    @property
    def _manual(self) -> bool:
        return not self.trainer.lightning_module.automatic_optimization

    def _accumulated(self) -> int | None:
        takes_any = self._manual or self.trainer.fast_dev_run
        return None if takes_any else self.trainer.accumulate_grad_batches


class _Loader(TrainLoader):
    """The loader that Lightning iterates, and all that is known here of Lightning's counters.

    state: where training begins; None for the start of the stream.

    Lightning would repeat empty epochs forever, so no epoch begins after the end of the stream.
    """

    def __init__(
        self, trainer: Any, feed: Feed, batch_of: BatchOf, *, state: Mapping[str, Any] | None, **options: Any
    ) -> None:
        self._trainer, self._fit = trainer, trainer.fit_loop
        self._batches = self._fit.epoch_loop.batch_progress
        super().__init__(
            feed, batch_of, trained=lambda: self._batches.total.processed, settings=_SETTINGS, **options
        )
        if state is not None:
            super().load_state_dict(state)
        self._start = (self.position, trainer.global_step)

    def __iter__(self) -> Iterator[Any]:
        if self.num_left == 0 and not self._fit.done:
            raise RecipeError(
                f"the stream has ended after {self._feed.num_steps} steps, and another epoch would be empty; "
                f"end the training there (max_steps or max_epochs), or give the recipe more (epochs=, steps=)"
            )
        return self._compared()

    def _compared(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.compare()
            yield batch

    def __len__(self) -> int:
        first, at = self._first_of_epoch(), self.position
        before = num_microbatches(self._feed, first, at) if first < at else 0
        # as if all were of today's size
        return super().__len__() - before + num_given(self._feed, first, at) * self._each()

    @property
    def saved(self) -> dict[str, Any]:
        """The state at the start of the step in training."""
        return self._feed.state_dict(self.position)

    @property
    def cut(self) -> str | None:
        """Why nothing can go on from here; None if it can, as everywhere under automatic optimization."""
        if self._trainer.lightning_module.automatic_optimization or not (done := self.num_done):
            return None
        return (
            f"after {done} microbatches of step {self.position}, under manual optimization, it is unknown "
            f"which of them changed the weights; save between steps (every_n_train_steps)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module has the state. Lightning takes loaders without one for not resumable."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing; see `state_dict`."""

    def align(self) -> None:
        """Make the trainer's counters those of a run that goes on from this position, whatever they were.

        Within an epoch they are those of a checkpoint from the end of a batch: Lightning goes on with the
        next one. Elsewhere a fresh epoch begins.
        """
        loop, epochs, batches = self._fit.epoch_loop, self._fit.epoch_progress, self._batches
        steps, each = loop.automatic_optimization.optim_progress.optimizer.step, self._each()
        trained = self._trained_of_epoch()
        within, begun = int(trained > 0), epochs.current.started
        manual = not self._trainer.lightning_module.automatic_optimization
        has_trained = batches.current.processed if manual else steps.current.completed
        ended = max(begun - 1, 0) if within else begun if has_trained else epochs.current.processed
        total = batches.total.processed if manual else steps.total.completed * each
        _set(epochs.total, ended + within, ended)
        _set(epochs.current, ended + within, ended)
        _set(batches.total, total, total - within, processed=total)
        _set(batches.current, trained, trained - within, processed=trained)
        steps.current.ready = steps.current.completed = 0 if manual else trained // each
        batches.is_last_batch = False
        loop._batches_that_stepped = (total if manual else steps.total.completed) - within
        self._fit._restarting = loop.restarting = bool(within)
        loop.val_loop.restarting = False  # a validation begins at its beginning

    def compare(self) -> None:
        """Raises RecipeError if Lightning does not accumulate and step where the recipe's steps are."""
        each = self._accumulated()
        if each is None:
            return
        position, before = self._start
        taken, batches = self._trainer.global_step - before, self._batches.current.processed
        if (num_given(self._feed, position, self.position), self.num_done) != (taken, batches % each):
            raise RecipeError(
                f"step {self.position} of the recipe has {self.num_done} microbatches trained, but Lightning "
                f"has taken {taken} optimizer steps since step {position} and has accumulated "
                f"{batches % each} batches (accumulate_grad_batches={each}); leave its counters and epochs "
                f"to it: no hook may skip a batch, or change accumulate_grad_batches within a step"
            )

    def _each(self) -> int:
        """Microbatches of the next step, as the recipe has them."""
        return self._feed.num_microbatches(self.position) or self._trainer.accumulate_grad_batches

    def _first_of_epoch(self) -> int:
        at, size, end = self.position, self._steps_per_epoch, self._feed.num_steps
        return at if at == end else at // size * size if size else 0

    def _trained_of_epoch(self) -> int:
        """Microbatches of Lightning's epoch that were trained, counted as accumulated now."""
        trained = num_given(self._feed, self._first_of_epoch(), self.position) * self._each()
        limit = self._trainer.limit_train_batches
        return trained % limit if isinstance(limit, int) else trained


def _set(count: Any, ready: int, completed: int, *, processed: int | None = None) -> None:
    count.ready = count.started = ready
    count.processed, count.completed = completed if processed is None else processed, completed
