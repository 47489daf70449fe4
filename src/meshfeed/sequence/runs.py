"""A rank's portion of a step, and where its tokens are in what its reader has read.

All rules share this geometry. A plan gives *slices* of a pack, which count padding. A portion turns them into
ranges of draws, which do not. A reader stores the slices of its group back to back; `Runs` say which part
goes where in a rank's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Longs
from meshfeed.intervals import among, distinct
from meshfeed.native import ARRAY, LONGS, WHOLE, compiled
from meshfeed.order import Draws, Places
from meshfeed.plan import CpSplit, Pack, Slices, StepPlan
from meshfeed.plan.types import held_slices, packs_of_rank
from meshfeed.recipe import Recipe

Edges = tuple[int, ...]
"""The starts of the slices of a row, then their stops."""
M = TypeVar("M")


# What loops.c widens, in its order: the types of tokens in stores, to that of tokens and labels in fields.
_NARROW = ("uint8", "int8", "uint16", "int16", "uint32", "int32")
_KIND = {(np.dtype(name), np.dtype(np.int64)): kind for kind, name in enumerate(_NARROW)}
_COPY = -1
_FEW = 4  # NumPy copies so few runs in less time than it takes to call the loop

_copy_runs = compiled(
    "mf_copy_runs",
    *(WHOLE, WHOLE),
    *(ARRAY, WHOLE, WHOLE, WHOLE),
    *(ARRAY, WHOLE, WHOLE, WHOLE),
    *(WHOLE, LONGS, LONGS, LONGS),
)


@dataclass(frozen=True, slots=True)
class Located(Draws):
    """Draws of documents, with their place in the stream.

    Attributes:
        begins: offset of the first token in the stream of the store, and of its columns; int64 [n].
        stored: tokens that the store has of each from there on; int64 [n].
        made: what a rule has made of them, so that it is made once.
    """

    begins: Longs
    stored: Longs
    made: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Draws.__post_init__(self)
        for array in (self.begins, self.stored):
            array.flags.writeable = False

    def take(self, places: Places) -> Located:
        """The draws at some indices of this run."""
        drawn = self.source[places], self.epoch[places], self.index[places]
        return Located(*drawn, self.begins[places], self.stored[places])

    def __reduce__(self) -> tuple[Any, ...]:
        return Located, (self.source, self.epoch, self.index, self.begins, self.stored)


@dataclass(frozen=True, slots=True)
class WithExcluded(Draws):
    """Draws of pieces of a stream, with the parts of the stream that bear no loss.

    Attributes:
        holes: source -> where documents that bear none begin and end, ascending; int64 [m] each.
    """

    holes: Mapping[int, tuple[Longs, Longs]]

    def take(self, places: Places) -> WithExcluded:
        """The draws at some indices of this run."""
        drawn = self.source[places], self.epoch[places], self.index[places]
        return WithExcluded(*drawn, self.holes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, (self.source, self.epoch, self.index)  # holes may be many; a microbatch needs none


@dataclass(frozen=True, slots=True)
class Runs:
    """Tokens start..start + size of what was read are tokens at..at + size of a field; int64 [n] each."""

    at: Longs
    start: Longs
    size: Longs

    def copy(self, read: Array, out: Array) -> None:
        """Copy the runs along the last axis, and convert them to the type of `out`.

        read: [..., tokens held], with the leading axes of `out` or ones that NumPy broadcasts to them.
        """
        if _copy_runs is not None and self.at.size > _FEW and self._copy_compiled(_copy_runs, read, out):
            return
        for at, start, size in zip(self.at.tolist(), self.start.tolist(), self.size.tolist()):
            out[..., at : at + size] = read[..., start : start + size]

    def _copy_compiled(self, copy_runs: Callable[..., int], read: Array, out: Array) -> bool:
        """The same in one call; False, with `out` in any state, for what only NumPy can do."""
        kind = _COPY if read.dtype == out.dtype else _KIND.get((read.dtype, out.dtype))
        if kind is None or not read.size or not out.size or not read.ndim == out.ndim <= 2:
            return False
        if not (read.flags.c_contiguous and out.flags.c_contiguous and out.flags.writeable):
            return False
        rows, read_rows = (out.shape[0], read.shape[0]) if out.ndim == 2 else (1, 1)
        if read_rows not in (1, rows):
            return False
        done = copy_runs(
            *(kind, rows),
            *(read, read.itemsize, read.strides[0] if read_rows == rows > 1 else 0, read.shape[-1]),
            *(out, out.itemsize, out.strides[0] if rows > 1 else 0, out.shape[-1]),
            *(self.at.size, *np.array((self.at, self.start, self.size), np.int64)),
        )
        return done == rows * self.at.size

    def fill(self, value: float, out: Array) -> None:
        """Write one value to all runs."""
        Runs(self.at, np.zeros_like(self.at), self.size).copy(
            np.full(self.size.max(initial=0), value, out.dtype), out
        )

    def at_places_of(self, others: Runs) -> Runs:
        """What these runs have at the places of others, each of which is empty or inside one of them."""
        if not self.at.size:
            return self
        of = (np.searchsorted(self.at, others.at, side="right") - 1).clip(0)
        return Runs(others.at, self.start[of] + others.at - self.at[of], others.size)

    def gaps(self, width: int) -> Runs:
        """The tokens of a field that are in no run. Runs: ascending and apart. width: of the field."""
        at = np.append(0, self.at + self.size)
        size = np.append(self.at, width) - at
        some = np.flatnonzero(size > 0)
        return Runs(at[some], at[some], size[some])


def places_among(draws: Draws, documents: Mapping[int, Longs]) -> Longs:
    """Places of the draws whose index is one of some documents of their source; int64 [k].

    documents: source -> numbers, ascending.
    """
    found = [
        mine[among(documents[source], of.index)]
        for source, mine, of in draws.by_source()
        if source in documents
    ]
    return np.concatenate([np.zeros(0, np.int64), *found])


def holding(slices: Slices, sequence: npt.NDArray[np.integer], token: Longs) -> Longs:
    """Index of the slice that holds each token, -1 if none does; int64, the shape of `token`.

    slices: ascending and apart. sequence: of each token.
    """
    if not slices.sequence.size:
        return np.full(token.shape, -1)
    beyond = max(int(slices.stop.max(initial=0)), int(token.max(initial=0))) + 1
    keys = slices.sequence.astype(np.int64) * beyond + slices.start
    found = np.searchsorted(keys, sequence.astype(np.int64) * beyond + token, side="right") - 1
    return np.where((slices.sequence[found] == sequence) & (token < slices.stop[found]), found, -1)


def runs_of(own: Slices, held: Slices, at: Longs) -> tuple[Runs, Runs]:
    """Where own tokens, and their labels, are in the held ones, which are stored slice after slice.

    A label is the next token, as far as the held slice has it. own: not empty, each inside a held slice. at:
    offset of each in the field, int64 [m].
    """
    holder, offsets = holding(held, own.sequence, own.start), held.offsets
    start = (offsets - held.start)[holder] + own.start
    labels = np.minimum(own.sizes, (offsets + held.sizes)[holder] - start - 1)
    return Runs(at, start, own.sizes), Runs(at, start + 1, labels)


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeStep:
    """The step that a rank's portions are of, for a rule that looks beyond their packs; see `TakesParts`.

    Attributes:
        draws: its global batch.
        plan: which sequence goes where.
        rank: the dp_cp rank.
        served: the dp_cp ranks that its reader serves, including it.
        order: the place of each dp_cp rank among the same ranks in ascending global order.
        split: how cp groups cut their packs.
        made: what was computed of it for this rank, so that it is computed once.
    """

    draws: Draws
    plan: StepPlan
    rank: int
    served: tuple[int, ...]
    order: tuple[int, ...]
    split: CpSplit
    made: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)


def once(made: dict[Any, Any], key: object, make: Callable[[], M]) -> M:
    """What is made under a key, the first time that it is asked for."""
    if key not in made:
        made[key] = make()
    return made[key]


@dataclass(frozen=True, kw_only=True)
class Portion:
    """One rank's part of some consecutive microbatches, and the part of its delivery group.

    Small microbatches are read and delivered several at a time, which shares the fixed costs.

    Attributes:
        microbatches: their indices in the step.
        pack: their sequences, one after the other.
        draws: one for each of `pack.sequences`.
        whole: tokens of each draw, before the plan splits or truncates it; int64 [k].
        own: the token slices that this rank works on.
        tail: the slices of the dummy at the pack's end that this rank works on; they follow the own ones.
        held: the token slices of all ranks that one reader serves; each own slice is inside a held one.
        rows: sequences per microbatch; missing ones are rows of padding. 0 for a pack.
        starts: the first token of each of `pack.sequences` in its draw; int64 [k]. Above 0 if the plan has
            split a long sequence.
        idle_tokens: with packing, tokens per rank of a microbatch without a sequence, all padding.
        split: how the cp group splits the pack.
        cp_ranks: global ranks of the cp group, in the order of their slices.
        needs: names of the fields of a pack that the ranks of its reader need; None for all.
        step: the whole step, for a rule that takes parts.
        made: what was computed of it, so that it is computed once.
    """

    microbatches: range
    pack: Pack
    draws: Draws
    whole: Longs
    own: Slices
    held: Slices
    rows: int
    starts: Longs
    idle_tokens: int
    cp_ranks: tuple[int, ...]
    tail: Slices
    split: CpSplit
    needs: frozenset[str] | None = None
    step: WholeStep | None = None
    made: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    @cached_property
    def own_row(self) -> Slices:
        """The own slices of one row without padding, none empty; all rows of a portion have the same."""
        return self._row(self.own)

    @cached_property
    def held_row(self) -> Slices:
        """The held slices of one row; see `own_row`."""
        return self.own_row if self.held is self.own else self._row(self.held)

    @cached_property
    def edges(self) -> tuple[Edges, Edges]:
        """The own slices of one row, and the held ones, for a key of what they make."""
        own, held = ((*row.start.tolist(), *row.stop.tolist()) for row in (self.own_row, self.held_row))
        return own, held

    def _row(self, slices: Slices) -> Slices:
        one, length = slices.sequence == 0, int(self.pack.lengths[0]) if len(self.draws) else 0
        one &= slices.start < length
        return Slices(slices.sequence[one], slices.start[one], np.minimum(slices.stop[one], length))

    def of(self, draws: Draws) -> Portion:
        """The same part of a global batch with the same lengths.

        draws: of that batch, where the draws of this portion are numbers in it. What follows from lengths
        alone is computed once for all that are made in this way.
        """
        made = object.__new__(Portion)
        made.__dict__.update(self.__dict__, draws=draws.take(self.draws.index), made={})
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Without what only the rule needs: a microbatch is pickled with its portion."""
        return {**self.__dict__, "step": None, "made": {}}

    def draws_of(self, microbatch: int) -> Draws:
        """The draws of one of the microbatches."""
        first = (microbatch - self.microbatches.start) * self.rows
        return self.draws.between(first, first + self.rows) if self.rows else self.draws

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of this rank in a pack, including padding and dummies."""
        if not len(self.draws) and not self.pack.tail:
            return self.idle_tokens
        return int(self.own.sizes.sum() + self.tail.sizes.sum())

    @property
    def tail_tokens(self) -> Runs:
        """The tokens of the dummy: their offsets in a field, and their places in the dummy."""
        return Runs(int(self.own.sizes.sum()) + self.tail.offsets, self.tail.start, self.tail.sizes)

    def ranges(self, slices: Slices, *, extra: int = 0) -> Slices:
        """Slices of the pack as tokens of its draws, without padding.

        extra: with so many more tokens after each that is not empty, as far as its draw has them.
        """
        of = slices.sequence
        first = self.starts[of]
        start = first + slices.start
        stop = np.maximum(first + np.minimum(slices.stop, self.pack.lengths[of]), start)
        if extra:
            stop = np.where(start < stop, np.minimum(stop + extra, self.whole[of]), stop)
        return Slices(of, start, stop)

    def read(self, *, extra: int = 0) -> Slices:
        """What the reader of a pack reads: `ranges(held, extra=extra)`, computed once."""
        if ("read", extra) not in self.made:
            self.made["read", extra] = self.ranges(self.held, extra=extra)
        return self.made["read", extra]

    def runs(self, *, extra: int = 0) -> Runs:
        """The own tokens of a pack in what was read, `read(extra=extra)`."""
        return self.runs_and_labels(extra=extra)[0]

    def runs_and_labels(self, *, extra: int) -> tuple[Runs, Runs]:
        """The own tokens of a pack and their labels in what was read, `read(extra=extra)`; computed once."""
        if ("runs", extra) not in self.made:
            own, at = self.own_tokens
            self.made["runs", extra] = runs_of(own, self.read(extra=extra), at)
        return self.made["runs", extra]

    @cached_property
    def own_tokens(self) -> tuple[Slices, Longs]:
        """The own tokens of a pack as tokens of its draws, none empty, and their offsets in a field."""
        own, at = self.ranges(self.own), self.own.offsets
        some = np.flatnonzero(own.sizes)
        return Slices(own.sequence[some], own.start[some], own.stop[some]), at[some]


def portions_of(
    plan: StepPlan,
    draws: Draws,
    lengths: Longs,
    dp_cp_rank: int,
    *,
    group: Sequence[int],
    rows: int,
    split: CpSplit,
    together: int,
    rank_of_dp_cp: Longs,
    needs: frozenset[str] | None = None,
    step: WholeStep | None = None,
) -> list[Portion]:
    """One rank's portions of a step, each of `together` microbatches.

    draws: the step's global batch. lengths: tokens of each; int64 [n]. group: the dp_cp ranks that this
    rank's reader serves, including this one; they share every pack. rank_of_dp_cp: the global rank of each
    dp_cp rank at this rank's tp and pp. needs, step: see `Portion`. Raises PlanError if cp cannot
    split the sequences.
    """
    portions: list[Portion] = []
    starts = range(0, plan.num_microbatches, together)
    for start, pack in zip(starts, packs_of_rank(plan, dp_cp_rank, together)):
        own, tail = _parted(pack, [pack.cp_rank], split)
        first = dp_cp_rank - pack.cp_rank
        held = own if len(group) == 1 else _parted(pack, [rank - first for rank in group], split)[0]
        of = plan.sequence[pack.sequences]
        portions.append(
            Portion(
                microbatches=range(start, min(start + together, plan.num_microbatches)),
                pack=pack,
                draws=draws.take(of),
                whole=lengths[of],
                own=own,
                held=held,
                rows=rows,
                starts=plan.start[pack.sequences],
                idle_tokens=plan.idle_tokens,
                cp_ranks=tuple(rank_of_dp_cp[first : first + pack.cp_size].tolist()),
                tail=tail,
                split=split,
                needs=needs,
                step=step,
            )
        )
    return portions


_NO_SLICES = Slices(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


def _parted(pack: Pack, cp_ranks: Sequence[int], split: CpSplit) -> tuple[Slices, Slices]:
    """The slices of a pack's sequences, and those of the dummy at its end."""
    slices = held_slices(pack, cp_ranks, split)
    if not pack.tail:
        return slices, _NO_SLICES
    of_draws = slices.sequence < pack.sequences.size
    return slices.only(of_draws), slices.only(~of_draws)


def dtype_of(recipe: Recipe, draws: Draws | None = None) -> np.dtype[Any]:
    """The type that holds the tokens of all stores, or those of some draws; the first one's without any."""
    if len(recipe.sources) == 1:
        return recipe.sources[0].dtype
    sources = range(len(recipe.sources)) if draws is None else distinct(draws.source).tolist() or [0]
    dtypes = [recipe.sources[source].dtype for source in sources]
    found = np.result_type(*dtypes)
    # NumPy's type for uint64 and int64 is float64, which rounds
    return np.dtype(np.int64) if found.kind == "f" and all(each.kind in "iu" for each in dtypes) else found
