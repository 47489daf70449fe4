"""A feed for the training loop of a framework, one microbatch at a time.

Such a loop may fetch batches before it trains them, and may end an epoch anywhere. So a `TrainLoader` counts
both fetched and trained microbatches, and its state follows the trained ones.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, fields
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from meshfeed.environment import switch
from meshfeed.errors import MeshfeedError, RecipeError, StateError
from meshfeed.extras import install, untested
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch, Step
from meshfeed.feed.options import FeedOptions
from meshfeed.masked import Masked
from meshfeed.order import draws_of_step, short_steps
from meshfeed.recipe import Recipe
from meshfeed.sequence import SequenceRule, TakesParts, contents_of
from meshfeed.sequence.table import PLAN_FIELDS

BatchOf = Callable[[Microbatch], Any]
"""Microbatch -> the loop's batch."""

IGNORED = -100  # torch's cross entropy ignores this label

OF_TEXT = frozenset({"tokens", "labels", "loss_mask", *(field.name for field in PLAN_FIELDS)})
"""The fields of text, in rows or packs."""


def framework(module: str, extra: str) -> Any:
    """A framework's module.

    Raises MeshfeedError naming the pip extra if it is not installed. Warns of a version newer than those
    tested, and raises MeshfeedError for a new major version, unless MESHFEED_UNTESTED=1.
    """
    try:
        found = importlib.import_module(module)
    except ImportError as missing:
        newer = "".join(f"; {says}" for says, _ in untested(extra))
        raise MeshfeedError(f"{module} cannot be imported ({missing}){newer}; {install(extra)}") from missing
    check_versions(extra)
    return found


@cache
def check_versions(extra: str) -> None:
    """Warn once if a package of an extra is newer than those tested; see `framework`."""
    if switch("MESHFEED_UNTESTED", unset=False):
        return
    for says, is_major in untested(extra):
        if is_major:
            raise MeshfeedError(f"{says}; {install(extra)}, or set MESHFEED_UNTESTED=1 to use this version")
        warnings.warn(f"{says}; MESHFEED_UNTESTED=1 silences this", stacklevel=3)


