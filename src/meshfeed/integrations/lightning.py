"""Lightning: a data module whose train loader resumes, and whose other loaders never do.

A batch of Lightning's is a microbatch, so that `accumulate_grad_batches` (which must be the number of
microbatches of a step) keeps its meaning, and gradients are synchronised once a step. What Lightning has
fetched ahead is not trained: the state is counted by the trainer's own progress.

Within a step the weights are still those of its beginning, so that is where a checkpoint that was saved there
goes on: the trainer's progress is put back by the microbatches whose gradients were lost.

    data = DataModule(train=recipe, validate=other, micro_batch_size=2)
    Trainer(max_steps=1000, accumulate_grad_batches=4).fit(model, datamodule=data, ckpt_path="last")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from meshfeed.errors import RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Step
from meshfeed.integrations.loader import (
    BatchOf,
    EvalLoader,
    Settings,
    TrainLoader,
    at_step_start,
    check_options,
    check_state,
    framework,
    num_microbatches,
    state_at,
)
from meshfeed.layout import Layout
from meshfeed.recipe import Recipe

_MESH_NAMES = {"data_parallel": "dp", "tensor_parallel": "tp"}  # of Lightning's ModelParallelStrategy
_SETTINGS = Settings(
    accumulated="accumulate_grad_batches",
    epoch="steps_per_epoch=..., or limit_train_batches a multiple of accumulate_grad_batches",
)

_OWN = {"recipe": "train, validate, test or predict", "rank": "the Trainer"}
_LIMITS = {
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}  # a whole number of batches, or what share of them

Recipes = Recipe | Sequence[Recipe]


class _Data:
    """A LightningDataModule of recipes; made into one by `DataModule`.

    train, validate, test, predict: what to read in each role; validate, test and predict may be several.
    layout: where the ranks stand; None for the strategy's device mesh, or data parallelism alone.
    batch_of: a microbatch -> what the LightningModule is handed; its fields by name where it is not given.
    steps_per_epoch: optimizer steps in an epoch of Lightning's; None for the whole stream.
    feed_options: further arguments of `Feed`, for every role: micro_batch_size, packing, delivery, ...

    A module resumes where it stood when it is given to a trainer again; make a new one to start again.
    """

    trainer: Any

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
        check_options(feed_options, _OWN, "DataModule")
        self._recipes = {"train": train, "validate": validate, "test": test, "predict": predict}
        self._layout, self._batch_of, self._steps_per_epoch = layout, batch_of, steps_per_epoch
        self._feed_options = feed_options
        self._loader: TrainLoader | None = None
        self._state: dict[str, Any] | None = None
        self._evaluating: list[Feed] = []
        self._num_lost = 0  # microbatches that a checkpoint has counted, and whose gradients it has not

    @property
    def step(self) -> Step | None:
        """The step that is being trained: its index, valid_tokens, stats; None outside of fit."""
        return self._loader.step if self._loader is not None else None

    def train_dataloader(self) -> TrainLoader:
        """The training stream, from where the checkpoint was taken."""
        train = self._recipes["train"]
        if not isinstance(train, Recipe):
            raise RecipeError(f"fit needs one recipe: DataModule(train=recipe), not {type(train).__name__}")
        if self._loader is None:
            feed = self._feed(train)
            progress = self._put_back()
            self._loader = _Loader(
                feed,
                self._batch_of,
                steps_per_epoch=self._steps_per_epoch,
                accumulated=self._accumulated,
                trained=lambda: progress.total.processed,
                settings=_SETTINGS,
            )
            self._loader.resumes = lambda: self.trainer.fit_loop.restarting
            if self._state is not None:
                check_state(self._state, train)
                self._loader.load_state_dict(self._state)
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
        """Where training stands, for Lightning's checkpoint; {} outside of fit before it began.

        Raises StateError within a step under manual optimization: the weights may be no longer those of its
        beginning.
        """
        if self._loader is None:
            train, run = self._recipes["train"], self.trainer and self.trainer.state.fn
            if self._state is None and isinstance(train, Recipe) and run == "fit":
                return state_at(train, 0)
            return self._state or {}
        state = self._loader.state_dict()
        step, done = at_step_start(state)
        if done and self._by_hand:
            raise StateError(
                f"a checkpoint after {done} microbatches of step {step['step']}, under manual optimization: "
                f"what of it is in the weights is not known; save between steps (every_n_train_steps)"
            )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on training there. A checkpoint that is loaded to validate, test or predict changes nothing."""
        train = self._recipes["train"]
        if state_dict and isinstance(train, Recipe) and self.trainer.state.fn == "fit":
            state, num_lost = at_step_start(state_dict)
            check_state(state, train)
            self._state, self._num_lost = state, num_lost
            # amid a fit, as lr_find puts things back: the next loader begins there
            if self._loader is not None:
                self._loader.close()
                self._loader = None

    def teardown(self, stage: str) -> None:
        """Keep the place and let go of files and peers. A run that only tries the code out moves nothing."""
        self._let_go()

    def on_exception(self, exception: BaseException) -> None:
        """The same where a run fails: another one resumes at the first step that is not wholly trained."""
        self._let_go(exception)

    def _let_go(self, during: BaseException | None = None) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            if not self.trainer.fast_dev_run:
                state = loader.state_dict()
                self._state = state if self._by_hand else at_step_start(state)[0]
            loader.close(during)
        while self._evaluating:  # a pass that was left midway has its feed open
            self._evaluating.pop().__exit__(None, during, None)

    def _check_limit(self, loader: TrainLoader) -> None:
        """Refuse an epoch that would end within a step: Lightning would take one of fewer sequences."""
        limit, each = self.trainer.limit_train_batches, self._accumulated()
        if isinstance(limit, float) and limit != 1.0:
            raise RecipeError(
                f"limit_train_batches={limit}: a share of a stream is no epoch; give a whole number, a "
                f"multiple of accumulate_grad_batches, or DataModule(steps_per_epoch=...)"
            )
        if isinstance(limit, float) or each is None or limit % each == 0:
            return
        with contextlib.suppress(TypeError):  # endless: any limit ends it
            if limit >= len(loader):
                return
        raise RecipeError(
            f"limit_train_batches={limit}: a step is {each} microbatches (accumulate_grad_batches), and the "
            f"last of the epoch would have {limit % each}; give {limit // each * each or each} or another "
            f"multiple"
        )

    def _check_max_steps(self, loader: TrainLoader) -> None:
        """Refuse at the start what `_Loader` would refuse at the end of the stream."""
        trainer, left = self.trainer, loader.num_left
        if left is None or trainer.max_epochs != -1 or self._by_hand or trainer.fast_dev_run:
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
        feeds = [self._feed(recipe) for recipe in several]
        limit = _LIMITS[role]
        if isinstance(getattr(self.trainer, limit), float) and any(feed.num_steps is None for feed in feeds):
            raise RecipeError(
                f"a stream to {role} never ends; give its recipe epochs=1 or steps=..., or the Trainer "
                f"{limit}=, a whole number"
            )
        self._evaluating += feeds
        return [EvalLoader(feed, self._batch_of) for feed in feeds]

    def _feed(self, recipe: Recipe) -> Feed:
        if self.trainer.overfit_batches:
            raise RecipeError(
                f"overfit_batches={self.trainer.overfit_batches}: a stream goes on from epoch to epoch, and "
                f"does not repeat its beginning; leave it out, and overfit a corpus of so few sequences"
            )
        strategy = self.trainer.strategy
        mesh = getattr(strategy, "device_mesh", None)
        layout = self._layout
        if layout is None and mesh is not None:
            layout = Layout.from_device_mesh(mesh, names=_MESH_NAMES)
        options = {"device": strategy.root_device, **self._feed_options}
        return Feed(recipe, layout or Layout(dp=self.trainer.world_size), self.trainer.global_rank, **options)

    @property
    def _by_hand(self) -> bool:
        return not self.trainer.lightning_module.automatic_optimization

    def _accumulated(self) -> int | None:
        takes_any = self._by_hand or self.trainer.fast_dev_run
        return None if takes_any else self.trainer.accumulate_grad_batches

    def _put_back(self) -> Any:
        """The trainer's progress in batches, without those whose gradients were lost."""
        progress, lost = self.trainer.fit_loop.epoch_loop.batch_progress, self._num_lost
        self._num_lost = 0
        for count in (progress.total, progress.current) if lost else ():
            count.ready = count.started = count.completed = count.processed = count.processed - lost
        return progress


