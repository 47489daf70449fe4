"""accelerate: a loader for your own loop, whose optimizer steps are those of the recipe.

accelerate accumulates by a count of its own, `accelerator.step`, which it saves and restores. Before every
microbatch, this loader sets it to the place of the microbatch in its step. So gradients are synchronised at
the last one, whatever a checkpoint has counted, and a run may resume on another number of ranks.

    feed = mf.Feed(recipe, layout_of(accelerator), accelerator.process_index, micro_batch_size=2)
    loader = FeedLoader(feed, accelerator)
    accelerator.register_for_checkpointing(loader)
    for batch in loader:
        with accelerator.accumulate(model):
            ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from meshfeed.errors import LayoutError, RecipeError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch, Step
from meshfeed.integrations.config import layout_of_accelerator as layout_of
from meshfeed.integrations.loader import BatchOf, Settings, TrainLoader, framework
from meshfeed.layout import Layout

framework("accelerate", "transformers")


class FeedLoader(TrainLoader):
    """The training stream for `accelerator.accumulate`; see `TrainLoader`.

    Each microbatch enters `accumulate` once. The accelerator's gradient_accumulation_steps must be the
    microbatches of a step. The state has the steps whose last microbatch has entered.

    feed: used by this loader alone.
    batch_of: the batch from a microbatch; by default a dict of its fields.
    steps_per_epoch: steps of an iteration; None for the whole stream.

    Raises LayoutError for a feed under which ranks that share rows in the accelerator would get others.
    Iterating raises RecipeError if accelerate does not synchronise at the last microbatch of a step.
    """

    def __init__(
        self, feed: Feed, accelerator: Any, batch_of: BatchOf = dict, *, steps_per_epoch: int | None = None
    ) -> None:
        wanted = layout_of(accelerator)
        if getattr(accelerator, "parallelism_config", None) or wanted.tp > 1:
            _check_rows(feed.layout, wanted)
        super().__init__(
            feed,
            lambda microbatch: microbatch,
            steps_per_epoch=steps_per_epoch,
            accumulated=lambda: accelerator.gradient_accumulation_steps,
            trained=self._num_trained,
            settings=Settings(accumulated="gradient_accumulation_steps"),
        )
        self._accelerator, self._make = accelerator, batch_of
        self._num_before = 0  # microbatches trained before the one that was handed out last
        self._handed: int | None = None  # its place in its step

    def __iter__(self) -> Iterator[Any]:
        microbatch: Microbatch
        for microbatch in super().__iter__():
            place = microbatch.index
            self._num_before = self._num_trained()
            self._handed = self._accelerator.step = place
            yield self._make(microbatch)
            if self._handed == place:  # no state was loaded meanwhile
                self._check_phase(place)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume at a state, without the gradients of a step that had begun."""
        self._num_before, self._handed = self._num_trained(), None
        super().load_state_dict(state_dict)
        for model in self._accelerator._models:
            model.zero_grad()

    def _num_trained(self) -> int:
        entered = self._handed is not None and self._accelerator.step != self._handed
        return self._num_before + entered

    def _check_phase(self, place: int) -> None:
        step = cast(Step, self.step)  # one is handed out
        entered, synced = self._accelerator.step - place, self._accelerator.sync_gradients
        if entered != 1 or synced != (place + 1 == step.num_microbatches):
            raise RecipeError(
                f"microbatch {place + 1} of {step.num_microbatches} of step {step.index}: the loop entered "
                f"accelerator.accumulate {entered} times, and sync_gradients was {synced}; enter it once for "
                f"each batch, so that gradients are synchronised at the last microbatch of a step alone"
            )


def _check_rows(own: Layout, wanted: Layout) -> None:
    """Raises LayoutError unless ranks that share rows in the accelerator get the same whole rows."""
    if own.cp > 1 or own.world_size != wanted.world_size or _sharing(own) != _sharing(wanted):
        raise LayoutError(
            f"under the feed's layout {own}, ranks that share rows in the accelerator would not get the same "
            f"whole rows; give the feed layout_of(accelerator)"
        )


def _sharing(layout: Layout) -> dict[int, int]:
    """Each rank -> the first one that gets the same rows."""
    first = dict[int, int]()
    dp = layout.coords()[:, 2].tolist()
    return {rank: first.setdefault(at, rank) for rank, at in zip(layout.ranks().tolist(), dp)}
