"""Balances packs for encoders as well as for the language model.

The packs of `choose` are equal for the language model. The work of an encoder follows the sizes of images
and the seconds of audio and video, so packs of equal tokens differ in it.

*Step.* All costs have one unit. The ranks of a microbatch wait for each other, behind the encoders and behind
the language model, so it takes the largest work of any rank, of each cost, together. What is made here
replaces the packs of `choose` only where the step becomes shorter.

*Fill.* All sequences are placed anew, in groups no wider than they need: each goes to the group with the
least of the language model's work; or the encoders' sequences first, each to the group with the least of
theirs.

*Order.* Packs of one size trade places, so that those of a microbatch are alike.

*Target.* What a rank should do in each microbatch. Two microbatches need not be equal: sequences that exceed
the mean share a microbatch.

*Swap.* Each pack above a target, the furthest first, tries packs that are far below the same target. The two
swap up to two sequences each for the other's, if that makes the larger excess of the two smaller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Floats, Ints, Longs
from meshfeed.errors import PlanError
from meshfeed.intervals import numbered
from meshfeed.multimodal.encoders.assign import descending, is_work, share
from meshfeed.multimodal.native import compiled
from meshfeed.native import ARRAY, LONGS, WHOLE
from meshfeed.plan.fill import Sequences, narrowest_holding, place
from meshfeed.plan.packing import TOLERANCE, CostModel, Packing, Room, room_of
from meshfeed.plan.step import Placement, choose, fewest_microbatches
from meshfeed.plan.types import CpSplit, Encoder, StepPlan

N = TypeVar("N", np.float64, np.int64)
Parts = Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]

FAR = 0.06
"""Where packs make the step longer than even ones by more, as a share of the language model's time, they are
made in another way, too."""

TEXT = 0.1
"""From this share of the language model's work on, sequences without parts make it even behind the others."""

MOST_SHARE = 1.5
"""A microbatch takes at most this many times its share of an encoder's work, however large its largest."""

MOST_COSTS = 4
"""As many as loops.c has places for."""

TRIES, MOST_SWEEPS = 2, 12
"""How many other packs a pack above its target tries in a sweep; the number of sweeps."""

ENOUGH = 0.25
"""A swap that removes this share of the difference between two packs is made without seeking a better one."""

WORTH = 4
"""A sweep in which fewer than one in this many packs found a swap is the last."""

