"""Balances packs for encoders as well as for the language model.

The packs of `choose` are equal for the language model. The work of an encoder follows the sizes of images
and the seconds of audio and video, so packs of equal tokens differ in it.

*Start.* The packs of `choose`; or, where encoders are far from even, the same groups of ranks filled again:
each sequence goes to the group with the least of the cost that is its largest, the encoders' sequences first.

*Target.* What a rank should do in each microbatch. The ranks of a microbatch wait for each other, but two
microbatches need not be equal: sequences that exceed the mean share a microbatch.

*Swap.* Each pack above a target, the furthest first, tries packs that are far below the same target. The two
swap up to two sequences each for the other's, if that makes the larger excess of the two smaller.

Costs are compared relative to their means, those of encoders times `ENCODER_WEIGHT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.intervals import numbered
from meshfeed.native import ARRAY, LONGS, WHOLE, compiled
from meshfeed.plan.fill import place
from meshfeed.plan.packing import TOLERANCE, Packing
from meshfeed.plan.problem import Placement, Room, room_of
from meshfeed.plan.types import CpSplit, Encoder, FloatArray, LongArray, StepPlan

ENCODER_WEIGHT = 0.25
"""Weight of an uneven encoder beside an equally uneven language model, which does several times its work: an
encoder of 0.7B parameters with four patches a token does a third of the work of 8B on an image, and none
on text."""

FAR = 0.08
"""If encoders, so weighted, are further from even than this, the groups are filled again."""

MOST_SHARE = 1.5
"""A microbatch takes at most this many times its share of an encoder's work, however large its largest."""

MOST_COSTS = 4
"""As many as loops.c has places for."""

TRIES, MOST_SWEEPS = 4, 12
"""How many other packs a pack above its target tries in a sweep; the number of sweeps."""

ENOUGH = 0.25
"""A swap that removes this share of the difference between two packs is made without seeking a better one."""

WORTH = 4
"""A sweep in which fewer than one in this many packs found a swap is the last."""

MOST_CHOSEN = 8
"""How many sequences of a pack are considered, evenly spread from its first to its last."""

WORTH_UNEVEN = 16
"""Replaces WORTH if the language model is uneven by tokens alone: few swaps help, but each does."""

GROWTH = 8
"""How many sequences beyond the largest pack's number a pack can gain while it swaps."""


_swap = compiled(
    "mf_swap",
    *(LONGS, ARRAY, WHOLE, WHOLE),
    *(WHOLE, ARRAY, LONGS),
    *(WHOLE, LONGS, LONGS, LONGS, ARRAY),
    *(WHOLE, LONGS, LONGS),
    *(LONGS, ARRAY, ARRAY),
)


def even_out(
    plan: StepPlan,
    lengths: npt.ArrayLike,
    encoder_work: npt.ArrayLike,
    packing: Packing,
    *,
    dp: int,
    cp: int = 1,
    cp_split: CpSplit = "zigzag",
    encoder: Encoder = "group",
) -> StepPlan:
    """A plan with packs that are balanced for encoders as well as for the language model.

    Where every rank of a cp group encodes all parts of its pack, groups that are wider than their sequences
    need may become several narrow ones.

    plan: of `plan_step` with the other arguments; "in_order" stays as it is. lengths: as given to it.
    encoder_work: work of an encoder on the images, audio or video of each sequence, in any unit, on the ranks
        that hold the sequence; float [n], or [num_encoders, n] for up to 3 encoders.
    encoder: whether these ranks share the work ("group"), or each does all of it ("with sample"). If all
        ranks share it, there is nothing to even out.

    Raises PlanError for work that is negative or of another shape.
    """
    whole = np.asarray(lengths, np.int64).ravel()
    works = _works(encoder_work, whole.size)
    (kept,) = np.nonzero(plan.microbatch >= 0)
    if encoder == "balanced" or packing.policy == "in_order" or not kept.size:
        return plan
    mine, of = plan.lengths[kept], plan.sequence[kept]
    given = Placement(plan.microbatch[kept], plan.first_rank[kept], plan.cp_size[kept], plan.num_microbatches)
    # a piece of a sequence has its share of the parts
    work, room = works[:, of] * (mine / whole[of]), room_of(packing, dp=dp, cp=cp, split=cp_split)
    placed = evened(given, mine, work, packing, room, is_shared=encoder == "group")
    changed = plan.microbatch.copy(), plan.first_rank.copy(), plan.cp_size.copy()
    for new, some in zip(changed, (placed.microbatch, placed.first_rank, placed.cp_size)):
        new[kept] = some
    microbatch, first_rank, cp_size = changed
    return replace(plan, microbatch=microbatch, first_rank=first_rank, cp_size=cp_size)


