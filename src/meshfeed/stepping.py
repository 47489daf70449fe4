"""Step k as one rank needs it: draw, plan, portion. Pure but for the index; feed and simulate share it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from meshfeed.layout import Coord, Layout
from meshfeed.order import Draws, draws_of_step
from meshfeed.plan import CpSplit, StepPlan, plan_fixed
from meshfeed.recipe import Recipe
from meshfeed.sequence import Portion, SequenceRule, portions_of

_TOKENS_TOGETHER = 1 << 17  # 32 windows of 4,096: beyond, the fixed cost of a read is lost in its size


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """One step for the whole job, equal on every rank.

    Attributes:
        step: from 0.
        draws: the sequences, in order.
        plan: which of them goes where.
        tokens, valid_tokens, sum_sq: of the whole batch; see `batch.Step`.
    """

    step: int
    draws: Draws
    plan: StepPlan
    tokens: int
    valid_tokens: int
    sum_sq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """How a recipe's stream becomes the steps of a layout.

    Attributes:
        recipe, layout: what, and for whom.
        micro_batch_size: sequences per microbatch and data-parallel rank.
        cp_split: how context parallelism splits a sequence.
    """

    recipe: Recipe
    layout: Layout
    micro_batch_size: int
    cp_split: CpSplit

    @property
    def rule(self) -> SequenceRule:
        """The recipe's sequence rule."""
        return cast(SequenceRule, self.recipe.sequence)

    def global_batch(self, step: int) -> GlobalBatch | None:
        """One step; None past the end of the stream."""
        draws = draws_of_step(self.recipe, step)
        if not len(draws):
            return None
        lengths = self.rule.lengths(self.recipe, draws)
        plan = plan_fixed(
            lengths, dp=self.layout.dp, cp=self.layout.cp, micro_batch_size=self.micro_batch_size
        )
        return GlobalBatch(
            step=step,
            draws=draws,
            plan=plan,
            tokens=int(lengths.sum()),
            valid_tokens=int(self.rule.valid_tokens(self.recipe, draws).sum()),
            sum_sq=int((lengths * lengths).sum()),
        )

    def portions(self, batch: GlobalBatch, coord: Coord, served: Sequence[int]) -> list[Portion]:
        """What the rank at a coordinate takes of each microbatch.

        served: cp coordinates of the ranks that its reader serves, its own included.
        """
        first = coord.dp * self.layout.cp
        return portions_of(
            batch.plan,
            batch.draws,
            first + coord.cp,
            group=[first + cp for cp in served],
            rows=self.micro_batch_size,
            split=self.cp_split,
            together=self._together(batch),
        )

    def _together(self, batch: GlobalBatch) -> int:
        """Microbatches to read and deliver at a time; the same on every rank."""
        tokens = int(batch.plan.lengths.max(initial=1)) * self.micro_batch_size
        return max(1, _TOKENS_TOGETHER // tokens)

    def summary(self) -> str:
        """What ranks must agree on beside the recipe, in one line."""
        places = zlib.crc32(self.layout.grid().tobytes())  # a layout's text does not tell its table
        return (
            f"{self.layout} with ranks {places:08x}, micro_batch_size={self.micro_batch_size} "
            f"cp_split={self.cp_split}"
        )