MOST_CHOSEN = 8
"""How many sequences of a pack are considered, evenly spread from its first to its last."""

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
    pp: int = 1,
    vpp: int = 1,
    cp_split: CpSplit = "zigzag",
    encoder: Encoder = "group",
    parts: Parts | None = None,
) -> StepPlan:
    """A plan with packs that are balanced for encoders as well as for the language model.

    The step is shorter by what it is predicted to take, or the plan is the one given. Groups that are wider
    than their sequences need may become several narrow ones. In a pipeline, it may have fewer microbatches:
    the largest images of many microbatches outlast the bubble of few.

    plan: of `plan_step` with the other arguments; "in_order" stays as it is. lengths: as given to it.
    encoder_work: work of an encoder on the images, audio or video of each sequence, on the ranks that hold
        the sequence, in the unit of the packing's cost: see `CostModel.patch_tokens`; float [n], or
        [num_encoders, n] for up to 3 encoders.
    pp, vpp: pipeline stages and virtual stages per rank. Stages count as equal: one with encoders has fewer
        layers of the language model.
    encoder: whether these ranks share the work ("group"), or each does all of it ("with sample"). If all
        ranks share it, there is nothing to even out.
    parts: of each encoder, the sequence and the work of each image, say; int [p] and float [p]. Ranks can
        share them one by one. None, or where sequences are cut: as if each sequence had one.

    Raises PlanError for work that is negative or of another shape.
    """
    whole = np.asarray(lengths, np.int64).ravel()
    works = _works(encoder_work, whole.size)
    is_alone = plan.num_ranks == pp == 1  # its steps are as long, whatever its packs hold
    if encoder == "balanced" or packing.policy == "in_order" or is_alone:
        return plan
    if not (plan.kept.size and works.any()):
        return plan
    kept = plan.kept if plan.kept.size < plan.lengths.size else np.s_[:]  # mostly, all are: nothing is copied
    mine, of, room = plan.lengths[kept], plan.sequence[kept], room_of(packing, dp=dp, cp=cp, split=cp_split)
    given = Placement(plan.microbatch[kept], plan.first_rank[kept], plan.cp_size[kept], plan.num_microbatches)
    # a piece of a sequence has its share of the parts
    work = works[:, of] * (mine / whole[of]) if plan.oversize.size else works[:, kept]
    some, bubble_share = np.flatnonzero(work.any(axis=1)), (pp - 1) / vpp
    work, shared = work[some], None
    is_wide = bool(bubble_share) or plan.cp_size[kept].max() > 1
    if encoder == "group" and not is_wide:
        shared = []  # nobody to share with
    elif encoder == "group":
        shared = [_kept(*parts[c], of) for c in some.tolist()] if parts and not plan.oversize.size else []
        shared = shared or [(np.arange(mine.size), each) for each in work]

    def tried(start: Placement) -> tuple[float, Placement]:
        return evened(start, mine, work, packing, room, bubble_share, shared)

    best = tried(given)
    if bubble_share and packing.microbatches is None and not packing.fixed_shapes:
        quantum = packing.quantum or (pp if vpp > 1 else 1)
        sequences = Sequences.of(-np.sort(-mine), packing.cost, room)
        least, most = fewest_microbatches(sequences, packing, quantum), given.num_microbatches
        time_of = even_time(sequences, work, bubble_share)
        count = shortest(time_of, range(min(least, most), most + 1, quantum))
        if count < most - most // 16:  # a few fewer of many make no difference
            asked = replace(packing, microbatches=count)
            fewer = tried(choose(mine, asked, room, quantum=quantum, bubble_share=bubble_share))
            best = min(best, fewer, key=lambda each: each[0])
    placed, changed = best[1], dict[str, Ints]()
    for name in ("microbatch", "first_rank", "cp_size"):
        changed[name] = getattr(plan, name).copy()
        changed[name][kept] = getattr(placed, name)
    return replace(plan, **changed, num_microbatches=placed.num_microbatches)


def _works(encoder_work: npt.ArrayLike, num_sequences: int) -> Floats:
    given = np.asarray(encoder_work)
    works = np.atleast_2d(given)
    if given.dtype.kind not in "iuf" or works.ndim > 2 or works.shape[-1] != num_sequences:
        raise PlanError(
            f"encoder_work: {given.dtype} {list(given.shape)}; give the work on each of {num_sequences} "
            f"sequences"
        )
    if len(works) >= MOST_COSTS:
        raise PlanError(f"encoder_work of {len(works)} encoders: at most {MOST_COSTS - 1}")
    if not is_work(works):
        raise PlanError(f"encoder_work: {works.min()} to {works.max()}; work is finite, and 0 or more")
    return works.astype(np.float64)


def _kept(sequence: npt.ArrayLike, work: npt.ArrayLike, kept: Ints) -> tuple[Longs, Floats]:
    """The parts of sequences that are kept, each with the place of its sequence among these."""
    of, each = np.asarray(sequence, np.int64), np.asarray(work, np.float64)
    if kept[-1] == kept.size - 1 and of.max(initial=0) < kept.size:  # mostly, all are kept
        return of, each
    place = np.searchsorted(kept, of)
    mine = np.append(kept, -1)[place] == of
    return place[mine], each[mine]


def even_time(sequences: Sequences, encoder_work: Floats, bubble_share: float) -> Callable[[int], float]:
    """The time of a step with each number of microbatches if the language model is even.

    In units of load. Without the language model's own work, which is the same with each.
    """
    num_ranks, overhead = sequences.room.num_ranks, sequences.cost.microbatch_overhead
    model = float(sequences.work.sum()) / num_ranks
    largest = [np.sort(each)[::-1][::num_ranks].tolist() for each in encoder_work]
    even = (encoder_work.sum(axis=1) / num_ranks).tolist()

    def time_of(count: int) -> float:
        time = bubble_share * model / count + count * overhead
        for each, total in zip(largest, even):
            targets = _targets([total / count] * count, each[:count])
            time += sum(targets) + bubble_share * max(targets)
        return time

    return time_of


