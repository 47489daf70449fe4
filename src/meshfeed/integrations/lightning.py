"""Lightning: a data module whose train loader resumes, and whose other loaders never do.

A batch of Lightning's is a microbatch, so that `accumulate_grad_batches` (which must be the number of
microbatches of a step) keeps its meaning, and gradients are synchronised once a step. What Lightning has
fetched ahead is not trained: the state is counted by the trainer's own progress.

    data = DataModule(train=recipe, validate=other, micro_batch_size=2)
    Trainer(max_steps=1000, accumulate_grad_batches=4).fit(model, datamodule=data, ckpt_path="last")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from meshfeed.batch import Step
from meshfeed.errors import RecipeError
from meshfeed.feed import Feed
from meshfeed.integrations.loader import BatchOf, EvalLoader, TrainLoader, check_state, framework
from meshfeed.layout import Layout
from meshfeed.recipe import Recipe

_MESH_NAMES = {"data_parallel": "dp", "tensor_parallel": "tp"}  # of Lightning's ModelParallelStrategy

Recipes = Recipe | Sequence[Recipe]


class _Data:
    """A LightningDataModule of recipes; made into one by `DataModule`.

    train, validate, test, predict: what to read in each role; validate, test and predict may be several.
    layout: where the ranks stand; None for the strategy's device mesh, or data parallelism alone.
    batch_of: a microbatch -> what the LightningModule is handed; its fields by name where it is not given.
    steps_per_epoch: optimizer steps in an epoch of Lightning's; None for the whole stream.
    feed_options: further arguments of `Feed`, for every role: micro_batch_size, packing, delivery, ...

    A module goes on where it stood when it is given to a trainer again; make a new one to begin anew.
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
        self._recipes = {"train": train, "validate": validate, "test": test, "predict": predict}
        self._layout, self._batch_of, self._steps_per_epoch = layout, batch_of, steps_per_epoch
        self._feed_options = feed_options
        self._loader: TrainLoader | None = None
        self._state: dict[str, Any] | None = None

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
            self._loader = TrainLoader(
                self._feed(train),
                self._batch_of,
                steps_per_epoch=self._steps_per_epoch,
                accumulated=self._accumulated,
                trained=lambda: self.trainer.fit_loop.epoch_loop.batch_progress.total.processed,
            )
            if self._state is not None:
                self._loader.load_state_dict(self._state)
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
        """Where training stands, for Lightning's checkpoint; {} before it began."""
        return (self._loader.state_dict() if self._loader is not None else self._state) or {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on training there. A checkpoint that is loaded to validate, test or predict changes nothing."""
        train = self._recipes["train"]
        if state_dict and isinstance(train, Recipe) and self.trainer.state.fn == "fit":
            check_state(state_dict, train)
            self._state = dict(state_dict)

    def teardown(self, stage: str) -> None:
        """Keep the place and let go of files and peers. A run that only tries the code out moves nothing."""
        if self._loader is not None and stage == "fit":
            if not self.trainer.fast_dev_run:
                self._state = self._loader.state_dict()
            self._loader.close()
            self._loader = None

    def _evaluated(self, role: str) -> list[EvalLoader]:
        recipes = self._recipes[role] or ()
        several = [recipes] if isinstance(recipes, Recipe) else recipes
        return [EvalLoader(self._feed(recipe), self._batch_of) for recipe in several]

    def _feed(self, recipe: Recipe) -> Feed:
        strategy = self.trainer.strategy
        mesh = getattr(strategy, "device_mesh", None)
        layout = self._layout
        if layout is None and mesh is not None:
            layout = Layout.from_device_mesh(mesh, names=_MESH_NAMES)
        options = {"device": strategy.root_device, **self._feed_options}
        return Feed(recipe, layout or Layout(dp=self.trainer.world_size), self.trainer.global_rank, **options)

    def _accumulated(self) -> int | None:
        by_hand = not self.trainer.lightning_module.automatic_optimization
        return None if by_hand or self.trainer.fast_dev_run else self.trainer.accumulate_grad_batches


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
