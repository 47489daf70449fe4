"""MegatronGPT: the samples of Megatron-core's GPTDataset, alone or blended, in the order of its job.

The order comes from arrays that are built once, as in Megatron, not from the recipe's own shuffle.
`gpt_order` describes them; `store.node_arrays` builds them once per node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Allocate, Array, Columns, Longs
from meshfeed.errors import RecipeError, StoreError
from meshfeed.integrations.megatron.gpt_index import Dataset, Indexes
from meshfeed.integrations.megatron.gpt_order import PARTS, Part, document_range
from meshfeed.intervals import numbers_in
from meshfeed.mixture import Mixture, Store
from meshfeed.order import Draws, OwnOrder
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe
from meshfeed.sequence.runs import Portion
from meshfeed.sequence.windows import Rows, Starts
from meshfeed.store import Lengths
from meshfeed.whole import is_whole


class _Memo:
    """The indexes of the last recipe, and its end-of-document token; a copied rule starts without them."""

    def __init__(self) -> None:
        self.last: tuple[Recipe, Indexes] | None = None
        self.eod: int | None = None  # seen in the tokens read
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Memo, ()


@dataclass(frozen=True)
class MegatronGPT(Rows, OwnOrder):
    """The samples that a Megatron-core GPT job trains on, bit for bit and in its order.

    The recipe's seed is Megatron's `seed`; its sources are the data paths, in their order, blended by the
    weights of `data` if it has any, else by their sizes. Leave the recipe's `epochs` and `shuffle` alone:
    samples and order are Megatron's. A `Mixture` of proportions is its blend with weights, one that repeats
    every source once is its blend without. The stream ends after `samples`.

    Attributes:
        length: Megatron's `seq_length`.
        samples: how many samples this part of the job draws: for "train", `train_iters * global_batch_size`,
            also when it takes over a Megatron job. None for one epoch of each source.
        split: shares of the documents for train, valid and test, such as "969,30,1". A source used for one
            part only, as with `train_data_path`, is "1", "0,1" or "0,0,1".
        part: "train", "valid" or "test".
        reset_position_ids, reset_attention_mask, eod_mask_loss: as in `Windows`. Megatron finds documents by
            the end-of-document token. The result is the same if each document ends in that token and has none
            inside; reading any other document with one of these options raises StoreError.
        add_extra_token_to_sequence: whether a sample includes the token after it, the label of its last one.
            Without it, the last token of each sample bears no loss.
        drop_last_partial_validation_sequence: whether "valid" drops tokens that do not fill a sample. If not,
            the last sample is filled with tokens 0 that bear no loss.
        mid_level_dataset_surplus: share of additional samples built for each source of a weighted blend.
        index_cache: a folder for the arrays that it builds, which all processes of a node then share; None
            builds them in the memory of each process. No sample depends on it.

    A document is a sequence of the .idx, as in Megatron. Padding tokens inside the data get no special
    treatment. Fields are those of `Windows`. Raises RecipeError for other values.
    """

    _: KW_ONLY
    samples: int | None
    split: str = "1"
    part: Part = "train"
    add_extra_token_to_sequence: bool = True
    drop_last_partial_validation_sequence: bool = True
    mid_level_dataset_surplus: float = 0.005
    index_cache: str | os.PathLike[str] | None = field(default=None, compare=False, repr=False)
    _memo: _Memo = field(default_factory=_Memo, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None and not is_whole(self.samples):
            raise RecipeError(f"MegatronGPT(samples={self.samples!r}): a whole number from 1, or None")
        if self.part not in PARTS:
            raise RecipeError(f"MegatronGPT(part={self.part!r}): choose one of {', '.join(PARTS)}")
        document_range(self.split, self.part, 0)
        for option in ("add_extra_token_to_sequence", "drop_last_partial_validation_sequence"):
            if type(getattr(self, option)) is not bool:
                raise RecipeError(f"MegatronGPT({option}={getattr(self, option)!r}): choose True or False")
        surplus = self.mid_level_dataset_surplus
        if type(surplus) is not float or not 0 <= surplus < 2**31:
            raise RecipeError(f"MegatronGPT(mid_level_dataset_surplus={surplus!r}): a float from 0.0")
        folder: Any = self.index_cache
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise RecipeError(f"MegatronGPT(index_cache={folder!r}): the path of a folder, or None")

    # -- the order --------------------------------------------------------------------------------------

    def num_sequences(self, store: Store) -> int:
        """Samples in one epoch of a store's part. Raises StoreError for a store without a whole one."""
        return Dataset(self, store, None, seed=0).passes.num_samples

    def num_positions(self, recipe: Recipe) -> int:
        """Length of the stream."""
        return self._indexes(recipe).num_positions

    def draws_between(self, recipe: Recipe, start: int, stop: int) -> Draws:
        """Positions [start, stop): which source, and which index of Megatron's dataset over it."""
        indexes = self._indexes(recipe)
        if stop > (end := indexes.num_positions):
            raise RecipeError(
                f"last='pad': MegatronGPT has no sample behind its {end}; give Batch(last='drop') or 'keep'"
            )
        return indexes.draws_between(start, stop)

    def prepare(self, recipe: Recipe) -> None:
        """Build or open all arrays now, instead of each on first use."""
        self._indexes(recipe).open_all()

    def _indexes(self, recipe: Recipe) -> Indexes:
        with self._memo.lock:
            last = self._memo.last
            if last is None or last[0] is not recipe:
                made = Indexes(self, recipe.sources, _weights_of(recipe), recipe.seed)
                last = self._memo.last = recipe, made
        return last[1]

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """See Rows. Raises StoreError for documents that Megatron would divide differently."""
        columns = super().load(recipe, portion, allocate)
        if self._needs_documents:
            self._check_ends(recipe, portion, cast(Array, columns["tokens"]))
        return columns

    def _check_ends(self, recipe: Recipe, portion: Portion, tokens: Array) -> None:
        """Check that each document read ends in the same token and has it nowhere else."""
        row, offset = self._document_starts(recipe, portion.draws)
        ends = np.zeros((len(portion.draws), self.length), np.bool_)
        ends[row, offset - 1] = True
        places = _places(portion.held_row)
        whole = places < self.length  # the index does not say whether the token after the sample is an end
        places, tokens = places[whole], tokens[:, whole]
        made_up = np.array([isinstance(store, Lengths) for store in recipe.sources])[portion.draws.source]
        known = self._tokens_in(recipe, portion.draws) - 1  # the last token may have no label; it is no end
        real = (places < known[:, None]) & ~made_up[:, None]
        ends = ends[:, places]
        found = tokens[ends & real]
        if found.size and self._memo.eod is None:
            self._memo.eod = int(found[0])
        if self._memo.eod is None:
            return
        wrong = real & (ends != (tokens == self._memo.eod))
        if wrong.any():
            at, place = (int(each[0]) for each in np.nonzero(wrong))
            store = recipe.sources[int(portion.draws.source[at])]
            how = "ends in" if ends[at, place] else "has inside"
            raise StoreError(
                f"{store!r}, sample {int(portion.draws.index[at])}: a document {how} token "
                f"{int(tokens[at, place])}, others end in {self._memo.eod}. Under reset_position_ids, "
                f"reset_attention_mask or eod_mask_loss Megatron looks for the end-of-document token, so "
                f"samples would differ from its own; end each document in that token and have none inside "
                f"(meshfeed prepare --eod), or leave these options out"
            )

    # -- defined for rows ----------------------------------------------------------------------------------

    def _tokens_in(self, recipe: Recipe, draws: Draws) -> Longs:
        tokens = np.empty(len(draws), np.int64)
        for s, mine, of_source in draws.by_source():
            tokens[mine] = self._indexes(recipe).datasets[s].tokens_of(of_source.index)
        return tokens

    def _predicting(self, recipe: Recipe, draws: Draws) -> Longs:
        return np.minimum(self._tokens_in(recipe, draws) - 1, self.length).clip(0)

    def _document_starts(self, recipe: Recipe, draws: Draws) -> Starts:
        rows, offsets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for s, mine, of_source in draws.by_source():
            dataset = self._indexes(recipe).datasets[s]
            pieces, tokens = dataset.pieces_of(of_source.index), dataset.tokens_of(of_source.index)
            inside = (pieces.at > 0) & (pieces.at <= self.length)
            # the padding of a short sample begins after the end of a document
            short = np.flatnonzero((tokens > 0) & (tokens <= self.length))
            rows += [mine[pieces.row[inside]], mine[short]]
            offsets += [pieces.at[inside], tokens[short]]
        row, offset = np.concatenate(rows), np.concatenate(offsets)
        ascending = np.lexsort((offset, row))
        return row[ascending], offset[ascending]

    def ranges(self, recipe: Recipe, source: int, draws: Draws, cut: Slices) -> tuple[Longs, Longs]:
        """See Rows; a slice has a piece for each document in it, since documents are shuffled."""
        pieces = self._indexes(recipe).datasets[source].pieces_of(draws.index)
        # Each slice of the cut, with the token after it, meets each piece: [slices, pieces].
        first = np.maximum(cut.start[:, None], pieces.at)
        size = np.minimum(cut.stop[:, None] + 1, pieces.at + pieces.size) - first
        which, piece = np.nonzero(size > 0)
        in_order = np.argsort(pieces.row[piece] * cut.start.size + which, kind="stable")
        which, piece = which[in_order], piece[in_order]
        starts = (pieces.start - pieces.at)[piece] + first[which, piece]
        return starts, starts + size[which, piece]

    def _read(self, recipe: Recipe, source: int, draws: Draws, cut: Slices, out: Array) -> None:
        tokens = self._indexes(recipe).datasets[source].tokens_of(draws.index)
        if (tokens > self.length).all():
            super()._read(recipe, source, draws, cut, out)
            return
        ranges = self.ranges(recipe, source, draws, cut)
        out[:] = 0
        out[_places(cut) < tokens[:, None]] = recipe.sources[source].read_stream(*ranges)


def _places(cut: Slices) -> Longs:
    """Offsets in a row of the tokens that are held, each slice with one more; int64."""
    return numbers_in(cut.start, cut.sizes + 1)


def _weights_of(recipe: Recipe) -> Sequence[float] | None:
    """The weights of a blend's sources; None for their sizes. Raises RecipeError for other orders."""
    if recipe.epochs is not None or recipe.shuffle != "global":
        raise RecipeError(
            f"epochs={recipe.epochs}, shuffle={recipe.shuffle!r}: MegatronGPT has its own order and end; "
            f"leave both out, and set samples="
        )
    if not isinstance(recipe.data, Mixture):
        return None
    (part, *later), names = recipe.data.parts, recipe.data.names
    weights, units = [float(each.amount) for each in part.amounts], {each.by for each in part.amounts}
    if not later and recipe.data.batches == "mixed" and min(weights) > 0:
        if units == {"proportion"}:
            return weights
        if units <= {"repeat", "size"} and set(weights) == {1.0}:
            return None
    raise RecipeError(
        f"MegatronGPT over {', '.join(names[:4])}: Megatron blends by constant proportions above 0, or by "
        f"size, which means a store without an amount"
    )