def shortest(time_of: Callable[[int], float], counts: Sequence[int]) -> int:
    """The number of microbatches, of some that ascend, from which on steps become longer."""
    steps = range(len(counts) - 1)
    return counts[bisect_left(steps, True, key=lambda at: time_of(counts[at]) < time_of(counts[at + 1]))]


def _targets(means: Sequence[float], largest: Sequence[float]) -> list[float]:
    """What a rank should do in each microbatch: the mean of what is left, or the largest sequence left.

    largest: the largest sequence left for each microbatch if those before took one for each of their ranks.
    """
    targets, rest, share = list[float](), sum(means), sum(means)
    for m, whole in enumerate(means):
        mean = whole * rest / share if share > 0 else 0.0
        targets.append(max(mean, largest[m] if m < len(largest) else 0.0))
        rest = max(rest - min(targets[-1], MOST_SHARE * mean), 0.0)
        share -= whole
    return targets


def evened(
    placed: Placement,
    lengths: Longs,
    encoder_work: Floats,
    packing: Packing,
    room: Room,
    bubble_share: float,
    parts: Sequence[tuple[Longs, Floats]] | None,
) -> tuple[float, Placement]:
    """Packs that make the step shorter, on the same groups of ranks or on parts of them; or `placed` itself.

    lengths: as given to `choose`; int64 [n], n >= 1.
    encoder_work: of each encoder on each sequence, some of it above 0; float64 [num_encoders, n],
        num_encoders < MOST_COSTS.
    bubble_share: the pipeline idles for this many times the largest microbatch.
    parts: of each encoder, which the ranks of a group share; None if each does all of the work.
    Returns the time of the step, in units of load, too.
    """
    groups, pack = _Groups.of(placed, room.num_ranks)
    num_places = room.num_ranks * placed.num_microbatches
    model = float(packing.cost.work(lengths).sum()) / num_places
    shared = None if parts is None else [(of, each / model) for of, each in parts]
    costs = encoder_work / model, model, packing.cost, room, bubble_share, shared
    narrow = groups.narrowed(pack, lengths, room)
    packs = _Packs.of([groups] if narrow is groups else [groups, narrow], lengths, *costs)
    best, given, most = packs[-1].filled(lengths, room.max_sequences), None, room.max_sequences
    if best is not None:
        best = min(best, best.swapped(most), key=lambda each: each.time)
    least = _Filled.of(packs[0], pack, packs[0].shares(pack))  # costs less to compute than `given`
    if best is None or best.time >= least.time or best.longer > FAR:
        given = _Filled.of(packs[0], pack)
        best = min(given, best or given, key=lambda each: each.time)
        if best.longer > (0 if best is given else FAR):
            start = given.ordered()
            best = min(best, start, start.swapped(most), key=lambda each: each.time)
    time = placed.num_microbatches * (best.time * model + packing.cost.microbatch_overhead)
    return time, placed if best is given else best.packs.groups.placement(best.pack)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The cp groups of a step, one for each pack.

    Attributes:
        microbatch, first_rank, size: of each; see `Placement`; int64 [num_packs].
        num_microbatches, num_ranks: of the step.
    """

    microbatch: Longs
    first_rank: Longs
    size: Longs
    num_microbatches: int
    num_ranks: int

    @classmethod
    def of(cls, placed: Placement, num_ranks: int) -> tuple[_Groups, Longs]:
        """Those that have sequences, and the pack of each sequence; int64 [n]."""
        count = placed.num_microbatches
        place_of_pack = placed.microbatch.astype(np.int64) * num_ranks + placed.first_rank
        size_at_place = np.zeros(count * num_ranks, np.int64)
        size_at_place[place_of_pack] = placed.cp_size
        places = np.flatnonzero(size_at_place)
        pack = (np.cumsum(size_at_place > 0) - 1)[place_of_pack]
        return cls(places // num_ranks, places % num_ranks, size_at_place[places], count, num_ranks), pack

    def narrowed(self, pack: Longs, lengths: Longs, room: Room) -> _Groups:
        """Each cut into groups that are as narrow as its longest sequence allows. pack: of each sequence."""
        wide = np.flatnonzero(self.size > room.sizes[0])
        if not wide.size:
            return self
        longest, size = np.zeros(self.size.size, np.int64), self.size.copy()
        np.maximum.at(longest, pack, lengths)
        padded = room.align.padded(longest[wide], room.size_of[:, None])
        needed = room.size_of[narrowest_holding(room, padded)]
        size[wide] = np.where(size[wide] % needed == 0, needed, size[wide])
        of, number = numbered(self.size // size)
        first_rank = self.first_rank[of] + number * size[of]
        return replace(self, microbatch=self.microbatch[of], first_rank=first_rank, size=size[of])

    def placement(self, pack: Longs) -> Placement:
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
        first: pack of each microbatch that has any; int64 [k], k >= 1.
        size_at: index into some sizes, of each pack; int64 [num_packs].
        limits: padded tokens that each pack can hold; int64 [num_packs].
        cost: each cost of each sequence on a rank of a group of each size, over what a rank does on average
            in a microbatch for the language model, which is the first; float64 [num_costs, num_sizes, n].
        even: mean of each cost over ranks and microbatches if each part is encoded once; float64 [num_costs].
        padded: padded tokens of each sequence on such a group; int64 [num_sizes, n].
        bubble_share, parts: see `evened`; the work of parts over the same as cost.
    """

    groups: _Groups
    first: Longs
    size_at: Longs
    limits: Longs
    cost: Floats
    even: Floats
    padded: Longs
    bubble_share: float
    parts: Sequence[tuple[Longs, Floats]] | None

    @classmethod
    def of(
        cls,
        choices: Sequence[_Groups],
        lengths: Longs,
        work: Floats,
        model: float,
        cost: CostModel,
        room: Room,
        bubble_share: float,
        parts: Sequence[tuple[Longs, Floats]] | None,
    ) -> list[_Packs]:
        """The packs of each choice of groups; costs are computed once for all.

        model: what a rank does on average in a microbatch for the language model.
        work: of each encoder on each sequence, over that; float64 [num_encoders, n].
        """
        index = [np.searchsorted(room.size_of, groups.size) for groups in choices]
        used = np.flatnonzero(np.bincount(np.concatenate(index)))
        sizes = room.size_of[used][:, None]
        costs = np.empty((1 + len(work), used.size, lengths.size))
        np.divide(cost.load(lengths, sizes), model, out=costs[0])
        np.divide(work[:, None], 1 if parts is None else sizes, out=costs[1:])
        even = np.append(1.0, work.sum(axis=1) / (room.num_ranks * choices[0].num_microbatches))
        padded, made = room.align.padded(lengths, sizes), list[_Packs]()
        for groups, at in zip(choices, index):
            counts = np.bincount(groups.microbatch)
            first, size_at = (np.cumsum(counts) - counts)[counts > 0], np.searchsorted(used, at)
            made.append(
                cls(groups, first, size_at, room.limit_of[at], costs, even, padded, bubble_share, parts)
            )
        return made

    def own(self, of_sizes: npt.NDArray[N], pack: Longs) -> npt.NDArray[N]:
        """What each sequence has on groups of the size of its pack; [..., n].

        of_sizes: the same on groups of each size; [..., num_sizes, n].
        """
        *others, num_sizes, n = of_sizes.shape
        if num_sizes == 1:
            return of_sizes[..., 0, :]
        return of_sizes.reshape(*others, -1).take(self.size_at[pack] * n + np.arange(n), axis=-1)

    def sums(self, values: Floats | Longs, pack: Longs) -> Floats:
        """Of the sequences of each pack; float64 [num_packs]."""
        return np.bincount(pack, values, self.groups.size.size).astype(np.float64, copy=False)

    def shares(self, pack: Longs) -> Floats:
        """At least what `loads` are: all if ranks could share any work evenly."""
        return np.stack([self.sums(each, pack) for each in self.own(self.cost, pack)])

    def loads(self, pack: Longs) -> Floats:
        """Each cost of each pack; float64 [num_costs, num_packs]."""
        loads, sizes = self.shares(pack), self.groups.size
        if self.parts is not None and sizes.max() > 1:
            first, num_ranks = np.cumsum(sizes) - sizes, int(sizes.sum())
            for load, (of, work) in zip(loads[1:], self.parts):
                rank = share(work, first[pack[of]], sizes[pack[of]], num_ranks)
                np.maximum.reduceat(np.bincount(rank, work, num_ranks), first, out=load)
        return loads

    def filled(self, lengths: Longs, max_sequences: int) -> _Filled | None:
        """All sequences placed anew, in the better way of two; None if there is no room."""
        found = list[_Filled]()
        model, has_parts = self.cost[0, 0], self.cost[1:, 0].any(axis=0)
        has_text = bool(model[~has_parts].sum() > TEXT * model.sum())
        for by_tokens in (not has_text, has_text):
            pack = self.refilled(lengths, max_sequences, by_tokens=by_tokens)
            found += [] if pack is None else [_Filled.of(self, pack).ordered()]
            if found and found[0].longer <= FAR:
                break
        return min(found, key=lambda each: each.time, default=None)

    def means(self, load: Floats) -> Floats:
        """Mean of one cost over the ranks of each microbatch; float64 [num_microbatches]."""
        groups = self.groups
        on_all_ranks = np.bincount(groups.microbatch, load * groups.size, groups.num_microbatches)
        return on_all_ranks / groups.num_ranks

    def targets(self, own: Floats, means: Floats) -> Floats:
        """Target of one cost for each rank of each microbatch; float64 [num_microbatches].

        own: the cost of each sequence on each rank of its group; float64 [n]. means: see `means`.

        If the largest sequences exceed the mean, the first microbatch takes as many of them as it has packs,
        one each, and leaves less to the next.
        """
        if own.max() <= means.min():
            return means
        num_packs = np.bincount(self.groups.microbatch, minlength=self.groups.num_microbatches)
        taken = np.minimum(np.cumsum(num_packs) - num_packs, own.size - 1)
        return np.array(_targets(means.tolist(), (-np.partition(-own, taken)[taken]).tolist()))

    def refilled(self, lengths: Longs, max_sequences: int, *, by_tokens: bool = False) -> Longs | None:
        """The pack of each sequence if all packs are filled again, int64 [n]; None if one finds no room.

        For each cost in turn, the language model's last, the sequences for which it is the largest cost go to
        the pack furthest below its target, the most costly first. by_tokens: by the language model's alone,
        which leaves less room unused.
        """
        pack, done = np.zeros(lengths.size, np.int64), np.zeros(0, np.int64)
        free, slots = self.limits.copy(), np.full(self.groups.size.size, max_sequences)
        largest, most = np.zeros(lengths.size, np.int8), self.cost[0, 0]
        for c in range(1, 1 if by_tokens else len(self.cost)):
            relative = self.cost[c, 0] / self.even[c]
            largest[relative > most] = c
            most = np.maximum(most, relative)
        for c in (*range(1, len(self.cost)), 0):
            members = np.flatnonzero(largest == c)
            members = members[descending(self.cost[c, 0, members])]
            gaps = self.sums(self.cost[c, self.size_at[pack[done]], done], pack[done])
            if c:
                even = np.full(self.groups.num_microbatches, self.even[c])
                gaps -= self.targets(self.cost[c, 0], even)[self.groups.microbatch]
            any_size = np.zeros(members.size, np.int64)
            into = place(
                *(lengths, self.padded, self.cost[c], members, any_size),
                *(self.size_at, free, slots, gaps),
            )
            if into.min(initial=0) < 0:
                return None
            pack[members], done = into, np.append(done, members)
        return pack

    def contents(self, pack: Longs, tolerance: float, max_sequences: int) -> Contents:
        """The contents of packs, and how far each is above its targets."""
        own = self.own(self.cost, pack)
        loads = np.stack([self.sums(each, pack) for each in own])
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
        return Contents(
            cost=self.cost,
            padded=self.padded,
            size_at=self.size_at,
            free=self.limits - self.sums(self.own(self.padded, pack), pack).astype(np.int64),
            slots=np.minimum(max_sequences, members.shape[1]) - counts,
            excess=loads - np.stack(targets)[:, self.groups.microbatch],
            members=members,
            counts=counts,
        )