def changed_options(given: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of a framework's dataclass of options that differ from their defaults, by name."""
    changed: dict[str, Any] = {}
    for field in fields(given):
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init and getattr(given, field.name) != usual:
            changed[prefix + field.name] = getattr(given, field.name)
    return changed


def refuse_options(changed: Mapping[str, Any], treatments: Mapping[str, str]) -> None:
    """Raises RecipeError naming each changed option that CONFIG_FIELDS refuses, with its note."""
    notes = {name: treatments.get(name, "").partition("refused: ")[2] for name in changed}
    told = [f"{name}={changed[name]!r} ({note})" for name, note in notes.items() if note]
    if told:
        raise RecipeError(f"these would have no effect on a mf.Recipe; leave them out: {', '.join(told)}")


def check_feed_options(owner: str, given: Mapping[str, Any]) -> None:
    """Raises what `Feed` raises for keyword arguments, before there is a recipe. owner: their receiver."""
    try:
        call = inspect.signature(Feed).bind(None, None, None, **given)
    except TypeError as error:
        raise TypeError(f"{owner} {error}") from None
    call.apply_defaults()
    FeedOptions.of(call.arguments)


def for_evaluation(options: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The options of a training feed that hold for an evaluation of a recipe, too.

    A ledger amends training alone, sinks take the steps of one feed at a time, and a rule without parts has
    no encoder.
    """
    without = {"ledger", "metrics"} | (set() if isinstance(recipe.sequence, TakesParts) else {"encoder"})
    return {name: value for name, value in options.items() if name not in without}


def end_of(feed: Feed) -> tuple[int | None, str]:
    """Steps of the stream that no amendment leaves out, None if it is endless; and the same in words."""
    end = feed.num_steps
    if end is None:
        return None, "the stream never ends"
    given = num_given(feed, 0, end)
    left_out = f" ({end - given} more are left out by amendments)" if given < end else ""
    return given, f"the stream ends after {given} steps{left_out}"


def num_given(feed: Feed, first: int, stop: int) -> int:
    """Steps of a range that no amendment leaves out."""
    return sum(map(len, feed.recipe.given_steps(first, stop)))


def masked_labels(microbatch: Microbatch) -> torch.Tensor:
    """The labels, int64 [rows, tokens], with -100 where there is no loss; unchanged without a loss_mask.

    Raises RecipeError for a loss_mask of other weights than 0 and 1, which labels cannot have.
    """
    labels: torch.Tensor = microbatch["labels"]
    if "loss_mask" not in microbatch:
        return labels
    mask: torch.Tensor = microbatch["loss_mask"]
    # on a GPU, the host waits here, so only where it knows of another weight, or does not know
    if getattr(microbatch, "may_weigh", True) and (other := (mask != 0) & (mask != 1)).any():
        raise RecipeError(
            f"loss_mask has a weight of {float(mask[other][0]):.6g}, and this loop trains tokens or leaves "
            f"them out; give weights of 0 and 1, or read the field loss_mask in a loop of your own"
        )
    return labels.masked_fill(mask == 0, IGNORED)


def field_names(recipe: Recipe) -> set[str]:
    """The names of the fields that microbatches of a recipe have."""
    return {field.name for field in contents_of(recipe).fields}


def refuse_masked(recipe: Recipe, name: str) -> None:
    """Raises RecipeError for labels of hidden tokens. name: of a model or loop that predicts next tokens."""
    if isinstance(recipe.sequence, Masked):
        raise RecipeError(
            f"Masked() has hidden tokens as labels, and {name} predicts next tokens; use Windows()"
        )


def refuse_half_apart(recipe: Recipe, who: str) -> None:
    """Raises RecipeError for rows whose documents a model would keep apart, or not, against the rule.

    who: keeps them apart where positions begin again, with its verb.
    """
    rule = recipe.sequence
    if getattr(rule, "reset_position_ids", False) != getattr(rule, "reset_attention_mask", False):
        raise RecipeError(
            f"{rule.summary()}: {who} documents apart where their positions begin again; set both "
            f"reset_position_ids and reset_attention_mask, or neither"
        )


def refuse_lacking(recipe: Recipe, needed: Set[str], name: str) -> None:
    """Raises RecipeError for a rule without some of the fields that a loop needs. name: whose loop."""
    if lacking := needed - field_names(recipe):
        told = ", ".join(sorted(lacking))
        raise RecipeError(f"{type(recipe.sequence).__name__}() has no field {told}, which {name} needs")


def refuse_fields(recipe: Recipe, taken: Set[str], name: str, parts: str = "") -> None:
    """Raises RecipeError for fields beyond those taken, which a loop would lose.

    name: of its batches. parts: what to do with documents with images, sound or video instead.
    """
    if further := field_names(recipe) - taken:
        rule, told = recipe.sequence, ", ".join(sorted(further))
        cure = f"; {parts}" if parts and isinstance(rule, TakesParts) else ""
        raise RecipeError(f"{type(rule).__name__}(): {name} have no place for {told}{cure}")


def pads_rows(recipe: Recipe, dp: int) -> bool:
    """`pad_rows` for an evaluation: False if ranks would then get batches of different sizes."""
    return dp == 1 or cast(SequenceRule, recipe.sequence).has_dummy_rows


class Settings(NamedTuple):
    """A framework's names for the settings that must match the recipe, for messages."""

    accumulated: str = "the number of microbatches that the loop accumulates"
    micro_batch_size: str = "micro_batch_size"
    epoch: str = "by steps_per_epoch, say"
    capacity: str = ""  # of packs, if the framework's config sets it


class EvalLoader:
    """A validation or test set: every pass begins at its first step, and no state is kept.

    feed: used by this loader alone; closed after every pass, complete or not.
    batch_of: the batch from a microbatch; by default a dict of its fields.
    """

    def __init__(self, feed: Feed, batch_of: BatchOf = dict) -> None:
        self._feed, self._batch_of, self._pass = feed, batch_of, object()

    def __iter__(self) -> Iterator[Any]:
        return (self._batch_of(microbatch) for _, microbatch in self._microbatches())

    def _microbatches(self) -> Iterator[tuple[Step, Microbatch]]:
        """The microbatches of a pass, each with its step."""
        this = self._pass = object()

        def leave(*error: Any) -> None:
            if self._pass is this:  # one that is collected late does not end a later one
                self._feed.__exit__(*error)

        self._feed.run(0)
        with contextlib.ExitStack() as stack:
            stack.push(leave)
            for step in self._feed.__enter__():
                for microbatch in step.microbatches:
                    yield step, microbatch

    def __len__(self) -> int:
        """Microbatches of a pass. Raises TypeError, as len does, if they cannot be counted."""
        return num_microbatches(self._feed, 0, self._feed.num_steps)


class TrainLoader:
    """The training stream. Each iteration is an epoch of the loop and continues after the last one.

    The state is the first step that is not fully trained. Take it between steps, after the optimizer's step:
    within one it is refused, since a checkpoint does not keep the gradients.

    feed: used by this loader alone.
    batch_of: the batch from a microbatch; by default a dict of its fields.
    steps_per_epoch: steps of an iteration; None for the whole stream.
    accumulated: returns how many microbatches the loop accumulates for a step; None for any number.
    trained: returns how many microbatches the loop has trained, counted from any start; None if the loop
        trains everything it has fetched before it takes a state.
    settings: the loop's names of these numbers.
    check_step: raises an error for a step that the loop cannot train, on every rank, before its microbatches.

    Iterating raises RecipeError if recipe and loop disagree about a step's microbatches.
    """

    def __init__(
        self,
        feed: Feed,
        batch_of: BatchOf = dict,
        *,
        steps_per_epoch: int | None = None,
        accumulated: Callable[[], int | None] = lambda: None,
        trained: Callable[[], int] | None = None,
        settings: Settings | None = None,
        check_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise RecipeError(f"steps_per_epoch={steps_per_epoch}: a whole number from 1, or None")
        self._feed, self._batch_of, self._steps_per_epoch = feed, batch_of, steps_per_epoch
        self._accumulated, self._trained = accumulated, trained or (lambda: self._num_fetched)
        self._settings, self._check_step = settings or Settings(), check_step
        self._steps: Iterator[Step] | None = None  # of the feed, kept from epoch to epoch
        self._out: deque[Step] = deque()  # fetched, perhaps not trained
        self._num_fetched = 0
        self._base = 0  # the count of `trained` when all steps before out[0] were trained
        self._next: int | None = None  # the next step to train: out[0], if there is one
        self._recent: Step | None = None  # the last one that left `out`

    # -- the loop's side ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        steps = self._begin()
        size = self._steps_per_epoch
        last = None if size is None else (self._position() // size + 1) * size
        for step in steps:
            self._check(step.index, step.num_microbatches)
            self._check_step(step)
            self._settle()
            self._out.append(step)
            for microbatch in step.microbatches:
                self._num_fetched += 1
                yield self._batch_of(microbatch)
            if last is not None and self._feed.recipe.first_given(step.index + 1) >= last:
                return

    def __len__(self) -> int:
        """All microbatches of the current or next epoch; at the end of the stream, of the last one.

        Raises TypeError, as len does, if they cannot be counted.
        """
        self._settle()
        size, end = self._steps_per_epoch, self._feed.num_steps
        if size is None:
            return num_microbatches(self._feed, 0, end)
        at = self._position() if end is None else max(min(self._position(), end - 1), 0)
        first = at // size * size
        return num_microbatches(self._feed, first, first + size if end is None else min(first + size, end))

    @property
    def encoder_ranks(self) -> Sequence[int]:
        """See `Feed.encoder_ranks`."""
        return self._feed.encoder_ranks

    @property
    def num_left(self) -> int | None:
        """Steps of the stream that are to be trained still; None for an endless stream."""
        end = self._feed.num_steps
        return None if end is None else num_given(self._feed, self.position, end)

    @property
    def step(self) -> Step | None:
        """The step in training, with its totals such as `valid_tokens`; None before the first."""
        self._settle()
        return self._out[0] if self._out else self._recent

    @property
    def position(self) -> int:
        """The next step to train, or the one in training; no step that an amendment leaves out."""
        self._settle()
        return self._position()

    @property
    def num_done(self) -> int:
        """Microbatches of that step that were trained; 0 between steps."""
        self._settle()
        return self._trained() - self._base if self._out else 0

    def state_dict(self) -> dict[str, Any]:
        """The state after the steps that were trained; JSON-able, equal on every rank.

        Raises StateError within a step.
        """
        if done := self.num_done:
            raise StateError(
                f"saved after {done} of {self._out[0].num_microbatches} microbatches of step "
                f"{self._position()}, and a checkpoint does not keep their gradients; save after the "
                f"optimizer's step"
            )
        return self._feed.state_dict(self._position())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume at a state. Raises StateError for one of another recipe."""
        self._feed.load_state_dict(state_dict)
        self._steps, self._next, self._recent = None, None, None
        self._out.clear()

    def close(self, during: BaseException | None = None) -> None:
        """Close the feed's files and connections; iterating opens them again, at the first untrained step.

        during: an error that is being raised; errors of closing become its notes.
        """
        self._next = self.position
        self._out.clear()
        self._steps, self._recent = None, None
        self._feed.__exit__(None, during, None)

    # -- what was fetched, and what was trained -------------------------------------------------------

    def _position(self) -> int:
        if self._next is None:
            self._next = self._feed.next_step
        at, end = self._feed.recipe.first_given(self._next), self._feed.num_steps
        return at if end is None else max(min(at, end), self._next)

    def _settle(self) -> None:
        """Forget the steps that are fully trained."""
        done = self._trained() - self._base
        while self._out and done >= self._out[0].num_microbatches:
            self._recent = self._out.popleft()
            size = self._recent.num_microbatches
            done, self._base, self._next = done - size, self._base + size, self._recent.index + 1

    def _begin(self) -> Iterator[Step]:
        """The steps from the first untrained one; fetched and dropped microbatches are made again."""
        if done := self.num_done:
            raise RecipeError(
                f"the loop ended its epoch after {done} of {self._out[0].num_microbatches} microbatches "
                f"of step {self._position()}; let it end between steps ({self._settings.epoch})"
            )
        if self._steps is None or self._out:
            first, end = self._position(), self._feed.num_steps
            for step in (first, max(first, (end or 0) - 1)):  # refuse a short last step before training
                self._check(step, self._feed.num_microbatches(step))
            self._steps = self._feed.run(first)
            self._out.clear()
            self._base = self._trained()
        return self._steps

    def _check(self, step: int, num_microbatches: int | None) -> None:
        wanted = self._accumulated()
        if wanted is not None and num_microbatches and num_microbatches != wanted:
            raise RecipeError(disagreement(self._feed, step, num_microbatches, wanted, self._settings))


def disagreement(feed: Feed, step: int, num_microbatches: int, wanted: int, name: Settings) -> str:
    """Why a step does not have the number of microbatches that the loop accumulates, and what to set."""
    ranks = f"each of {feed.layout.dp} data-parallel ranks"
    if feed.packing is not None:
        capacity = name.capacity or f"Packing(microbatches={wanted}), and a capacity"
        return (
            f"step {step} is packed into {num_microbatches} microbatches on {ranks}, but {name.accumulated} "
            f"is {wanted}; set {capacity}, now {feed.packing.capacity}, at which no step needs more"
        )
    num, whole = len(draws_of_step(feed.recipe, step)), feed.micro_batch_size * feed.layout.dp * wanted
    told = (
        f"step {step} is {num} sequences, {num_microbatches} microbatches on {ranks} "
        f"({name.micro_batch_size}={feed.micro_batch_size}), but {name.accumulated} is {wanted}, for {whole} "
        f"sequences"
    )
    if num < feed.recipe.batch.position(step + 1) - feed.recipe.batch.position(step):
        return (
            f"{told}; the stream ends within a step, or amounts that others follow do: give the recipe "
            f"Batch(last='drop') or 'pad'"
        )
    return (
        f"{told}; make {name.accumulated} {num_microbatches}, or the recipe's Batch(sequences={whole}), in "
        f"every step"
    )


def num_microbatches(feed: Feed, first: int, end: int | None) -> int:
    """Microbatches of steps first..end on each rank. Raises TypeError if they are endless or packed."""
    if end is None or feed.num_microbatches(first) is None:
        raise TypeError("an endless or packed stream has no len(); give steps_per_epoch, or an end")
    # the number changes with the batch size, and in a step that ends with the stream, or with amounts
    ends = [*short_steps(feed.recipe), *([] if feed.num_steps is None else [feed.num_steps - 1])]
    changes = {*(step for step, _ in feed.recipe.batch.stages), *ends, *(step + 1 for step in ends)}
    total = 0
    for steps in feed.recipe.given_steps(first, end):
        for step, after in pairwise(sorted({steps.start, steps.stop, *filter(steps.__contains__, changes)})):
            total += (after - step) * (feed.num_microbatches(step) or 0)
    return total
