"""The stream: position -> (source, epoch, index), and the positions of a step.

Position p counts sequences over all sources and epochs. Step k of a batch of B is positions [k*B, (k+1)*B);
`tokens` says where steps of so many tokens begin.
No list is built and no state is kept: position 10**12 costs the same as position 0.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Floats, Ints, Longs, Words
from meshfeed.errors import RecipeError
from meshfeed.intervals import distinct
from meshfeed.mixture import Mixture, Store
from meshfeed.order.blocks import BlockShuffle
from meshfeed.order.permutation import key_of, permute, unpermute
from meshfeed.order.schedule import Segment, Turns, parts_of, sizes_of, turns_of
from meshfeed.order.tokens import KnownPosition, Tokens, cut_at
from meshfeed.recipe import Blocks, Recipe
from meshfeed.whole import whole

Places = npt.NDArray[np.integer] | slice
"""Indices of some entries of arrays, or a range of them."""

_TOGETHER = 1 << 12  # places of blocks that are computed at a time: a few hundred take NumPy as long


@dataclass(frozen=True, slots=True)
class EpochIndex:
    """Identifies one sequence of a dataset; everything random in it is keyed by (seed, epoch, index).

    It unpacks as `epoch, index = at`; `idx` is another name for `index`.
    """

    epoch: int
    index: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.epoch, self.index))

    @property
    def idx(self) -> int:
        """The index."""
        return self.index


@dataclass(frozen=True, slots=True)
class Draws:
    """A run of the stream, one array per property.

    Attributes:
        source: index of the store; int32 [n].
        epoch: number of the pass over that store, from 0; int64 [n].
        index: of the sequence in that epoch; int64 [n].
    """

    source: Ints
    epoch: Longs
    index: Longs

    def __post_init__(self) -> None:
        for array in (self.source, self.epoch, self.index):
            array.flags.writeable = False

    def __len__(self) -> int:
        return self.index.size

    def between(self, start: int, stop: int) -> Draws:
        """The draws start..stop of this run."""
        return self.take(slice(start, stop))

    def by_source(self) -> list[tuple[int, Longs, Draws]]:
        """(source, places of its draws in this run, these draws), for each that has any, ascending."""
        if self.source.size and (self.source == self.source[0]).all():
            return [(int(self.source[0]), np.arange(self.source.size), self)]
        found = ((source, np.flatnonzero(self.source == source)) for source in distinct(self.source).tolist())
        return [(source, places, self.take(places)) for source, places in found]

    def take(self, places: Places) -> Draws:
        """The draws at some indices of this run."""
        return Draws(self.source[places], self.epoch[places], self.index[places])


def concatenated(runs: Sequence[Draws]) -> Draws:
    """Concatenate runs of draws."""
    if len(runs) == 1:
        return runs[0]
    return Draws(
        np.concatenate([run.source for run in runs]),
        np.concatenate([run.epoch for run in runs]),
        np.concatenate([run.index for run in runs]),
    )


class OwnOrder(ABC):
    """A sequence rule with an order of its own, such as another framework's, instead of the recipe's."""

    @abstractmethod
    def num_positions(self, recipe: Recipe) -> int:
        """Length of the stream."""

    @abstractmethod
    def draws_between(self, recipe: Recipe, start: int, stop: int) -> Draws:
        """Positions [start, stop) of the stream."""


class LeavesOut(ABC):
    """A sequence rule that can leave documents out, as `Exclude` asks for."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether excluded documents keep their tokens in rows, and bear no loss; else they have none."""
        return False

    @abstractmethod
    def num_documents(self, store: Store) -> int:
        """Documents of a store that may be named."""

    @abstractmethod
    def without(self, recipe: Recipe, draws: Draws, excluded: Mapping[int, Longs]) -> Draws:
        """The draws, looked up, with nothing of excluded documents in them that bears loss.

        A rule whose `keeps_tokens` is True returns `sequence.runs.WithExcluded`.
        excluded: source -> numbers of documents; int64, ascending.
        """


class Short(NamedTuple):
    """A step that is short, since the amounts end before the next ones begin.

    Attributes:
        step: the next one.
        position: where it begins.
        missing: sequences, or tokens of a batch of tokens, that steps before it lack.
    """

    step: int
    position: int
    missing: int


