"""Chat: conversations prepared as tokens with a loss mask beside them, packed as documents are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshfeed.errors import RecipeError
from meshfeed.mixture import Store
from meshfeed.sequence.documents import Documents

_MASK = "loss_mask"


@dataclass(frozen=True)
class Chat(Documents):
    """A sequence is a conversation; loss is borne where the store's column "loss_mask" says so.

    The column has a value for every token: not 0 where the model is to say that very token, as `meshfeed
    prepare --chat` writes it. The field loss_mask has it at the place from which the token is predicted: for
    tokens x[0..n) with mask m[0..n), place i has tokens x[i], labels x[i + 1], loss_mask m[i + 1], and the
    last place has label and loss_mask 0. So m[0] is never used: nothing comes before the first token. Of a
    conversation that is cut, by max_len, nothing beyond the cut counts, while one that the packing splits or
    truncates keeps the label and the mask of its last place, which lie one token on. `step.valid_tokens`
    counts the places whose loss_mask is not 0, exactly, before anything is read.

    All else is as `Documents` has it, which makes these very fields of such a store. But Documents takes a
    store without the column for plain text and bears loss everywhere; Chat refuses it.

    Attributes:
        max_len: only the first so many tokens of each conversation, whatever the capacity; None for all.

    Raises RecipeError for a store without the column "loss_mask", or with a column "labels", whose mask would
    be of the place itself (take Documents), and for max_len below 1.
    """

    def num_sequences(self, store: Store) -> int:
        """Conversations in the store, empty ones too. Raises RecipeError for a store of no conversations."""
        columns: Collection[str] = getattr(store, "columns", ())
        if _MASK not in columns:
            raise RecipeError(
                f"Chat needs a column {_MASK!r} beside the tokens, which {store!r} has not; prepare it with "
                f"--chat or write it with DatasetWriter, or take Documents to train on every token"
            )
        if "labels" in columns:
            raise RecipeError(
                f"Chat makes labels of the tokens, and {store!r} has a column of them; take Documents, which "
                f"delivers that column"
            )
        return super().num_sequences(store)