def _works(encoder_work: npt.ArrayLike, num_sequences: int) -> FloatArray:
    given = np.asarray(encoder_work)
    works = np.atleast_2d(given)
    if given.dtype.kind not in "iuf" or works.ndim > 2 or works.shape[-1] != num_sequences:
        raise PlanError(
            f"encoder_work: {given.dtype} {list(given.shape)}; give the work on each of {num_sequences} "
            f"sequences"
        )
    if len(works) >= MOST_COSTS:
        raise PlanError(f"encoder_work of {len(works)} encoders: at most {MOST_COSTS - 1}")
    if not (np.isfinite(works) & (works >= 0)).all():
        raise PlanError(f"encoder_work: {works.min()} to {works.max()}; work is finite, and 0 or more")
    return works.astype(np.float64)


def evened(
    placed: Placement,
    lengths: LongArray,
    encoder_work: FloatArray,
    packing: Packing,
    room: Room,
    *,
    is_shared: bool = True,
) -> Placement:
    """More even packs on the same groups of ranks, or on parts of them; `placed` itself if none are found.

    The largest weighted cost, relative to its mean, becomes smaller.

    lengths: as given to `choose`; int64 [n], n >= 1.
    encoder_work: of each encoder on each sequence; float64 [num_encoders, n], num_encoders < MOST_COSTS.
    is_shared: whether the ranks of a group share it. Otherwise, groups may become narrower.
    """
    encoder_work = encoder_work[encoder_work.any(axis=1)]
    if not encoder_work.size:
        return placed
    groups, pack = _Groups.of(placed, room.num_ranks)
    size = placed.cp_size
    work = np.vstack([packing.cost.load(lengths, size) * size, encoder_work])
    packs = _Packs.of(groups, lengths, work, packing, room, is_shared)
    loads = packs.loads(pack)
    uneven = packs.unevenness(loads)
    least, best = uneven.max(), placed
    narrow = groups if is_shared else groups.narrowed(pack, lengths, room)
    if narrow.size.size > groups.size.size:
        narrower = _Packs.of(narrow, lengths, work, packing, room, is_shared)
        fills = (narrower.refilled(lengths, room.max_sequences, by_tokens=each) for each in (False, True))
        filled = next((each for each in fills if each is not None), None)
        if filled is not None:
            of_filled = narrower.loads(filled)
            before = narrower.unevenness(of_filled)
            swapped = narrower.swapped(filled, of_filled, room.max_sequences, before)
            after = narrower.unevenness(narrower.loads(swapped)).max()
            if after < least:
                least, best = after, narrow.placement(swapped)
            if after <= FAR:
                return best
    if uneven.max() > FAR:
        again = packs.refilled(lengths, room.max_sequences)
        if again is not None and packs.unevenness(of_again := packs.loads(again)).max() < uneven.max():
            pack, loads = again, of_again
    swapped = packs.swapped(pack, loads, room.max_sequences, uneven)
    return groups.placement(swapped) if packs.unevenness(packs.loads(swapped)).max() < least else best