class Stream:
    """position <-> (source, epoch, index), and step <-> position, for one recipe.

    Args:
        recipe: whose stream it is.
        before: that of the recipe that this one amends. What they have in common is not computed again.

    Attributes:
        sizes: sequences in an epoch of each source; int64 [num_sources].
        cut_off: first steps of amounts that end, and have not when the next ones begin.
    """

    def __init__(self, recipe: Recipe, before: Stream | None = None) -> None:
        self._recipe = weakref.ref(recipe)  # an entry of `_streams` would keep its recipe alive
        self._batch, self._turns = recipe.batch, list[Turns]()
        stages = [(step, self._batch.position(step), size) for step, size in self._batch.stages]
        self._stages = stages  # first step, what the batch counts before it, and in each of its steps
        self._shorts, self.cut_off = list[Short](), set[int]()
        if isinstance(recipe.sequence, OwnOrder):
            self._prepare()
            return
        self._seed, self._names = recipe.seed, recipe.source_names
        self._source_keys = recipe.source_keys
        self.sizes = sizes_of(recipe)
        self._shuffle = recipe.shuffle
        self._blocks: BlockShuffle | None = None
        if isinstance(recipe.shuffle, Blocks):
            ends = [recipe.sequence.shard_ends(store) for store in recipe.sources]
            self._blocks = BlockShuffle(recipe.shuffle, self.sizes, ends)
        self._parts = parts_of(recipe)
        self._sums: dict[tuple[str, int], Longs] = {} if before is None else before._sums
        if before is not None and any(ours != theirs for ours, theirs in zip(self._names, before._names)):
            before = None  # the rest is by the numbers of sources
        known = {} if before is None else dict(zip(before._parts, before._turns))
        self._turns = [known.get(each) or turns_of(recipe, self.sizes, *each) for each in self._parts]
        self._segments = {} if before is None else self._shared_with(before)
        self._some = lru_cache(2)(self._make_some)
        self._prepare()

    def _prepare(self) -> None:
        """Refuse what cannot become steps, now rather than at a step."""
        self._settle()
        _ = self.end

    def _settle(self) -> None:
        """Find the amounts that end where the next ones begin. Raises RecipeError if these begin later."""
        for i, (turns, after) in enumerate(pairwise(self._turns)):
            if turns.total is None:
                continue
            end, stop = self._segment(i).start + turns.total, self.start(after.step)
            drops = self._batch.last == "drop"
            if self.start(after.step - 1) >= end or (drops and stop > end):
                raise self._too_late(turns, after, end)
            amounts = [self._amount(position, i) for position in (stop, end)]
            if end < stop and self._batch.last == "keep":
                self._shorten(Short(after.step, end, self._batch.position(after.step) - amounts[1]))
            elif amounts[1] - amounts[0] >= (self._batch.size(after.step - 1) if drops else 1):
                self.cut_off.add(turns.step)

    def _shorten(self, short: Short) -> None:
        self._shorts.append(short)

    def _too_late(self, turns: Turns, after: Turns, end: int) -> RecipeError:
        steps = range(turns.step, after.step)
        if self._batch.last == "drop":
            next_step = steps[bisect_right(steps, end, key=self.start) - 1]
        else:
            next_step = steps[bisect_left(steps, end, key=self.start)]
        names = [repr(self._names[source]) for source in turns.sources.tolist()]
        of = ", ".join([*names[:3], *(["..."] if names[3:] else [])])
        if next_step == turns.step:
            return RecipeError(
                f"the amounts from step {turns.step} on, of {of}, fill no step of {self._batch!r}, and "
                f"others begin at step {after.step}; give larger amounts or smaller batches, or last='pad'"
            )
        return RecipeError(
            f"the amounts from step {turns.step} on, of {of}, are all drawn with step {next_step - 1}, and "
            f"others begin at step {after.step}: let these begin at step {next_step}, or sooner to cut the "
            f"earlier ones off"
        )

    def _amount(self, position: int, segment: int) -> int:
        """What the batch counts before a position of a segment: sequences."""
        return position

    # -- steps ------------------------------------------------------------------------------------------

    def start(self, step: int) -> int:
        """The first position of a step, as if the stream had no end."""
        return self._due(step)

    def _due(self, step: int) -> int:
        """What all steps before one have, in what the batch counts."""
        first, before, size = self._stages[bisect_right(self._stages, step, key=itemgetter(0)) - 1]
        return before + (step - first) * size - (self._missing(step) if self._shorts else 0)

    def _missing(self, step: int) -> int:
        """What short steps before a step lack, in what the batch counts."""
        return next((each.missing for each in reversed(self._shorts) if each.step <= step), 0)

    def step_at(self, position: int) -> int:
        """The step that a position falls in."""
        return int(self.steps(np.array([position]))[0][0])

    def steps(self, positions: Longs) -> tuple[Longs, Longs]:
        """The step that each position falls in, and which of its sequences it is; int64 [n] each."""
        missing = np.zeros_like(positions)
        for each in self._shorts:
            missing[positions >= each.position] = each.missing
        return self._batch.steps(positions + missing)

    def bounds(self, step: int) -> tuple[int, int]:
        """Positions [start, stop) of a step; empty past the end of the stream."""
        return self.within(self.start(step), self.start(step + 1))

    @property
    def short_steps(self) -> list[int]:
        """Steps in which amounts end that others follow, so that they are shorter than the batch says."""
        return [each.step - 1 for each in self._shorts]

    @cached_property
    def all_drawn(self) -> int | None:
        """The position at which all amounts are drawn, maybe within a step; None if that is never."""
        recipe = self._of()
        if isinstance(recipe.sequence, OwnOrder):
            return recipe.sequence.num_positions(recipe)
        if recipe.epochs is not None:
            return recipe.epochs * int(self.sizes[0])
        last = self._turns[-1]
        return None if last.total is None else self.start(last.step) + last.total

    @cached_property
    def end(self) -> int | None:
        """The number of positions in all steps; None if the stream is endless."""
        last, steps, end = self._batch.last, self._of().steps, self.all_drawn
        if end is not None and last != "keep":  # rounded to whole steps
            step = self.step_at(end)
            whole = self.start(step)
            end = whole if last == "drop" or end == whole else self.start(step + 1)
        if steps is None:
            return end
        return self.start(steps) if end is None else min(end, self.start(steps))

    @property
    def is_over_early(self) -> bool:
        """Whether all amounts are drawn before as many steps as the recipe asks for."""
        steps, end = self._of().steps, self.all_drawn
        if steps is None or end is None:
            return False
        drops = self._batch.last == "drop"  # then the last step is whole
        last = steps if drops else steps - 1
        return self._amount(end, len(self._turns) - 1) + drops <= self._due(last)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Positions [start, stop), cut off at the end."""
        return (start, stop) if self.end is None else (min(start, self.end), min(stop, self.end))

    def _of(self) -> Recipe:
        return cast(Recipe, self._recipe())  # whoever asks a stream holds its recipe

    # -- segments ---------------------------------------------------------------------------------------

    @cached_property
    def segments(self) -> Sequence[Segment]:
        """All, in order."""
        return [self._segment(i) for i in range(len(self._turns))]

    def segments_before(self, step: int) -> Sequence[Segment]:
        """At least those that begin before a step, and the first."""
        return self.segments

    def _segment(self, i: int) -> Segment:
        if i not in self._segments:
            self._segments[i] = self._make_segment(i)
        return self._segments[i]

    def _make_segment(self, i: int) -> Segment:
        turns = self._turns[i]
        start = self.start(turns.step)
        drawn = self._segment(i - 1).counts(start) if i else np.zeros(self.sizes.size, np.int64)
        return Segment(turns.step, turns.sources, turns.turns, turns.total, start, drawn)

    def _shared_with(self, before: Stream) -> dict[int, Segment]:
        """The segments of another stream that come before any difference between them."""
        shared: dict[int, Segment] = {}
        for i, segment in sorted(before._segments.items()):
            ours, theirs = (
                [stage for stage in each._batch.stages if stage[0] < segment.step] for each in (self, before)
            )
            if ours != theirs or self._parts[: i + 1] != before._parts[: i + 1]:
                break
            shared[i] = segment.among(self.sizes.size)
        return shared

    def drawn(self, start: int, stop: int, segments: Sequence[Segment] | None = None) -> tuple[Ints, Longs]:
        """(source, number of its draws before) at positions start..stop; int32, int64 [n].

        segments: those that begin before `stop`; None finds them.
        """
        segments = self.segments if segments is None else segments
        if len(segments) == 1 and self.sizes.size == 1:
            return np.zeros(stop - start, np.int32), np.arange(start, stop)
        found: list[tuple[Ints, Longs]] = []
        for segment, first, last in _spans(segments, start, stop):
            if first < last or not found:
                local, count = segment.turns.draws(first - segment.start, max(last, first) - segment.start)
                source = segment.sources[local]
                found.append((source, count + segment.drawn[source]))
        return np.concatenate([source for source, _ in found]), np.concatenate([count for _, count in found])

    def places(
        self, start: int, stop: int, segments: Sequence[Segment] | None = None
    ) -> tuple[Ints, Longs, Longs]:
        """(source, epoch, position in the epoch) at positions start..stop; int32, int64, int64 [n]."""
        source, count = self.drawn(start, stop, segments)
        size = self._sizes_of(source)
        return source, count // size, count % size

    def draws(self, start: int, stop: int, segments: Sequence[Segment] | None = None) -> Draws:
        """The draws at positions start..stop."""
        if self._blocks is None or self.sizes.size > 1 or stop - start > _TOGETHER:
            return self.numbered(*self.drawn(start, stop, segments))
        first, last = start // _TOGETHER, max(stop - 1, start) // _TOGETHER
        some = concatenated([self._some(number) for number in range(first, last + 1)])
        return some.between(start - first * _TOGETHER, stop - first * _TOGETHER)

    def _make_some(self, number: int) -> Draws:
        """The draws at `_TOGETHER` successive positions of a single source."""
        return self.numbered(np.zeros(_TOGETHER, np.int32), np.arange(_TOGETHER) + number * _TOGETHER)

    def numbered(self, source: Ints, count: Longs) -> Draws:
        """Draws of sources by their number; int32, int64 [n]."""
        size = self._sizes_of(source)
        epoch, place = count // size, count % size
        return Draws(source, epoch, self.indices(source, epoch, place))

    def indices(self, source: npt.NDArray[np.integer], epoch: Longs, place: Longs) -> Longs:
        """The sequence at each position of an epoch; int64 [n]."""
        if self._shuffle == "none":
            return place
        keys = self._keys(source, epoch)
        if self._blocks is not None:
            return self._blocks.indices(place, source, keys)
        return permute(place, size=self._sizes_of(source), key=keys)

    def unshuffled(self, source: npt.NDArray[np.integer], epoch: Longs, index: Longs) -> Longs:
        """The inverse of `indices`: the position of each sequence in its epoch; int64 [n]."""
        if self._shuffle == "none":
            return index
        keys = self._keys(source, epoch)
        if self._blocks is not None:
            return self._blocks.places(index, source, keys)
        return unpermute(index, size=self._sizes_of(source), key=keys)

    def counts(self, position: int) -> Longs:
        """Draws of each source before a position; int64 [num_sources]."""
        return _at(self.segments, position).counts(position)

    def shares(self, step: int) -> Floats:
        """The recipe's share of each source in the sequences of a step; float64 [num_sources]."""
        turns = [each for each in self._turns if each.step <= step][-1]
        shares = np.zeros(self.sizes.size)
        shares[turns.sources] = turns.turns.weights
        return shares

    def asked(self, stop: int, segments: Sequence[Segment]) -> Floats:
        """The sequences of each source that the shares make before a position; float64 [num_sources].

        segments: those that begin before it.
        """
        asked = np.zeros(self.sizes.size)
        for segment, first, last in _spans(segments, 0, stop):
            asked[segment.sources] += max(last - first, 0) * segment.turns.weights
        return asked

    # -- tokens -----------------------------------------------------------------------------------------

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self._of, self.sizes, self._draws_in_epoch, self._key, self._sums)

    def check_tokens(self) -> None:
        """Raises RecipeError if no source that is drawn from some step on has a token."""
        for turns in self._turns:
            if not any(self._tokens.of_epochs[source].total for source in turns.sources.tolist()):
                raise RecipeError(f"from step {turns.step} on, no source that is drawn has a token")

    def tokens_before(self, position: int, segments: Sequence[Segment]) -> int:
        """Tokens of all sequences before a position. segments: those that begin before it."""
        return self._tokens.before(_at(segments, position).counts(position))

    def cut(self, target: int, segments: Sequence[Segment], near: KnownPosition) -> tuple[int, KnownPosition]:
        """See `cut_at`. segments: those that begin before token `target`."""
        source, weights = segments[-1].sources, segments[-1].turns.weights
        means = np.array([total for total, _ in self._tokens.of_epochs])[source] / self.sizes[source]
        return cut_at(
            target,
            near,
            lambda position: self.tokens_before(position, segments),
            lambda start, stop: self._tokens.lengths(self.draws(start, stop, segments)),
            mean=float(weights @ means),
            first=segments[-1].start,
        )

    def _draws_in_epoch(self, source: int, epoch: int, start: int, stop: int) -> Draws:
        """The sequences at some places of an epoch of a source."""
        place = np.arange(start, stop)
        sources, epochs = np.full(place.size, source, np.int32), np.full_like(place, epoch)
        if self._shuffle == "global":  # with one size and key for all
            key = np.array(self._key(source, epoch), np.uint64)
            return Draws(sources, epochs, permute(place, size=self.sizes[source], key=key))
        return Draws(sources, epochs, self.indices(sources, epochs, place))

    # -- keys -------------------------------------------------------------------------------------------

    def _sizes_of(self, source: npt.NDArray[np.integer]) -> Longs:
        """Sequences in an epoch of each source; int64 [n], or [] for a single source."""
        return self.sizes[0] if self.sizes.size == 1 else self.sizes[source]

    def _keys(self, source: npt.NDArray[np.integer], epoch: Longs) -> Words:
        """The shuffle's key for an epoch of a source; uint64 [n], or [] for one key for all."""
        of_one = source.size and (self.sizes.size == 1 or (source == source[0]).all())
        if of_one and (epoch == epoch[0]).all():
            return np.array(key_of(self._seed, self._source_keys[source[0]], int(epoch[0])), np.uint64)
        few, which = np.unique(np.stack((source, epoch)), axis=1, return_inverse=True)
        return np.array([self._key(s, e) for s, e in zip(*few.tolist())], np.uint64)[which.ravel()]

    def _key(self, source: int, epoch: int) -> int:
        return key_of(self._seed, self._source_keys[source], epoch)


