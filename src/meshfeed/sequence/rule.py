"""The interface of a sequence rule: two halves, with the delivery between them.

`load` reads *columns*, the compact stored bytes. Only they are sent. `build` turns columns and the plan into
the fields of a microbatch. It runs on every rank and is pure, so that all deliveries give the same bytes, and
fields computed from lengths alone are never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Arrays, Columns
from meshfeed.order import Draws
from meshfeed.plan import CpSplit, Pack, Slices, StepPlan, packs_of, slices_of
from meshfeed.recipe import Recipe, Rule
from meshfeed.roles import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One rank's part of some consecutive microbatches, and the part of its delivery group.

    Small microbatches are read and delivered several at a time, which shares the fixed costs.

    Attributes:
        microbatches: their indices in the step.
        pack: their sequences, one after the other.
        draws: one for each of `pack.sequences`.
        own: the token slices that this rank works on.
        held: the token slices of all ranks that one reader serves; each own slice is inside a held one.
        rows: sequences per microbatch; missing ones are rows of padding. 0 for a pack.
        starts: the first token of each of `pack.sequences` in its draw; int64 [k]. Above 0 if the plan has
            split a long sequence.
        idle_tokens: with packing, tokens per rank of a microbatch without a sequence, all padding.
        cp_ranks: global ranks of the cp group, in the order of their slices.
    """

    microbatches: range
    pack: Pack
    draws: Draws
    own: Slices
    held: Slices
    rows: int
    starts: npt.NDArray[np.int64]
    idle_tokens: int
    cp_ranks: tuple[int, ...]

    def draws_by_microbatch(self) -> list[Draws]:
        """The draws of each microbatch."""
        if not self.rows:
            return [self.draws]
        return [self.draws.between(m * self.rows, (m + 1) * self.rows) for m in range(len(self.microbatches))]


def portions_of(
    plan: StepPlan,
    draws: Draws,
    dp_cp_rank: int,
    *,
    group: Sequence[int],
    rows: int,
    split: CpSplit,
    together: int,
    rank_of_dp_cp: npt.NDArray[np.int64],
) -> list[Portion]:
    """One rank's portions of a step, each of `together` microbatches.

    draws: the step's global batch. group: the dp_cp ranks that this rank's reader serves, including this one;
    they share every pack. rank_of_dp_cp: the global rank of each dp_cp rank at this rank's tp and pp. Raises
    PlanError if cp cannot split the sequences.
    """
    portions: list[Portion] = []
    starts = range(0, plan.num_microbatches, together)
    for start, pack in zip(starts, packs_of(plan, dp_cp_rank, together=together)):
        own = slices_of(pack, [pack.cp_rank], split)
        first = dp_cp_rank - pack.cp_rank
        held = own if len(group) == 1 else slices_of(pack, [rank - first for rank in group], split)
        portions.append(
            Portion(
                microbatches=range(start, min(start + together, plan.num_microbatches)),
                pack=pack,
                draws=draws.take(plan.sequence[pack.sequences]),
                own=own,
                held=held,
                rows=rows,
                starts=plan.start[pack.sequences],
                idle_tokens=int(plan.align.pack_multiple(pack.cp_size)) // pack.cp_size,
                cp_ranks=tuple(rank_of_dp_cp[first : first + pack.cp_size].tolist()),
            )
        )
    return portions


class SequenceRule(Rule, Protocol):
    """How draws become sequences. Implementations are frozen and keep no state.

    A rule of rows may have `row_tokens` (int), the length that its shorter sequences are padded to. Any rule
    may have `reads_singly` (bool): read one microbatch at a time, since lengths do not determine its size.
    `shard_ends(store)` returns the ends of a store's own shards, in sequences; int64 [num_shards] or None.
    """

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every field that `build` can make."""
        ...

    def lengths(self, recipe: Recipe, draws: Draws) -> npt.NDArray[np.int64]:
        """Tokens of each sequence, from the index alone; int64 [n]."""
        ...

    @property
    def packed(self) -> bool:
        """Whether its sequences differ in length and need a `Packing`."""
        ...

    def valid_tokens(
        self,
        recipe: Recipe,
        draws: Draws,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Loss-bearing tokens of some pieces of sequences, from the index alone; int64 [n].

        starts, lengths: the range of tokens in each draw, int64 [n].
        """
        ...

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Tell the stores that `load` will read the portions of a step."""
        ...

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """Read the group's slices. Raises StoreError."""
        ...

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Bytes of the columns as far as the plan determines them; a hint for the buffer size."""
        ...

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> list[Arrays]:
        """The named fields of this rank, for each microbatch of the portion.

        columns: may be None if no stored field is named. They are valid until the call returns: copy what is
        kept.
        """
        ...


def dtype_of(recipe: Recipe, draws: Draws) -> np.dtype[Any]:
    """The type that holds the tokens of all stores of some draws; the first store's if there are none."""
    if len(recipe.sources) == 1:
        return recipe.sources[0].dtype
    sources = np.unique(draws.source).tolist() or [0]
    return np.result_type(*(recipe.sources[source].dtype for source in sources))
