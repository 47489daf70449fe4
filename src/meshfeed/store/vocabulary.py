"""Whether the tokens of stores are within a model's vocabulary: from the index, or as they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed.errors import StoreError
from meshfeed.store.base import StreamStore

_NAMED = 8
_REMEDY = "use the model's tokenizer, or give the model's real vocabulary size, padding included"


def check_stores(stores: Sequence[Any], vocab_size: int) -> bool:
    """Whether tokens must be checked as they are read, because some store's index lacks its largest token.

    Reads no tokens. Raises StoreError for a store whose largest token is known and not below `vocab_size`.
    """
    is_open = False
    for store in stores:
        largest = store.largest_token if isinstance(store, StreamStore) else None
        if largest is None:
            narrow = isinstance(store, StreamStore) and store.dtype.kind == "u"
            is_open |= not narrow or int(np.iinfo(store.dtype).max) >= vocab_size
        elif largest >= vocab_size:
            raise StoreError(
                f"{store.path}: its largest token is {largest}, and vocab_size={vocab_size} allows 0 to "
                f"{vocab_size - 1}; {_REMEDY}",
                path=store.path,
            )
    return is_open


def check_tokens(tokens: Any, vocab_size: int | None, stores: Sequence[Any]) -> None:
    """Raises StoreError, naming the stores, for tokens that are not in [0, vocab_size); None is 2**63.

    tokens: an array, or one for each sequence; other objects than arrays of whole numbers are not checked.
    What a dtype cannot hold is not looked for.
    """
    arrays: Sequence[Any] = [tokens] if isinstance(tokens, np.ndarray) else tokens or ()
    whole = [a for a in arrays if isinstance(a, np.ndarray) and a.dtype.kind in "iu" and a.size]
    limit = 1 << 63 if vocab_size is None else vocab_size
    largest = max((int(each.max()) for each in whole if np.iinfo(each.dtype).max >= limit), default=0)
    smallest = min((int(each.min()) for each in whole if each.dtype.kind == "i"), default=0)
    if largest >= limit or smallest < 0:
        names = ", ".join(str(getattr(store, "path", store)) for store in stores[:_NAMED])
        allowed = f"vocab_size={vocab_size} allows 0 to {limit - 1}; {_REMEDY}"
        if vocab_size is None:
            allowed = "tokens are whole numbers from 0 below 2**63; write the store again"
        raise StoreError(f"{names}: token {largest if smallest >= 0 else smallest} was read, and {allowed}")
