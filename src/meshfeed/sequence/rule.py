"""What a sequence rule does, in two halves with the delivery between them.

`load` turns storage into *columns*: the stored bytes, as small as they are. They are what travels.
`build` turns columns and the plan into the fields of a microbatch. It runs on every rank and is pure,
so that all deliveries give the same bytes, and what lengths alone decide is never sent at all.
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
    """What one rank takes of some consecutive microbatches, and what its delivery group holds between them.

    Small microbatches are read and delivered several at a time: a fixed cost is paid once for all.

    Attributes:
        microbatches: which of the step.
        pack: their sequences, one after the other.
        draws: their place in the data; as many as `pack.sequences`.
        own: the token slices that this rank works on.
        held: the token slices of all ranks that one reader serves; each own slice lies in a held one.
        rows: sequences per microbatch; where they run out, rows of padding are left. 0 for a pack.
        starts: the first token that each of `pack.sequences` has of its draw; int64 [k]. More than 0 where
            the plan has split a long sequence.
        idle_tokens: tokens per rank of a microbatch without a sequence, all padding, when packed.
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
    """What one rank takes of a step, so many microbatches together.

    draws: the step's global batch. group: dp_cp ranks that the reader of this rank serves, itself
    included; they share every pack. rank_of_dp_cp: the global rank of each dp_cp rank at this rank's tp and
    pp. Raises PlanError where cp cannot split the sequences.
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

    A rule of rows may also have `row_tokens` (int), the length that its shorter sequences are padded to, and
    any rule `reads_singly` (bool): read one microbatch at a time, since lengths do not tell how large it is.
    `shard_ends(store)` tells where a store's own shards end, in sequences; int64 [num_shards] or None.
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
        """Whether its sequences differ in length, so that a `Packing` must place them."""
        ...

    def valid_tokens(
        self,
        recipe: Recipe,
        draws: Draws,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Loss-bearing tokens of some pieces of sequences, from the index alone; int64 [n].

        starts, lengths: the tokens of each draw that are meant, int64 [n].
        """
        ...

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Tell the stores that `load` will come for the portions of a step."""
        ...

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """Read what the group holds. Raises StoreError."""
        ...

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Bytes of the columns as far as the plan tells; a hint that lets a buffer be made in time."""
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

        columns: may be None where only fields that are not stored are named. They are good until the
        call returns: copy what is kept.
        """
        ...


def dtype_of(recipe: Recipe, draws: Draws) -> np.dtype[Any]:
    """The type that holds the tokens of all stores which some draws are of; the first store's without any."""
    if len(recipe.sources) == 1:
        return recipe.sources[0].dtype
    sources = np.unique(draws.source).tolist() or [0]
    return np.result_type(*(recipe.sources[source].dtype for source in sources))
