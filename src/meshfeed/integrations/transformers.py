"""transformers: a Trainer whose train_dataset and eval_dataset are recipes.

A batch is a microbatch: `per_device_train_batch_size` rows, `gradient_accumulation_steps` of them a step, and
these two times the data-parallel ranks must be the recipe's sequences per step. accelerate neither shards nor
wraps the loaders, for they are rank by rank already.

    class MyTrainer(FeedTrainer, Trainer): ...

    MyTrainer(model, args, train_dataset=recipe, eval_dataset=other).train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from meshfeed.batch import Microbatch, Step
from meshfeed.errors import RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.integrations.loader import EvalLoader, TrainLoader, masked_labels
from meshfeed.layout import Layout
from meshfeed.recipe import Recipe

_KEY = "meshfeed"  # in the checkpoint's trainer_state.json, beside the step that it belongs to
_MESH_NAMES = {"cp": "tp", "sp": "tp"}  # accelerate cuts sequences itself: cp ranks are to get whole ones


def causal_batch(microbatch: Microbatch) -> dict[str, torch.Tensor]:
    """What transformers' causal models take; labels are those of the stream, shifted already.

    input_ids, position_ids, labels, shift_labels: int64 [rows, tokens]; -100 where no loss is borne.
    """
    labels = masked_labels(microbatch)
    return {
        "input_ids": microbatch["tokens"],
        "position_ids": microbatch["position_ids"],
        "labels": labels,  # what the Trainer looks for; the loss is taken of shift_labels
        "shift_labels": labels,
    }


class FeedTrainer:
    """Goes before `transformers.Trainer` among the bases of a class; datasets that are no recipes stay its.

    layout: where the ranks stand; None for accelerate's device mesh, or data parallelism alone.
    feed_options: further arguments of `Feed`: packing, delivery, verify, ...
    batch_of: what to hand out of a microbatch; override it for models that take something else.

    The stream is one epoch of the Trainer's, `max_steps` long at most; state travels in the checkpoint's
    trainer_state.json, and nothing is skipped by reading it.
    """

    args: Any
    state: Any
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        *args: Any,
        layout: Layout | None = None,
        feed_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._layout, self._feed_options = layout, dict(feed_options or {})
        self._train_loader: TrainLoader | None = None
        super().__init__(*args, **kwargs)

    @property
    def step(self) -> Step | None:
        """The step that is being trained: its index, valid_tokens, stats; None before the first."""
        return self._train_loader.step if self._train_loader is not None else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; lets go of files and peers at its end."""
        try:
            return cast(Any, super()).train(*args, **kwargs)
        finally:
            if self._train_loader is not None:
                self._train_loader.close()

    def batch_of(self, microbatch: Microbatch) -> Any:
        """A microbatch as the model takes it."""
        return causal_batch(microbatch)

    def get_train_dataloader(self) -> Any:
        """The training stream, from where the checkpoint was taken."""
        if not isinstance(self.train_dataset, Recipe):
            return cast(Any, super()).get_train_dataloader()
        if self._train_loader is not None:  # of a run that auto_find_batch_size has given up
            self._train_loader.close()
        feed = self._feed(self.train_dataset, self._micro_batch_size)
        if feed.num_steps is not None and feed.num_steps < self.args.max_steps:
            raise RecipeError(
                f"max_steps={self.args.max_steps}, and the stream ends after {feed.num_steps} steps; "
                f"lower max_steps, or give the recipe more epochs"
            )
        # The Trainer would read and drop what a resumed run has trained already; the state knows better.
        self.args.ignore_data_skip = True
        self._train_loader = _Resumed(self, feed)
        return self._train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """An evaluation set, from its beginning."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen
        if not isinstance(chosen, Recipe):
            return cast(Any, super()).get_eval_dataloader(eval_dataset)
        return self._evaluated(chosen)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """A test set, from its beginning."""
        if not isinstance(test_dataset, Recipe):
            return cast(Any, super()).get_test_dataloader(test_dataset)
        return self._evaluated(test_dataset)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._train_loader is not None:
            self.state.stateful_callbacks[_KEY] = self._train_loader.state_dict()
        cast(Any, super())._save_checkpoint(*args, **kwargs)

    def _evaluated(self, recipe: Recipe) -> EvalLoader:
        return EvalLoader(self._feed(recipe, self.args.per_device_eval_batch_size), self.batch_of)

    @property
    def _micro_batch_size(self) -> int:
        return int(cast(Any, self)._train_batch_size)  # what auto_find_batch_size has come to

    def _feed(self, recipe: Recipe, micro_batch_size: int) -> Feed:
        mesh, layout = getattr(self.accelerator, "torch_device_mesh", None), self._layout
        if layout is None and mesh is not None:
            layout = Layout.from_device_mesh(mesh, names=_MESH_NAMES)
        options: dict[str, Any] = {
            "device": self.args.device,
            "micro_batch_size": micro_batch_size,
            **self._feed_options,
        }
        return Feed(recipe, layout or Layout(dp=self.args.world_size), self.args.process_index, **options)


class _Resumed(TrainLoader):
    """Takes up the state that the Trainer has loaded by the time it first iterates."""

    def __init__(self, trainer: FeedTrainer, feed: Feed) -> None:
        args = trainer.args
        super().__init__(
            feed,
            trainer.batch_of,
            accumulated=lambda: args.gradient_accumulation_steps,
            trained=lambda: trainer.state.global_step * args.gradient_accumulation_steps,
        )
        self._trainer = trainer
        self._begun = False

    def __iter__(self) -> Any:
        if not self._begun and self._trainer.state.global_step:
            self.load_state_dict(self._saved())
        self._begun = True
        yield from super().__iter__()

    def __len__(self) -> int:
        raise TypeError("the Trainer counts steps of a stream: give max_steps")

    def _saved(self) -> dict[str, Any]:
        at = self._trainer.state.global_step
        saved = self._trainer.state.stateful_callbacks.get(_KEY)
        if saved is None:
            raise StateError(
                f"the checkpoint of step {at} was saved without meshfeed and does not tell what was trained; "
                f"resume with the data that it was trained on, or start anew from its model"
            )
        return dict(saved)
