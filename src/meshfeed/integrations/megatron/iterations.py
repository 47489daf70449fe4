"""Iterators for Megatron's training loops, including one that skips iterations on tp rank 0 alone.

For an iteration of `--iterations-to-skip`, Megatron-LM's `dummy_train_step` pulls on tp rank 0, broadcasts
whole rows of it in the tp group, and throws them away. So these pulls get rows of zeros, nothing is read for
them, and the feed leaves their steps out: inside a schedule, a stage could not drop them alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshfeed.errors import RecipeError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Step
from meshfeed.integrations.megatron.batches import Source, StageBatch, StageIterator, check_documents
from meshfeed.integrations.megatron.stages import core

_UNSKIPPED = ("virtual_pipeline_model_parallel_size", "hybrid_context_parallel", "dynamic_context_parallel")
"""Options with which Megatron-LM cannot skip iterations."""


def data_iterators(
    source: Source, *, num_microbatches: Callable[[], int] | None = None, args: Any = None
) -> StageIterator | list[StageIterator]:
    """The data iterator for Megatron's training loop: one, or a list of one per virtual stage.

    source: an entered Feed, or an Exchange, whose steps `begin` begins. This waits for the other ranks to
    join: call it on all of them, before the first schedule and after `load_state_dict`. Each stage gets the
    same microbatches, read once; all stages must be iterated. The source's state counts the steps whose
    microbatches were all taken: save it between steps. num_microbatches: Megatron-core's
    `get_num_microbatches`; with it, a step with another number is refused when it begins. args: in
    Megatron-LM's own training loop, what its `get_args` gives, for the iterators that it trains from: then
    a step is an iteration of that loop, also after `--iterations-to-skip`, and num_microbatches is given.
    Raises RecipeError if Megatron-LM skips iterations and args is not given or does not allow it, and
    later for a step that is not Megatron's iteration.
    """
    stages = iterators_of_stages(source, num_microbatches, args)
    return stages if len(stages) > 1 else stages[0]


def iterators_of_stages(
    source: Source, num_microbatches: Callable[[], int] | None = None, args: Any = None
) -> list[StageIterator]:
    """`data_iterators`, as a list also of one."""
    if args is None:
        _refuse_unfollowed()
        return unfollowed_iterators(source, num_microbatches)
    feed = _feed_of(source, args)
    first = feed.run(leave_out=(iteration - 1 for iteration in skipped_of(args))).step
    of_core = num_microbatches or core("num_microbatches_calculator").get_num_microbatches
    return _of_stages(feed, lambda steps: FollowingIterator(feed, steps, of_core, args, first))


def unfollowed_iterators(source: Source, num_microbatches: Callable[[], int] | None) -> list[StageIterator]:
    """`iterators_of_stages` without skipped iterations: also for validation and test data."""
    return _of_stages(source, lambda steps: StageIterator(source, steps, num_microbatches))


def begin(iterators: StageIterator | Sequence[StageIterator]) -> Step:
    """Begin the next step on all virtual stages; see `StageIterator.begin`.

    For loops that need facts about a step before its microbatches: their number, and the loss-bearing tokens
    of the global batch. Other loops need not call it.
    """
    stages = [iterators] if isinstance(iterators, StageIterator) else iterators
    steps = [stage.begin() for stage in stages]
    return steps[0]


class FollowingIterator(StageIterator):
    """A StageIterator whose steps are Megatron-LM's iterations.

    Args:
        args: of Megatron-LM's `get_args`; its loop sets curr_iteration before each iteration that it trains.
        first: the feed's next step.
    """

    def __init__(
        self,
        source: Source,
        steps: Iterator[Step],
        num_microbatches: Callable[[], int],
        args: Any,
        first: int,
    ) -> None:
        super().__init__(source, steps, num_microbatches)
        self._args, self._of_iteration = args, num_microbatches
        self._next = first  # the first step that Megatron has neither trained nor skipped here
        self._zeros = 0  # microbatches left of the last iteration that it skipped here

    def __next__(self) -> StageBatch:
        now = _iteration(self._args)
        if self.step is not None and now == self.step.index:
            made = next(self._left, None)
            if made is not None:
                return made
        if now < self._next or self._skips(now):  # Megatron does not count while it skips
            return self._skipped(now)
        self._advance(now)
        return next(self)

    def begin(self) -> Step:
        """Begin the step of Megatron's iteration. Raises RecipeError if it has already begun."""
        now = _iteration(self._args)
        if now < self._next:
            raise RecipeError(
                f"Megatron is at iteration {now} (from 0), and step {self._next} of the data comes next; "
                f"begin one step in each iteration, and start the feed at args.iteration"
            )
        return self._advance(now)

    def _advance(self, now: int) -> Step:
        if missed := [step for step in range(self._next, now) if not self._skips(step)]:
            raise RecipeError(
                f"Megatron is at iteration {now} (from 0), and step {missed[0]} of the data comes next, "
                f"which is not in iterations_to_skip; start the feed at args.iteration, as "
                f"megatron.DatasetsProvider does"
            )
        while self.step is None or self.step.index < now:
            self.step = next(self._steps)
        self._next, self._zeros = now + 1, 0
        return self._enter(self.step)

    def _skips(self, step: int) -> bool:
        return step + 1 in skipped_of(self._args)

    def _skipped(self, now: int) -> StageBatch:
        """A microbatch of zeros, in place of one that Megatron discards."""
        if not self._zeros:
            if not self._skips(self._next):
                raise RecipeError(
                    f"Megatron takes a microbatch at iteration {now} (from 0), and step {self._next} of the "
                    f"data comes next: the schedule takes more microbatches than the step has, or the feed "
                    f"did not start at args.iteration, as megatron.DatasetsProvider does"
                )
            self._next, self._zeros = self._next + 1, self._of_iteration()
        self._zeros -= 1
        return StageBatch(zeros(self._args), None)


