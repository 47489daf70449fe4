"""Step k for one rank: draw, plan, portion; and a rank's steps in a row, planned and announced ahead.

`Stepping` is pure except for the index; feed and simulate use it. The order is known, so a remote store can
fetch the data of later steps while a step is trained: `Ahead` announces them. Announced data that are not
read yet are limited in bytes, and planned steps in number. The first step is returned before any other is
planned; after that every portion read may allow one more.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import cast

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Longs
from meshfeed.errors import MeshfeedError, OptionError, PlanError, RecipeError
from meshfeed.layout import Coord, Layout
from meshfeed.metrics import StageClock, StepStats
from meshfeed.order import (
    Draws,
    LeavesOut,
    asked_until,
    drawn_until,
    draws_of_step,
    lanes_of_step,
    num_steps,
    short_steps,
)
from meshfeed.plan import (
    Align,
    CpSplit,
    Packing,
    StepPlan,
    account_of,
    cp_groups,
    plan_fixed,
)
from meshfeed.plan.packing import Room, room_of, sizes_of
from meshfeed.plan.step import planned
from meshfeed.plan.types import NoLoss, check_split, cuts_packs
from meshfeed.recipe import Blocks, Recipe
from meshfeed.sequence import (
    Portion,
    RuleContents,
    SequenceRule,
    TakesParts,
    WholeStep,
    contents_of,
    portions_of,
)
from meshfeed.sequence.runs import places_among

_log = logging.getLogger("meshfeed")

_TOKENS_TOGETHER = 1 << 18  # 64 windows of 4,096: above that, the fixed cost of a read is negligible

MOST_STEPS = 64
"""The most steps planned ahead, however small they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """One step for the whole job, equal on every rank.

    Attributes:
        step: from 0.
        draws: the sequences, in order, with what the rule has looked up of them.
        lengths: tokens of each, before the plan splits or truncates it; int64 [n].
        plan: the rank of each sequence.
        tokens, valid_tokens, sum_sq, sources: of the whole batch; see `batch.Step`.
        cut_loss: draws that truncation left without any of their loss; int64 [k].
        stats: the costs that are known before the step is made, computed on demand.
    """

    step: int
    draws: Draws
    lengths: Longs
    plan: StepPlan
    tokens: int
    valid_tokens: int
    sum_sq: int
    sources: tuple[str, ...] = ()
    cut_loss: Longs = field(default_factory=partial(np.zeros, 0, np.int64))
    stats: Callable[[], StepStats] = StepStats

    def check_loss(self, packing: Packing | None) -> None:
        """Raises PlanError if no token bears loss: a mean over those that do is 0/0."""
        if self.valid_tokens:
            return
        cures = "give it items that bear loss"  # of an Exchange, which nobody amends
        if self.sources:
            cures = f"leave the step out by the amendment SkipSteps({self.step}, {self.step + 1})"
        what, long = f"{len(self.draws)} sequences", self.plan.oversize
        counts = np.bincount(self.draws.source, minlength=len(self.sources)).tolist()
        if len(self.sources) > 1:
            of = (f"{count} of {name!r}" for name, count in zip(self.sources, counts) if count)
            what += f", {', '.join(of)}"
        if long.size and packing is not None and packing.oversize != "split":
            first = "source {}, epoch {}, index {}".format(*_names(self.draws, long[:1])[0])
            became = "left out" if packing.oversize == "drop" else "cut"
            what += f"; {long.size} too long and {became}, such as {first}"
            cures = f"raise capacity or cp, or set oversize='split' (--oversize), or {cures}"
        raise PlanError(
            f"step {self.step}: none of its {self.tokens} tokens bears loss, so their mean loss is 0/0 "
            f"({what}); {cures}, or set no_loss='allow' and divide by max(step.valid_tokens, 1)"
        )


def _names(draws: Draws, places: npt.NDArray[np.integer]) -> list[tuple[int, int, int]]:
    some = draws.take(places)
    return list(zip(some.source.tolist(), some.epoch.tolist(), some.index.tolist()))


