"""Every error that meshfeed raises on purpose.

MeshfeedError
├── LayoutError       ranks, dimensions, stage maps, meshes
├── RoleError         no rank can feed a rank that needs data
├── RecipeError       a recipe that cannot make a stream
│   └── OptionError   a wrong argument; also a StoreError, for `mf.open`
├── PlanError         lengths that cannot be packed as asked
├── StateError        a state of another recipe, or a damaged one
├── StoreError        a missing or invalid file
│   ├── MissingError      no such object
│   ├── AccessError       no permission, expired credentials, another region
│   ├── ChangedError      an object that was replaced during the run
│   ├── ChecksumError     bytes with a wrong checksum, even after fetching again
│   ├── PartError         an image, audio or video that cannot be decoded
│   ├── UnavailableError  storage that keeps failing
│   └── CacheError        a cache folder that is full, too small or not writable
├── PrepareError      text that cannot be prepared as asked
├── MetricsError      a run log that cannot be written or read, or a sink that failed
└── DeliveryError     bytes that did not reach a rank
    ├── PeerError     a rank that is missing, late or dead
    └── VerifyError   ranks that should agree and do not

Each message says what is wrong, where (file and offset, rank, position or argument) and what to do.
Control characters in it, and changes of writing direction, are shown as escapes. File, bytes, rank and step
are also attributes, if they are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshfeed.text import visible


class MeshfeedError(Exception):
    """The root of the tree: catch this to catch all of them.

    Attributes:
        path: the file or URL; None, like the others, if there is none or it is not known.
        rank: the rank that met the error.
        step: the step at which its run ends.
        range: the bytes of the file, (first, end).
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        range: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(visible(str(message)))
        self.path, self.rank, self.step, self.range = path, rank, step, range


def class_of(error: BaseException) -> type[MeshfeedError] | None:
    """The class of this module that an error is, or derives from; None for a foreign error."""
    return next((kind for kind in type(error).__mro__ if globals().get(kind.__name__) is kind), None)


class LayoutError(MeshfeedError, ValueError):
    """Ranks, dimensions, stage maps or meshes that do not fit together."""


class RoleError(MeshfeedError, ValueError):
    """A rank needs data that no rank may or can send it."""


class RecipeError(MeshfeedError, ValueError):
    """A recipe that cannot make a stream of training steps."""


class PlanError(MeshfeedError, ValueError):
    """Lengths that cannot be packed, split or aligned as asked."""


class StateError(MeshfeedError, ValueError):
    """A saved state that belongs to another recipe, or is damaged."""


class StoreError(MeshfeedError, OSError):
    """A file or object that is missing, truncated or not of its format."""


class OptionError(RecipeError, StoreError):
    """A wrong argument: a wrong type, out of range, or without effect given the others."""


class MissingError(StoreError):
    """An object or file that does not exist."""


class AccessError(StoreError):
    """Storage that denies access: no permission, expired credentials, a bucket in another region."""


class ChangedError(StoreError):
    """An object that was replaced or truncated while a run was reading it."""


class ChecksumError(StoreError):
    """Bytes with a wrong checksum, even after fetching them again."""


class PartError(StoreError):
    """An image, audio or video that cannot be decoded. A processor raises it for bytes that are at fault."""


class UnavailableError(StoreError):
    """Storage that keeps failing after all retries."""


class CacheError(StoreError):
    """A cache folder that is full, smaller than what a step needs, or not writable."""


class PrepareError(MeshfeedError, RuntimeError):
    """Text that cannot be tokenized as asked: malformed lines, an output that exists, a dead worker."""


class MetricsError(MeshfeedError, OSError):
    """A run log that cannot be written or is damaged, or a sink of metrics that failed."""


class DeliveryError(MeshfeedError, RuntimeError):
    """Bytes that did not reach a rank."""


class _RanksError(DeliveryError):
    def __init__(self, message: str = "", ranks: Iterable[int] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.ranks = tuple(ranks)


class PeerError(_RanksError):
    """A rank that is missing, late or dead.

    Attributes:
        ranks: the global ranks at fault, as far as they are known.
    """


class VerifyError(_RanksError):
    """Ranks that should hold the same bytes and do not.

    Attributes:
        ranks: the global ranks that differ from the majority; all of the group without a majority.
    """
