"""The interface of a sequence rule: two halves, with the delivery between them.

`load` reads *columns*, the compact stored bytes. Only they are sent. `build` turns columns and the plan into
the fields of a microbatch. It runs on every rank and is pure, so that all deliveries give the same bytes, and
fields computed from lengths alone are never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Arrays, Columns
from meshfeed.order import Draws
from meshfeed.recipe import Recipe, Rule
from meshfeed.roles import Field
from meshfeed.sequence.runs import Portion


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