def stats_of_packs(
    plan: StepPlan,
    draws: Draws,
    packing: Packing,
    *,
    pp: int,
    vpp: int,
    cut_loss: Sequence[int] | Longs = (),
    known: StepStats | None = None,
) -> StepStats:
    """The known stats, with those of a plan: balance, padding, every sequence that was cut or left out.

    cut_loss: see `GlobalBatch`.
    """
    account = account_of(plan, packing, pp=pp, vpp=vpp)

    return replace(
        known or StepStats(),
        efficiency=account.efficiency,
        objective_over_bound=account.over_bound,
        max_over_mean=account.max_over_mean,
        padding=account.padding,
        oversize=_names(draws, plan.oversize),
        empty=_names(draws, plan.sequence[plan.empty]),
        cut_loss=_names(draws, np.asarray(cut_loss, np.int64)),
    )


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """How a recipe's stream becomes the steps of a layout.

    Attributes:
        recipe, layout: the stream and its ranks.
        micro_batch_size: sequences per microbatch and data-parallel rank, without packing.
        packing: how sequences of different lengths become microbatches; None for rows of one length.
        vpp: virtual stages per pipeline rank.
        cp_split: how context parallelism splits a sequence.
        no_loss: whether a step without loss is refused.
        opened: the recipe's rule as `sequence.opened` gives it; None before that.

    Raises RecipeError or OptionError for a rule that does not go with the stores, the packing or the split.
    """

    recipe: Recipe
    layout: Layout
    micro_batch_size: int
    cp_split: CpSplit
    packing: Packing | None = None
    vpp: int = 1
    no_loss: NoLoss = "allow"
    opened: SequenceRule | None = None

    def __post_init__(self) -> None:
        rule, packing, _ = self.rule, self.packing, self.contents
        if rule.packed and packing is None:
            raise RecipeError(f"{rule.summary()} needs packing=mf.Packing(capacity=...)")
        if packing is not None and not rule.packed:
            raise RecipeError(f"{rule.summary()} has sequences of one length; leave packing out")
        check_split(self.cp_split)
        cannot_split = isinstance(rule, TakesParts) and not rule.may_split
        if packing is not None and packing.oversize == "split" and cannot_split:
            raise RecipeError(f"{rule.summary()} cannot be split; choose another oversize= of Packing")
        if cuts_packs(self.cp_split) and not rule.packed:
            rows = self.cp_split.removeprefix("pack_")
            raise OptionError(f"cp_split={self.cp_split!r} cuts packs; for rows choose {rows!r}")

    @cached_property
    def rule(self) -> SequenceRule:
        """The recipe's sequence rule, opened if it is."""
        return cast(SequenceRule, self.recipe.sequence) if self.opened is None else self.opened

    @cached_property
    def contents(self) -> RuleContents:
        """What it reads and makes, with the columns of the stores."""
        return contents_of(self.recipe, self.rule)

    @cached_property
    def _row_align(self) -> Align:
        tokens = self.rule.row_tokens
        return Align(sequence=int(Align().padded(np.array(tokens), self.layout.cp)) if tokens > 1 else 1)

    def foresee(self, step: int) -> None:
        """Begin to plan a step that will probably be asked for, on a thread of its own."""
        pool = ThreadPoolExecutor(1, "meshfeed-plan")
        self._foreseen[step] = pool.submit(replace(self).global_batch, step)
        pool.shutdown(wait=False)

    @cached_property
    def _foreseen(self) -> dict[int, Future[GlobalBatch | None]]:
        return {}

    def global_batch(self, step: int) -> GlobalBatch | None:
        """One step; None past the end of the stream. Raises PlanError, for a step without loss too."""
        if step in self._foreseen and (foreseen := self._foreseen.pop(step)).exception() is None:
            return foreseen.result()
        drawn = draws_of_step(self.recipe, step)
        if not len(drawn):
            return None
        draws = self.rule.look_up(self.recipe, drawn)
        amendments = self.recipe.amendments
        excluded = amendments.excluded_at(step) if amendments.excluded else {}
        if excluded and isinstance(self.rule, LeavesOut):
            draws = self.rule.without(self.recipe, draws, excluded)
        whole = np.array(self.rule.lengths(self.recipe, draws), np.int64)  # the plan makes it read-only
        plan = self._plan(step, draws, whole)
        if excluded and not (self.rule.packed or self.rule.has_dummy_rows):
            microbatch = plan.microbatch.copy()
            microbatch[places_among(draws, excluded)] = -1  # their rows are left out
            plan = replace(plan, microbatch=microbatch)
        rows = plan.kept
        kept = draws if rows.size == len(draws) == plan.lengths.size else draws.take(plan.sequence[rows])
        valid = self.contents.valid_tokens(self.recipe, kept, plan.start[rows], plan.lengths[rows])
        cut_loss = self._cut_loss(draws, whole, plan, valid)
        batch = GlobalBatch(
            step=step,
            draws=draws,
            lengths=whole,
            plan=plan,
            tokens=plan.tokens,
            valid_tokens=int(valid.sum()),
            sum_sq=plan.sum_sq,
            sources=self.recipe.source_names_at(step) if amendments.grown else self.recipe.source_names,
            cut_loss=cut_loss,
            stats=partial(self._stats, step, draws, plan, cut_loss),
        )
        if self.no_loss == "error":
            batch.check_loss(self.packing)
        return batch

    def _cut_loss(
        self,
        draws: Draws,
        lengths: Longs,
        plan: StepPlan,
        valid: Longs,
    ) -> Longs:
        """See `GlobalBatch`. valid: loss-bearing tokens of each kept row of the plan; int64 [m]."""
        none = np.zeros(0, np.int64)
        if self.packing is None or self.packing.oversize != "truncate" or not plan.oversize.size:
            return none
        bears = np.zeros(len(draws), np.bool_)
        bears[plan.sequence[plan.kept]] = valid > 0
        suspect = plan.oversize[~bears[plan.oversize]].astype(np.int64)
        if not suspect.size:
            return none
        of = draws.take(suspect)
        return suspect[
            self.contents.valid_tokens(self.recipe, of, np.zeros_like(suspect), lengths[suspect]) > 0
        ]

    def _stats(self, step: int, draws: Draws, plan: StepPlan, cut_loss: Longs) -> StepStats:
        stats, names = StepStats(), self.recipe.source_names_at(step)
        if (known := len(names)) > 1:  # a rank may know further ones, which amendments add later
            drawn, epochs = drawn_until(self.recipe, step + 1) or (None, None)
            asked = asked_until(self.recipe, step + 1)
            stats = StepStats(
                source_drawn=None if drawn is None else drawn[:known],
                source_epochs=None if epochs is None else epochs[:known],
                source_asked=None if asked is None else asked[:known],
                source_names=names,
            )
        if self.packing is None:
            return stats
        return stats_of_packs(
            plan, draws, self.packing, pp=self.layout.pp, vpp=self.vpp, cut_loss=cut_loss, known=stats
        )

    def check_filled(self) -> None:
        """Raises OptionError if the sequences of some step do not fill its microbatches.

        This concerns rows only: a pack holds what fits in it, and its loss is per token.
        """
        if self.packing is not None:
            return
        batch, rows, steps = self.recipe.batch, self.micro_batch_size * self.layout.dp, num_steps(self.recipe)
        for first, size in batch.stages:
            if size % rows and (steps is None or first + 1 < steps):
                cure = f"give the Batch a multiple of {rows} sequences, choose another micro_batch_size"
                raise self._unfilled(f"step {first}", size, cure)
        for last in (*short_steps(self.recipe), *([steps - 1] if steps else [])):
            left = len(draws_of_step(self.recipe, last))
            if left % rows and not self.recipe.skips(last):
                cure = "drop it with Batch(last='drop'), fill it with the next sequences with last='pad'"
                raise self._unfilled(
                    f"step {last}, the last{' of its amounts' * (last + 1 != steps)},", left, cure
                )

    def _unfilled(self, step: str, size: int, cure: str) -> OptionError:
        rows = self.micro_batch_size * self.layout.dp
        become, take = "dummies", ""
        if not self.rule.has_dummy_rows:
            become, take = "missing", "take microbatches of fewer rows, or none, on some ranks; "
        return OptionError(
            f"{step} has {size} sequences, and a microbatch {rows} rows (micro_batch_size="
            f"{self.micro_batch_size}, dp={self.layout.dp}): {-size % rows} would be {become}; {cure}, or "
            f"pass pad_rows=True and {take}divide the loss by step.valid_tokens, not by rows"
        )

    def num_microbatches(self, step: int) -> int | None:
        """Microbatches of a step, 0 past the end; None with packing, which depends on lengths."""
        if self.packing is not None:
            return None
        if self.recipe.skips(step):
            return 0
        return -(-len(draws_of_step(self.recipe, step)) // (self.micro_batch_size * self.layout.dp))

    def _plan(self, step: int, draws: Draws, lengths: Longs) -> StepPlan:
        if self.packing is None:
            dp, cp = self.layout.dp, self.layout.cp
            shuffle = self.recipe.shuffle
            order = self._by_lanes(step, draws, shuffle) if isinstance(shuffle, Blocks) else None
            return _plan_of_rows(lengths.tobytes(), order, dp, cp, self.micro_batch_size, self._row_align)
        try:
            packing, room, rule, uncut = self.packing, self._room, self.rule, None
            if isinstance(rule, TakesParts) and lengths.max(initial=0) > room.longest:
                uncut = rule.uncut(self.recipe, draws)
            plan = planned(lengths, packing, room, pp=self.layout.pp, vpp=self.vpp, uncut=uncut)
            if not isinstance(rule, TakesParts):
                return plan
            return rule.evened(self.recipe, draws, plan, packing, self.layout, self.cp_split, self.vpp)
        except PlanError as error:
            longest = int(lengths.argmax())
            where = draws.source[longest], draws.epoch[longest], draws.index[longest]
            which = "the longest is source {}, epoch {}, index {}".format(*where)
            raise PlanError(f"step {step}: {error} ({which})") from error

    @cached_property
    def _room(self) -> Room:
        """Of the packs of a microbatch."""
        packing = cast(Packing, self.packing)
        return room_of(packing, dp=self.layout.dp, cp=self.layout.cp, split=self.cp_split)

    def _by_lanes(self, step: int, draws: Draws, shuffle: Blocks) -> bytes | None:
        """An order of a step's rows that groups them by lane, int64 [n]; None for a rule with its own order.

        Lanes take turns. Let g be the greatest common divisor of dp and the number of lanes. Any g successive
        rows have lanes of g different classes modulo g. So every class has equally many rows in a step and
        equally many replicas.
        """
        if (lanes := lanes_of_step(self.recipe, step)) is None:
            return None
        return np.lexsort((lanes, draws.source, lanes % math.gcd(self.layout.dp, shuffle.lanes))).tobytes()

    def portions(
        self, batch: GlobalBatch, coord: Coord, served: Sequence[int], needs: frozenset[str] | None = None
    ) -> list[Portion]:
        """The portion of each microbatch for the rank at a coordinate.

        served: cp coordinates of the ranks that its reader serves, including its own. needs: see `Portion`.
        """
        first = coord.dp * self.layout.cp
        rank, group = first + coord.cp, tuple(first + cp for cp in served)
        if self.packing is None:
            rows, least = self.micro_batch_size, self.rule.row_tokens if self.rule.has_dummy_rows else None
            cut = _cut_rows(batch.plan, rank, group, rows, self.cp_split, least, self.layout, coord)
            return [portion.of(batch.draws) for portion in cut]
        beside, step = ranks_beside(self.layout, coord), None
        if isinstance(self.rule, TakesParts):
            order = tuple(np.argsort(np.argsort(beside)).tolist())
            step = WholeStep(
                draws=batch.draws,
                plan=batch.plan,
                rank=rank,
                served=group,
                order=order,
                split=self.cp_split,
            )
        return portions_of(
            batch.plan,
            batch.draws,
            batch.lengths,
            rank,
            group=group,
            rows=0,
            split=self.cp_split,
            together=1,  # packs are large and differ in size
            rank_of_dp_cp=beside,
            needs=needs,
            step=step,
        )


class Ahead:
    """The steps of one rank from `start` on, with its portions of them; each is announced once, in order.

    Call `have_read` after each portion: it plans and announces further steps.

    Args:
        stepping: computes the steps.
        coord, served, needs: the rank's portions; see `Stepping.portions`.
        reads: whether this rank reads. If not, nothing is announced.
        clock: measures the stages "plan" and "read".
        left_out: steps that are neither planned nor given.
        budget_bytes: announce further steps while fewer bytes are announced and unread. At least one step is
            announced ahead, and only one if no store `wants_ahead`.
    """

    def __init__(
        self,
        stepping: Stepping,
        coord: Coord,
        served: Sequence[int],
        needs: frozenset[str],
        start: int,
        clock: StageClock,
        *,
        reads: bool,
        budget_bytes: int,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        self._stepping, self._left_out = stepping, left_out
        self._coord, self._served, self._clock = coord, served, clock
        self._needs = needs
        self._reads, self._budget_bytes = reads, budget_bytes
        self._is_remote = reads and any(store.wants_ahead for store in stepping.recipe.sources)
        self._next: int | None = start
        self._planned: deque[tuple[GlobalBatch, list[Portion]]] = deque()
        self._unread: deque[int] = deque()  # bytes of each portion
        self._unread_bytes = 0
        self._error: Exception | None = None
        self._num_cut = self._num_told = 0  # sequences whose loss truncation cut off

    def __iter__(self) -> Iterator[tuple[GlobalBatch, list[Portion]]]:
        self._plan()
        while self._planned:
            yield self._planned.popleft()
            self._plan_more(besides=1)  # besides the next step: one is announced while it is read
        if self._error is not None:
            raise self._error

    def have_read(self) -> None:
        """The next portion has been read: plan another step if the budget allows."""
        self._unread_bytes -= self._unread.popleft()
        self._plan_more()

    def _plan_more(self, besides: int = 0) -> None:
        ahead, most = len(self._planned) - besides, MOST_STEPS if self._is_remote else 1
        if ahead < 1 or (ahead < most and self._unread_bytes < self._budget_bytes):
            self._plan()

    def _plan(self) -> None:
        """Plan and announce the next step; does nothing past the end of the stream."""
        if self._next is None:
            return
        batch, portions = None, list[Portion]()
        try:
            with self._clock.stage("plan"):
                self._next = self._first_given(self._next)
                batch = self._stepping.global_batch(self._next)
                if batch is not None:
                    self._tell_cut_loss(batch)
                    portions = self._stepping.portions(batch, self._coord, self._served, self._needs)
        except Exception as error:  # raised after the earlier steps, which can be trained
            batch, self._error = None, error
        if batch is None:
            self._next = None
            return
        contents, recipe = self._stepping.contents, self._stepping.recipe
        if self._reads:
            # Announcing is only advice: `load` meets the same error again and sends it to the peers.
            with self._clock.stage("read"), contextlib.suppress(MeshfeedError):
                contents.announce(recipe, portions)
        sizes = [contents.num_bytes(recipe, each) if self._is_remote else 0 for each in portions]
        self._unread.extend(sizes)
        self._unread_bytes += sum(sizes)
        self._next += 1
        self._planned.append((batch, portions))

    def _tell_cut_loss(self, batch: GlobalBatch) -> None:
        """Log, on rank 0, which sequences lost their loss: the first ones, then whenever there are twice as
        many."""
        self._num_cut += batch.cut_loss.size
        if self._num_cut < max(2 * self._num_told, 1) or self._coord != Coord(0, 0, 0, 0):
            return
        self._num_told = self._num_cut
        names = _names(batch.draws, batch.cut_loss[:8])
        _log.warning(
            "step %d: %d of %d sequences lost all their loss where they were truncated, by (source, epoch, "
            "index): %s%s; %d so far. Raise capacity or cp; step.stats['cut_loss'] names all",
            batch.step,
            batch.cut_loss.size,
            len(batch.draws),
            ", ".join(map(str, names)),
            ", ..." * (batch.cut_loss.size > len(names)),
            self._num_cut,
        )

    def _first_given(self, step: int) -> int:
        """The first step from this one on that is not left out."""
        recipe = self._stepping.recipe
        while True:
            given = recipe.first_given(step) if recipe.amendments.skipped else step
            if given == step and step not in self._left_out:
                return step
            step = max(given, step + 1)


def cp_groups_of(layout: Layout, packing: Packing | None, coord: Coord) -> dict[int, tuple[int, ...]]:
    """The cp groups that the rank at a coordinate can be in: size -> global ranks."""
    cp = layout.cp
    sizes: tuple[int, ...] = (cp,)
    if packing is not None and packing.policy == "dynamic_cp":
        sizes = sizes_of(packing, layout.dp * cp)
    at, beside = coord.dp * cp + coord.cp, ranks_beside(layout, coord)
    groups = cp_groups(beside.size, sizes)
    own = ((size, group[at // size : at // size + 1].ravel()) for size, group in groups.items())
    return {size: tuple(beside[group].tolist()) for size, group in own if group.size}


@lru_cache(maxsize=8)  # rows of equal lengths are planned alike in every step whose lanes are alike
def _plan_of_rows(
    lengths: bytes, order: bytes | None, dp: int, cp: int, micro_batch_size: int, align: Align
) -> StepPlan:
    whole = np.frombuffer(lengths, np.int64)
    dealt = None if order is None else np.frombuffer(order, np.int64)
    return plan_fixed(whole, dp=dp, cp=cp, micro_batch_size=micro_batch_size, align=align, order=dealt)


@lru_cache(maxsize=8)  # and cut alike
def _cut_rows(
    plan: StepPlan,
    rank: int,
    group: tuple[int, ...],
    rows: int,
    split: CpSplit,
    row_tokens: int | None,
    layout: Layout,
    coord: Coord,
) -> list[Portion]:
    """The portions of a plan of rows, of numbered draws: see `Portion.of`.

    row_tokens: of each row at least; None to read one microbatch at a time.
    """
    together = 1
    if row_tokens is not None:
        together = max(1, _TOKENS_TOGETHER // (int(plan.lengths.max(initial=row_tokens)) * rows))
    numbers, none = np.arange(plan.lengths.size), np.zeros(plan.lengths.size, np.int64)
    portions = portions_of(
        plan,
        Draws(none.astype(np.int32), none, numbers),
        plan.lengths,
        rank,
        group=group,
        rows=rows,
        split=split,
        together=together,
        rank_of_dp_cp=ranks_beside(layout, coord),
    )
    for portion in portions:
        _ = portion.held_row, portion.edges, portion.num_tokens  # once for all portions made of it
    return portions


@lru_cache(maxsize=16)  # called every step, for one layout
def ranks_beside(layout: Layout, coord: Coord) -> Longs:
    """Global rank of each dp_cp rank with the same tp and pp; int64 [dp * cp], read-only."""
    beside = layout.group_of(layout.rank_of(coord), "dp-cp")
    coords = layout.coords(beside)
    ordered = beside[np.lexsort((coords[:, 1], coords[:, 2]))]
    ordered.flags.writeable = False
    return ordered