class _Loader(TrainLoader):
    """Lightning keeps the states of loaders too: the data module's, which has put back what was lost.

    It would go through empty epochs for ever, so none begins after the end of the stream. A run that is
    resumed there may find that it has no more to do.
    """

    resumes: Callable[[], bool]

    def __iter__(self) -> Iterator[Any]:
        if self.has_ended and not self.resumes():
            raise RecipeError(
                f"the stream has ended after {self._feed.num_steps} steps, and another epoch would be empty; "
                f"end the training there (max_steps or max_epochs), or give the recipe more (epochs=, steps=)"
            )
        return super().__iter__()

    def __len__(self) -> int:
        if self._steps_per_epoch is None and not self.resumes():  # of the stream, Lightning counts the rest
            return num_microbatches(self._feed, self._position(), self._feed.num_steps)
        return super().__len__()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(at_step_start(state_dict)[0])


if TYPE_CHECKING:
    DataModule = _Data


def __getattr__(name: str) -> Any:
    if name != "DataModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _data_module()


@cache
def _data_module() -> type:
    """The class, made when it is first asked for: Lightning itself takes seconds to import."""
    base = framework("lightning.pytorch", "lightning").LightningDataModule
    return type("DataModule", (_Data, base), {"__module__": __name__, "__doc__": _Data.__doc__})