def skipped_of(args: Any) -> Sequence[int]:
    """The iterations that Megatron-LM skips, counted from 1; its rerun machine may add to them."""
    return getattr(args, "iterations_to_skip", None) or ()


def zeros(args: Any) -> dict[str, torch.Tensor]:
    """Whole rows of zeros with the keys of Megatron-LM's loaders, which its tp ranks expect; on the CPU.

    tokens, labels, position_ids int64 [b, T], loss_mask float32 [b, T]; and the keys that its options add.
    """
    rows, length = args.micro_batch_size, args.seq_length
    made = {
        name: torch.zeros(rows, length, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")
    }
    made["loss_mask"] = torch.zeros(rows, length)
    if getattr(args, "dataloader_inter_document_masking", False):
        ends = torch.tensor([[0, length]] * rows, dtype=torch.int32)
        made |= {"cu_seqlens": ends, "max_seqlen": torch.full((rows,), length, dtype=torch.int32)}
    elif getattr(args, "create_attention_mask_in_dataloader", False):
        made["attention_mask"] = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    return made


def _of_stages(source: Source, made: Callable[[Iterator[Step]], StageIterator]) -> list[StageIterator]:
    if isinstance(source, Feed):
        check_documents(source)
    changing = source.stage_map.mtp and len(source.cp_groups) > 1
    if changing and not hasattr(core("packed_seq_params"), "resolve_cp_group"):
        raise RecipeError(
            "MTP layers with changing cp groups: this Megatron-core shifts their tokens among the ranks of "
            "context_parallel_size, whichever share a pack; take a newer one, or Packing(policy='balanced')"
        )
    return [made(iter(stage)) for stage in source.virtual_stages]


def _feed_of(source: Source, args: Any) -> Feed:
    """The source. Raises RecipeError if its iterators cannot follow args."""
    if not isinstance(source, Feed):
        raise RecipeError("args= is for the iterators of a Feed, whose steps have numbers; leave it out")
    skipped = skipped_of(args)
    for name in _UNSKIPPED:
        if skipped and getattr(args, name, None):
            raise RecipeError(
                f"iterations_to_skip={skipped} with {name}={getattr(args, name)}, where Megatron-LM's "
                f"dummy_train_step fails; leave one of them out"
            )
    return source


def _refuse_unfollowed() -> None:
    """Refuse plain iterators in a loop that skips iterations."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if skipped := skipped_of(args):
        raise RecipeError(
            f"Megatron-LM skips iterations {skipped}, and pulls for them on tp rank 0 alone; use "
            f"megatron.DatasetsProvider, or data_iterators(feed, args=get_args())"
        )


def _iteration(args: Any) -> int:
    """The iteration that Megatron-LM trains, from 0; the last one that it trained while it skips."""
    now = getattr(args, "curr_iteration", None)
    if now is None:
        raise RecipeError(
            "args has no curr_iteration, which Megatron-LM's train() sets; give args= only for iterators "
            "that its loop takes"
        )
    return int(now)