def _spans(segments: Sequence[Segment], start: int, stop: int) -> Iterator[tuple[Segment, int, int]]:
    """(segment, first, last) of its positions within start..stop; none where last <= first."""
    ends = [*(segment.start for segment in segments[1:]), stop]
    for segment, end in zip(segments, ends):
        yield segment, max(start, segment.start), min(end, stop)


def _at(segments: Sequence[Segment], position: int) -> Segment:
    """The segment of a position."""
    return [each for each in segments if each.start <= position][-1]


class TokenStream(Stream):
    """The stream of a batch of tokens; see `tokens`. Sums and segments are made when a step needs them."""

    def _prepare(self) -> None:
        recipe = self._of()
        if isinstance(recipe.sequence, OwnOrder):
            raise RecipeError(f"{recipe.sequence.summary()} has its own order; give Batch(sequences=)")
        self.check_tokens()
        for turns, stop in zip(self._turns, [*(after.step for after in self._turns[1:]), math.inf]):
            sizes = [size for first, size in self._batch.stages if turns.step < first <= stop]
            least = min([self._batch.size(turns.step), *sizes])  # of the next amounts' first step, too
            drawn = [(source, *self._tokens.of_epochs[source]) for source in turns.sources.tolist()]
            for source, _, longest in drawn:
                if longest > least:
                    raise RecipeError(
                        f"source {recipe.source_names[source]!r} ({recipe.sources[source]!r}) has a sequence "
                        f"of {longest} tokens, more than a step of {least}: give Batch(tokens=) at least "
                        f"{longest}, or cut long sequences, as by Documents(max_len={least})"
                    )
        self._cut = lru_cache(1024)(self._make_cut)
        self._near = KnownPosition(0, 0)
        self._settle()

    def _shorten(self, short: Short) -> None:
        super()._shorten(short)
        self._near = KnownPosition(0, 0)  # it lies behind the short step, as if the amounts had gone on

    def _amount(self, position: int, segment: int) -> int:
        """Tokens."""
        return self.tokens_before(position, [self._segment(i) for i in range(segment + 1)])

    def start(self, step: int) -> int:
        short = next((each for each in self._shorts if each.step == step), None)
        return self._cut(step) if short is None else short.position

    def step_at(self, position: int) -> int:
        step = self._batch.step(self.tokens_before(position, self.segments))
        while self.start(step) > position:
            step -= 1
        while self.start(step + 1) <= position:
            step += 1
        return step

    def steps(self, positions: Longs) -> tuple[Longs, Longs]:
        step, place = np.zeros((2, positions.size), np.int64)
        order, done = np.argsort(positions, kind="stable"), 0
        while done < order.size:  # step by step
            now = self.step_at(int(positions[order[done]]))
            stop = int(np.searchsorted(positions, self.start(now + 1), sorter=order))
            mine = order[done:stop]
            step[mine], place[mine], done = now, positions[mine] - self.start(now), stop
        return step, place

    def bounds(self, step: int) -> tuple[int, int]:
        start, stop = self.start(step), self.start(step + 1)
        steps = self._of().steps
        if (steps is None or step < steps) and (self.all_drawn is None or stop <= self.all_drawn):
            return start, stop  # without summing up to the end
        return self.within(start, stop)

    def segments_before(self, step: int) -> Sequence[Segment]:
        return [self._segment(i) for i, turns in enumerate(self._turns) if not i or turns.step < step]

    def _make_cut(self, step: int) -> int:
        target, near = self._due(step), self._near
        if not target:
            return 0
        near = near if near.tokens < target else KnownPosition(0, 0)
        position, self._near = self.cut(target, self.segments_before(step), near)
        return position


