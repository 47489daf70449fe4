"""Why a rank ended, in a form that travels: the class of an error, its text, the ranks at fault.

Nothing but classes of `meshfeed.errors` is ever made from what comes in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from meshfeed import errors
from meshfeed.errors import DeliveryError, MeshfeedError, PeerError, VerifyError

_MOST_RANKS = 64
_NO_CAUSE = "a rank failed, and why cannot be read"


@dataclass(frozen=True, slots=True)
class Cause:
    """An error without its traceback.

    Attributes:
        kind: name of its class in `meshfeed.errors`; whatever else is there counts as DeliveryError.
        text: its message.
        ranks: the ranks at fault, of a PeerError or VerifyError.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The cause that an error is; one that is not meshfeed's own keeps its class in its text."""
        # a subclass that lives elsewhere travels as what it is a kind of
        known = next((c for c in type(error).__mro__ if vars(errors).get(c.__name__) is c), None)
        if known is None:
            return cls(DeliveryError.__name__, f"{type(error).__name__}: {error}")
        ranks = error.ranks[:_MOST_RANKS] if isinstance(error, PeerError | VerifyError) else ()
        return cls(known.__name__, str(error), tuple(ranks))

    def error(self) -> MeshfeedError:
        """The error again."""
        kind = vars(errors).get(self.kind)
        if not (isinstance(kind, type) and issubclass(kind, MeshfeedError)):
            kind = DeliveryError
        if issubclass(kind, PeerError | VerifyError):
            return kind(self.text, self.ranks)
        return kind(self.text)

    def encode(self, most_bytes: int) -> bytes:
        """As JSON of at most so many bytes; a longer text loses its end."""
        text = self.text
        while True:
            encoded = json.dumps([self.kind, text, self.ranks], ensure_ascii=False).encode(errors="replace")
            if len(encoded) <= most_bytes or not text:
                return encoded
            text = text[: len(text) - max((len(encoded) - most_bytes) // 4, 1)]

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """The cause that such bytes tell; total, since the bearer of bad news must not fail at it."""
        try:
            told: Any = json.loads(encoded.decode(errors="replace"))
            kind, text, ranks = told
            return cls(str(kind), str(text), tuple(int(rank) for rank in ranks))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return cls(DeliveryError.__name__, _NO_CAUSE)
