"""Chat: conversations as tokens with a loss mask, packed like documents."""

from __future__ import annotations

from dataclasses import dataclass

from meshfeed.errors import RecipeError
from meshfeed.mixture import Store
from meshfeed.sequence.documents import Documents

_MASK = "loss_mask"


@dataclass(frozen=True)
class Chat(Documents):
    """A sequence is a conversation; the store's column "loss_mask" marks the tokens that bear loss.

    The column has a value for every token: nonzero if the model should produce that token, as written by
    `meshfeed prepare --chat`. The field loss_mask is shifted to the position that predicts the token: for
    tokens x[0..n) with mask m[0..n), position i has tokens x[i], labels x[i + 1], loss_mask m[i + 1], and the
    last position has label and loss_mask 0. So m[0] is never used. A conversation cut by max_len ends at the
    cut. One that the packing splits or truncates keeps the label and mask of its last position, from the
    following token. `step.valid_tokens` is the exact number of positions with nonzero loss_mask, known before
    anything is read.

    Otherwise it is the same as `Documents`, which makes equal fields from such a store. But for a store
    without the column, Documents computes loss everywhere, and Chat raises an error.

    Attributes:
        max_len: keep only this many first tokens of each conversation; None for all.

    Raises RecipeError for a store without the column "loss_mask", for one with a column "labels", where the
    mask would apply to the position itself (use Documents), and for max_len below 1.
    """

    def num_sequences(self, store: Store) -> int:
        """Conversations in the store, including empty ones. Raises RecipeError for other stores."""
        if _MASK not in store.columns:
            raise RecipeError(
                f"Chat needs a column {_MASK!r}, which {store!r} lacks; prepare it with --chat, write it "
                f"with DatasetWriter, or use Documents to train on every token"
            )
        if "labels" in store.columns:
            raise RecipeError(
                f"Chat computes labels from the tokens, but {store!r} has a column of labels; use Documents, "
                f"which delivers that column"
            )
        return super().num_sequences(store)