@dataclass(frozen=True, slots=True)
class _Groups:
    """The cp groups of a step, one for each pack.

    Attributes:
        microbatch, first_rank, size: of each; see `Placement`; int64 [num_packs].
        num_microbatches, num_ranks: of the step.
    """

    microbatch: LongArray
    first_rank: LongArray
    size: LongArray
    num_microbatches: int
    num_ranks: int

    @classmethod
    def of(cls, placed: Placement, num_ranks: int) -> tuple[_Groups, LongArray]:
        """Those that have sequences, and the pack of each sequence; int64 [n]."""
        count = placed.num_microbatches
        place_of_pack = placed.microbatch.astype(np.int64) * num_ranks + placed.first_rank
        size_at_place = np.zeros(count * num_ranks, np.int64)
        size_at_place[place_of_pack] = placed.cp_size
        places = np.flatnonzero(size_at_place)
        pack = (np.cumsum(size_at_place > 0) - 1)[place_of_pack]
        return cls(places // num_ranks, places % num_ranks, size_at_place[places], count, num_ranks), pack

    def narrowed(self, pack: LongArray, lengths: LongArray, room: Room) -> _Groups:
        """Each cut into groups that are as narrow as its longest sequence allows. pack: of each sequence."""
        longest = np.zeros(self.size.size, np.int64)
        np.maximum.at(longest, pack, lengths)
        size = self.size.copy()
        for wider, limit in zip(room.size_of[::-1], room.limit_of[::-1]):
            fits = room.align.padded(longest, wider) <= limit
            size[fits & (self.size % wider == 0)] = wider
        of, number = numbered(self.size // size)
        first_rank = self.first_rank[of] + number * size[of]
        return replace(self, microbatch=self.microbatch[of], first_rank=first_rank, size=size[of])

    def placement(self, pack: LongArray) -> Placement:
        """Where sequences go that are in these packs; int64 [n]."""
        microbatch, first_rank, size = (
            each[pack].astype(np.int32) for each in (self.microbatch, self.first_rank, self.size)
        )
        return Placement(microbatch, first_rank, size, self.num_microbatches)


@dataclass(frozen=True, slots=True)
class _Packs:
    """The packs of a step, and what each sequence costs in them.

    Attributes:
        groups: of ranks.
        size_at: index into the sizes that occur, of each pack; int64 [num_packs].
        limits: padded tokens that each pack can hold; int64 [num_packs].
        cost: each cost of each sequence on a rank of a group of each size, over what a rank does on average
            in a microbatch if each part is encoded once; the language model's, then the encoders'; float64
            [num_costs, num_sizes, n].
        padded: padded tokens of each sequence on such a group; int64 [num_sizes, n].
    """

    groups: _Groups
    size_at: LongArray
    limits: LongArray
    cost: FloatArray
    padded: LongArray

    @classmethod
    def of(
        cls,
        groups: _Groups,
        lengths: LongArray,
        work: FloatArray,
        packing: Packing,
        room: Room,
        is_shared: bool,
    ) -> _Packs:
        """The packs of some groups.

        work: of the language model on each sequence as planned, on all of its ranks together; then of each
            encoder, some of it above 0; float64 [num_costs, n].
        """
        sizes = np.flatnonzero(np.bincount(groups.size)).astype(np.int32)
        size_at = np.searchsorted(sizes, groups.size)
        cost = np.empty((len(work), sizes.size, lengths.size))
        cost[0] = packing.cost.load(lengths, sizes[:, None])
        np.divide(work[1:, None], sizes[:, None] if is_shared else 1, out=cost[1:])
        cost /= (work.sum(axis=1) / (room.num_ranks * groups.num_microbatches))[:, None, None]
        return cls(
            groups=groups,
            size_at=size_at,
            limits=room.align.limit(packing.capacity, sizes)[size_at],
            cost=cost,
            padded=room.align.padded(lengths, sizes[:, None]),
        )

    @property
    def weights(self) -> FloatArray:
        """Weight of the unevenness of each cost; float64 [num_costs]."""
        return np.where(np.arange(len(self.cost)) > 0, ENCODER_WEIGHT, 1.0)

    def load(self, cost: FloatArray, pack: LongArray) -> FloatArray:
        """One cost of each pack on each of its ranks; float64 [num_packs].

        cost: float64 [num_sizes, n]. pack: of each sequence, -1 for none; int64 [n].
        """
        at = np.flatnonzero(pack >= 0)
        sums = np.bincount(pack[at], cost[self.size_at[pack[at]], at], self.groups.size.size)
        return sums.astype(np.float64)

    def loads(self, pack: LongArray) -> FloatArray:
        """Each cost of each pack; float64 [num_costs, num_packs]."""
        return np.stack([self.load(each, pack) for each in self.cost])

    def unevenness(self, loads: FloatArray) -> FloatArray:
        """How much longer each cost makes the step than if it were even, weighted; float64 [num_costs]."""
        tops = np.zeros((len(loads), self.groups.num_microbatches))
        for top, load in zip(tops, loads):
            np.maximum.at(top, self.groups.microbatch, load)
        return (tops.sum(axis=1) / self.groups.num_microbatches - 1) * self.weights

    def means(self, load: FloatArray) -> FloatArray:
        """Mean of one cost over the ranks of each microbatch; float64 [num_microbatches]."""
        groups = self.groups
        on_all_ranks = np.bincount(groups.microbatch, load * groups.size, groups.num_microbatches)
        return on_all_ranks / groups.num_ranks

    def targets(self, own: FloatArray, means: FloatArray) -> FloatArray:
        """Target of one cost for each rank of each microbatch; float64 [num_microbatches].

        own: the cost of each sequence on each rank of its group; float64 [n]. means: see `means`.

        If the largest sequences exceed the mean, the first microbatch takes as many of them as it has packs,
        one each, and leaves less to the next.
        """
        num_packs = np.bincount(self.groups.microbatch, minlength=self.groups.num_microbatches)
        # the largest sequence left for each microbatch
        taken = np.minimum(np.cumsum(num_packs) - num_packs, own.size - 1)
        largest = -np.partition(-own, taken)[taken]
        targets = np.zeros(self.groups.num_microbatches)
        rest = share = float(means.sum())
        for m, top in enumerate(largest.tolist()):
            mean = means.item(m) * rest / share if share > 0 else 0.0
            targets[m] = max(mean, top)
            rest = max(rest - min(targets.item(m), MOST_SHARE * mean), 0.0)
            share -= means.item(m)
        return targets

    def refilled(
        self, lengths: LongArray, max_sequences: int, *, by_tokens: bool = False
    ) -> LongArray | None:
        """The pack of each sequence if all packs are filled again, int64 [n]; None if one finds no room.

        For each cost in turn, the language model's last, the sequences for which it is the largest cost go to
        the pack furthest below its target, the most costly first. by_tokens: by the language model's alone,
        which leaves less room unused.
        """
        pack = np.full(lengths.size, -1)
        free, slots = self.limits.copy(), np.full(self.groups.size.size, max_sequences)
        largest = self.cost[: 1 if by_tokens else None, 0].argmax(axis=0)
        even = np.ones(self.groups.num_microbatches)
        for c in (*range(1, len(self.cost)), 0):
            members = np.flatnonzero(largest == c)
            members = members[np.argsort(-self.cost[c, 0, members], kind="stable")]
            gaps, any_size = self.load(self.cost[c], pack), np.zeros(members.size, np.int64)
            if c:
                gaps -= self.targets(self.cost[c, 0], even)[self.groups.microbatch]
            into = place(
                *(lengths, self.padded, self.cost[c], members, any_size),
                *(self.size_at, free.copy(), slots.copy(), gaps),
            )
            if (into < 0).any():
                return None
            pack[members] = into
            np.subtract.at(free, into, self.padded[self.size_at[into], members])
            np.subtract.at(slots, into, 1)
        return pack

    def swapped(
        self, pack: LongArray, loads: FloatArray, max_sequences: int, before: FloatArray
    ) -> LongArray:
        """The pack of each sequence once packs have swapped; int64 [n].

        loads: of the packs. before: the `unevenness` of each cost as planned or filled; float64 [num_costs].
        """
        contents = self.contents(pack, loads, TOLERANCE, max_sequences)
        swap(contents, TOLERANCE, WORTH if before[0] <= TOLERANCE else WORTH_UNEVEN)
        held = np.arange(contents.members.shape[1]) < contents.counts[:, None]
        swapped = np.empty_like(pack)
        swapped[contents.members[held]] = np.arange(contents.counts.size).repeat(contents.counts)
        return swapped

    def contents(self, pack: LongArray, loads: FloatArray, tolerance: float, max_sequences: int) -> Contents:
        """The contents of packs, and how far each is above its targets."""
        own = self.cost[:, self.size_at[pack], np.arange(pack.size)]
        longest = np.zeros(self.groups.num_microbatches)
        np.maximum.at(longest, self.groups.microbatch[pack], own[0])
        # excess above the tolerance is more than this share of the mean
        most = np.maximum(self.means(loads[0]) * (1 + tolerance), longest) - tolerance
        targets = [most, *(self.targets(own[c], self.means(loads[c])) for c in range(1, len(own)))]
        counts = np.bincount(pack, minlength=self.groups.size.size)
        members = np.zeros((counts.size, int(counts.max()) + GROWTH), np.int64)
        # NumPy sorts small types several times faster
        by_pack = np.argsort(pack.astype(np.uint16) if counts.size <= 1 << 16 else pack, kind="stable")
        members[np.arange(members.shape[1]) < counts[:, None]] = by_pack
        held = np.zeros(counts.size, np.int64)
        np.add.at(held, pack, self.padded[self.size_at[pack], np.arange(pack.size)])
        no_sequence = ((0, 0),) * (self.cost.ndim - 1) + ((0, 1),)
        return Contents(
            cost=np.pad(self.cost * self.weights[:, None, None], no_sequence),
            padded=np.pad(self.padded, no_sequence[1:]),
            size_at=self.size_at,
            free=self.limits - held,
            slots=np.minimum(max_sequences, members.shape[1]) - counts,
            excess=(loads - np.stack(targets)[:, self.groups.microbatch]) * self.weights[:, None],
            members=members,
            counts=counts,
        )


# -- swapping ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Contents:
    """The packs of a step while they swap.

    Attributes:
        cost: each cost of each sequence on a rank of a group of each size, and 0 for no sequence; float64
            [num_costs, num_sizes, n + 1].
        padded: padded tokens of each on such a group; int64 [num_sizes, n + 1].
        size_at: index into the sizes, of each pack; int64 [num_packs].
        free, slots: padded tokens, and sequences, that each pack can still take; int64 [num_packs].
        excess: each cost of each pack above its target; float64 [num_costs, num_packs].
        members: the sequences of each pack, ascending; the rest is undefined; int64 [num_packs, most].
        counts: how many each pack has; int64 [num_packs].
    """

    cost: FloatArray
    padded: LongArray
    size_at: LongArray
    free: LongArray
    slots: LongArray
    excess: FloatArray
    members: LongArray
    counts: LongArray


def swap(contents: Contents, tolerance: float, worth: int = WORTH) -> int:
    """Swap until no excess is above the tolerance, or few swaps help; returns how many were made.

    contents: its arrays are changed; at most MOST_COSTS costs. worth: see `WORTH`.
    """
    if _swap is not None:
        return _swapped(_swap, contents, tolerance, worth)
    num_packs, num_swaps = contents.counts.size, 0
    for sweep in range(MOST_SWEEPS):
        before, worst = num_swaps, contents.excess.max(axis=0)
        above = [p for p in np.argsort(-worst, kind="stable").tolist() if worst[p] > tolerance]
        lowest = np.argsort(contents.excess, axis=1, kind="stable")
        turns = [sweep * TRIES] * len(lowest)
        for p in above:
            at = int(contents.excess[:, p].argmax())
            now = float(contents.excess[at, p])
            if now <= tolerance:
                continue
            first, turns[at] = turns[at], turns[at] + 1
            least, best = now - tolerance / 10, None
            for turn in range(first, first + min(TRIES, num_packs)):
                q = int(lowest[at, turn % num_packs])
                if q == p or contents.excess[at, q] >= now:
                    continue
                enough = max(tolerance, now - ENOUGH * (now - float(contents.excess[at, q])))
                found = _best_swap(contents, p, q, enough, least)
                if found is not None:
                    least, best = found[0], (q, *found[1:])
                if best is not None and least <= enough:
                    break
            if best is not None:
                _make(contents, p, *best)
                num_swaps += 1
        if (num_swaps - before) * worth <= len(above):
            break
    return num_swaps


def _swapped(compiled_swap: Callable[..., int], contents: Contents, tolerance: float, worth: int) -> int:
    """`swap` in one compiled call."""
    num_costs, num_sizes, num_columns = contents.cost.shape
    num_packs = contents.counts.size
    bounds = np.array([MOST_SWEEPS, TRIES, worth], np.int64)
    limits = np.array([tolerance, tolerance / 10, ENOUGH])
    lowest, heaps = np.empty((num_costs, num_packs), np.int64), np.empty((num_costs, num_packs, 2))
    above = np.empty((num_packs, 2))
    return compiled_swap(
        *(bounds, limits, num_costs, num_sizes),
        *(num_columns, contents.cost, contents.padded),
        *(num_packs, contents.size_at, contents.free, contents.slots, contents.excess),
        *(contents.members.shape[1], contents.members, contents.counts),
        *(lowest, heaps, above),
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """No, one or two sequences of a pack: every choice. Its own size comes before that of the other pack.

    Attributes:
        items: the sequences, n for none; int64 [k, 2].
        num: how many sequences each choice has; int64 [k].
        padded: padded tokens of each choice on a group of either size; int64 [2, k].
        cost: each cost of it; float64 [num_costs, 2, k].
    """

    items: LongArray
    num: LongArray
    padded: LongArray
    cost: FloatArray

    @classmethod
    def of(cls, contents: Contents, pack: int, other: int) -> Choices:
        """Those of a pack, for another."""
        count, none = int(contents.counts[pack]), contents.padded.shape[1] - 1
        chosen = min(count, MOST_CHOSEN)
        items = np.append(contents.members[pack, np.arange(chosen) * count // max(chosen, 1)], none)
        first, second = _up_to_two(chosen)
        sizes = contents.size_at[[pack, other], None]
        padded, cost = contents.padded[sizes, items], contents.cost[:, sizes, items]
        return cls(
            np.stack((items[first], items[second]), axis=1),
            (first < chosen).astype(np.int64) + (second < chosen),
            padded[:, first] + padded[:, second],
            cost[:, :, first] + cost[:, :, second],
        )


@lru_cache(maxsize=MOST_CHOSEN + 1)
def _up_to_two(count: int) -> tuple[LongArray, LongArray]:
    """All choices of none, one and two of `count` indices, where `count` stands for none; int64 [k] each."""
    two = np.triu_indices(count, 1)
    one = np.arange(-1, count) % (count + 1)
    return np.append(one, two[0]), np.append(np.full(one.size, count), two[1])


def _best_swap(
    contents: Contents, p: int, q: int, enough: float, below: float
) -> tuple[float, tuple[Choices, int], tuple[Choices, int]] | None:
    """The first swap of two packs that leaves at most `enough`, or else the one that leaves least.

    Returns the larger excess of the two, and what p and q give; None if it is not less than `below`.
    """
    gives, takes = Choices.of(contents, p, q), Choices.of(contents, q, p)
    more = takes.num - gives.num[:, None]
    fits = (contents.free[p] + gives.padded[0][:, None] >= takes.padded[1]) & (contents.slots[p] >= more)
    fits &= (contents.free[q] + takes.padded[0] >= gives.padded[1][:, None]) & (contents.slots[q] >= -more)
    excess = np.full(fits.shape, -np.inf)
    for c in range(len(contents.excess)):
        ours, theirs = gives.cost[c, :, :, None], takes.cost[c]
        np.maximum(excess, contents.excess[c, p] - ours[0] + theirs[1], out=excess)
        np.maximum(excess, contents.excess[c, q] - theirs[0] + ours[1], out=excess)
    excess[~fits] = np.inf
    near = np.flatnonzero((excess <= enough) & (excess < below))
    at = int(near[0]) if near.size else int(excess.argmin())
    a, b = divmod(at, takes.num.size)
    if excess[a, b] >= below:
        return None
    return float(excess[a, b]), (gives, a), (takes, b)


def _make(contents: Contents, p: int, q: int, gives: tuple[Choices, int], takes: tuple[Choices, int]) -> None:
    """Let p and q swap what they give each other."""
    for pack, (ours, a), (theirs, b) in ((p, gives, takes), (q, takes, gives)):
        count = int(contents.counts[pack])
        kept = np.setdiff1d(contents.members[pack, :count], ours.items[a])
        now = np.union1d(kept, theirs.items[b, : theirs.num[b]])
        contents.members[pack, : now.size], contents.counts[pack] = now, now.size
        contents.slots[pack] += ours.num[a] - theirs.num[b]
        contents.free[pack] += ours.padded[0, a] - theirs.padded[1, b]
        contents.excess[:, pack] = contents.excess[:, pack] - ours.cost[:, 0, a] + theirs.cost[:, 1, b]