# by id, as equal recipes may differ in stores; an entry goes when its recipe does
_streams: dict[int, tuple[weakref.ref[Recipe], Stream]] = {}


def stream_of(recipe: Recipe, before: Stream | None = None) -> Stream:
    """A recipe's stream; cached, since it asks the stores for their sizes. before: see `Stream`."""
    key = id(recipe)
    found = _streams.get(key)
    if found is None:
        ref = weakref.ref(recipe, lambda _: _streams.pop(key, None))
        kind = Stream if recipe.batch.tokens is None else TokenStream
        found = _streams[key] = ref, kind(recipe, before)
    return found[1]


def extend(recipe: Recipe, before: Recipe) -> None:
    """Make the stream of a recipe that has further amendments of that of the one before, if there is one."""
    known = _streams.get(id(before))
    if known is not None:
        stream_of(recipe, known[1])


def start_of_step(recipe: Recipe, step: int) -> int:
    """The first position of a step, as if the stream had no end: the sequences of all steps before it."""
    return stream_of(recipe).start(step)


def step_at(recipe: Recipe, tokens: float) -> int:
    """The first step before which a recipe draws at least so many tokens, as if it had no end.

    As the rule counts them, before a packing truncates or drops any: a row has its length, and others are
    looked up in the index, about an epoch of each source. What `then` says for that step or a later one
    changes nothing of it: `batch.then(step_at(recipe, 250e9), 512)`.

    tokens: a whole number from 0. Raises RecipeError for any other, for a rule that pads rows or does not
    tell its tokens, and for a stream without tokens.
    """
    if type(count := whole(tokens)) not in (int, float) or not 0 <= count < 2**62 or count != int(count):
        raise RecipeError(f"step_at({tokens!r}): a whole number of tokens from 0")
    rule, stream, count = recipe.sequence, stream_of(recipe), int(count)
    if not count:
        return 0
    if rule.row_length:
        return stream.step_at((count - 1) // rule.row_length) + 1
    if why := recipe.why_uncounted():
        raise RecipeError(f"step_at: {why}; give the step")
    stream.check_tokens()
    _, reached = stream.cut(count, stream.segments, KnownPosition(0, 0))
    return stream.step_at(reached.position) + 1


def steps_of(recipe: Recipe, positions: Longs) -> tuple[Longs, Longs]:
    """The step that each position falls in, and which of its sequences it is; int64 [n] each."""
    return stream_of(recipe).steps(positions)


def num_positions(recipe: Recipe) -> int | None:
    """Number of sequences in all steps; None if the stream is endless."""
    return stream_of(recipe).end


def num_steps(recipe: Recipe) -> int | None:
    """Number of steps, including a short last one; None if the stream is endless."""
    stream = stream_of(recipe)
    if stream.all_drawn is None:
        return recipe.steps
    end = stream.end
    return None if end is None else stream.step_at(end - 1) + 1 if end else 0


def has_step(recipe: Recipe, step: int) -> bool:
    """Whether the stream has not ended before a step."""
    stream = stream_of(recipe)
    if stream.all_drawn is None:
        return recipe.steps is None or step < recipe.steps
    start, stop = stream.bounds(step)
    return start < stop


def is_over_early(recipe: Recipe) -> bool:
    """Whether the stream ends before the `steps` of its recipe, as all amounts are drawn."""
    return stream_of(recipe).is_over_early


def short_steps(recipe: Recipe) -> list[int]:
    """The steps in which amounts end before the next ones begin; not the last one of the stream."""
    return stream_of(recipe).short_steps


def cut_off(recipe: Recipe) -> set[int]:
    """First steps of amounts that end, and of which the next ones leave some undrawn.

    Raises RecipeError for amounts that begin after all before them are drawn.
    """
    data = recipe.data
    if not isinstance(data, Mixture) or all(part.is_endless for part in data.parts[:-1]):
        return set()  # without the schedule of all changes so far
    return stream_of(recipe).cut_off


def draws_of_step(recipe: Recipe, step: int) -> Draws:
    """The global batch of one step, in order; empty past the end of the stream.

    Depends on the recipe and the step alone. Raises RecipeError for a negative step.
    """
    if step < 0:
        raise RecipeError(f"step {step}: steps count from 0")
    stream = stream_of(recipe)
    return _draws(recipe, stream, *stream.bounds(step), step + 1)


def draws_between(recipe: Recipe, start: int, stop: int) -> Draws:
    """Positions [start, stop) of the stream, cut off at its end.

    Raises RecipeError for positions below 0, or beyond 2**62.
    """
    stream = stream_of(recipe)
    return _draws(recipe, stream, *stream.within(start, stop))


def _draws(recipe: Recipe, stream: Stream, start: int, stop: int, before: int | None = None) -> Draws:
    """Positions [start, stop) of the stream. before: a step that they come before; None for any."""
    if start < 0 or stop >= 2**62:
        raise RecipeError(f"positions {start}..{stop}: the stream counts them from 0 to 2**62 - 1")
    if isinstance(recipe.sequence, OwnOrder):
        return recipe.sequence.draws_between(recipe, start, stop)
    return stream.draws(start, stop, None if before is None else stream.segments_before(before))


def draws_of_source(recipe: Recipe, source: int, start: int, stop: int) -> Draws:
    """Draws start..stop of one source, counted by its own draws from 0, wherever they come in the stream.

    Raises RecipeError for a rule with its own order.
    """
    if isinstance(recipe.sequence, OwnOrder):
        raise RecipeError(f"{recipe.sequence.summary()} has an order of its own; look for draws by step")
    count = np.arange(start, stop)
    return stream_of(recipe).numbered(np.full(count.size, source, np.int32), count)


def lanes_of_step(recipe: Recipe, step: int) -> Longs | None:
    """The lane of each draw of a step, int64 [n]; None unless the recipe's order is by blocks."""
    if not isinstance(recipe.shuffle, Blocks) or isinstance(recipe.sequence, OwnOrder):
        return None
    stream = stream_of(recipe)
    return stream.places(*stream.bounds(step), stream.segments_before(step + 1))[2] % recipe.shuffle.lanes


def drawn_until(recipe: Recipe, step: int) -> tuple[Longs, Floats] | None:
    """Draws of each source before `step`: sequences, int64 [num_sources], and epochs, float64.

    None for a rule with its own order.
    """
    if isinstance(recipe.sequence, OwnOrder):
        return None
    stream = stream_of(recipe)
    position, _ = stream.bounds(step)
    drawn = _at(stream.segments_before(step + 1), position).counts(position)
    return drawn, drawn / stream.sizes


def asked_until(recipe: Recipe, step: int) -> Floats | None:
    """The sequences of each source that the shares make before `step`; float64 [num_sources].

    None for a rule with its own order.
    """
    if isinstance(recipe.sequence, OwnOrder):
        return None
    stream = stream_of(recipe)
    return stream.asked(stream.bounds(step)[0], stream.segments_before(step + 1))