@dataclass(frozen=True, slots=True)
class _Filled:
    """The packs of a step with their sequences.

    Attributes:
        pack: of each sequence; int64 [n].
        loads: each cost of each pack; float64 [num_costs, num_packs].
        time: of the step, over that of an even language model without a bubble.
    """

    packs: _Packs
    pack: Longs
    loads: Floats
    time: float

    @classmethod
    def of(cls, packs: _Packs, pack: Longs, loads: Floats | None = None) -> _Filled:
        """loads: if they are known."""
        loads = packs.loads(pack) if loads is None else loads
        tops = np.maximum.reduceat(loads, packs.first, axis=1).sum(axis=0)
        time = tops.sum() + packs.bubble_share * tops.max()
        return cls(packs, pack, loads, float(time) / packs.groups.num_microbatches)

    @property
    def longer(self) -> float:
        """Than with even packs, by this; as `time`."""
        packs = self.packs
        return self.time - (1 + packs.bubble_share / packs.groups.num_microbatches) * float(packs.even.sum())

    def ordered(self) -> _Filled:
        """Packs of one size in descending order, so that those of a microbatch are alike; or as they are."""
        sizes, order = self.packs.size_at.astype(np.int8), descending(self.loads.sum(axis=0))
        slots, order = np.argsort(sizes, kind="stable"), order[np.argsort(sizes[order], kind="stable")]
        now, loads = np.empty_like(order), np.empty_like(self.loads)
        now[order], loads[:, slots] = slots, self.loads[:, order]
        return min(self, _Filled.of(self.packs, now[self.pack], loads), key=lambda each: each.time)

    def swapped(self, max_sequences: int) -> _Filled:
        """Once packs have swapped sequences."""
        contents = self.packs.contents(self.pack, TOLERANCE, max_sequences)
        swap(contents, TOLERANCE)
        held = np.arange(contents.members.shape[1]) < contents.counts[:, None]
        pack = np.empty_like(self.pack)
        pack[contents.members[held]] = np.arange(contents.counts.size).repeat(contents.counts)
        return _Filled.of(self.packs, pack).ordered()


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

    cost: Floats
    padded: Longs
    size_at: Longs
    free: Longs
    slots: Longs
    excess: Floats
    members: Longs
    counts: Longs


def swap(contents: Contents, tolerance: float) -> int:
    """Swap until no excess is above the tolerance, or few swaps help; returns how many were made.

    contents: its arrays are changed; at most MOST_COSTS costs.
    """
    if _swap is not None:
        return _swapped(_swap, contents, tolerance)
    no_sequence = ((0, 0),) * 2 + ((0, 1),)
    contents.cost = np.pad(contents.cost, no_sequence)
    contents.padded = np.pad(contents.padded, no_sequence[1:])
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
        if (num_swaps - before) * WORTH <= len(above):
            break
    return num_swaps


def _swapped(compiled_swap: Callable[..., int], contents: Contents, tolerance: float) -> int:
    """`swap` in one compiled call."""
    num_costs, num_sizes, num_columns = contents.cost.shape
    num_packs = contents.counts.size
    bounds = np.array([MOST_SWEEPS, TRIES, WORTH], np.int64)
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

    items: Longs
    num: Longs
    padded: Longs
    cost: Floats

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
def _up_to_two(count: int) -> tuple[Longs, Longs]:
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
