"""Every error that meshfeed raises on purpose.

MeshfeedError
├── LayoutError       ranks, dimensions, stage maps, meshes
├── RoleError         nobody can feed a rank that needs data
├── RecipeError       a recipe that cannot make a stream
│   └── OptionError   a wrong argument; also a StoreError, for `mf.open`
├── PlanError         lengths that cannot be packed as asked
├── StateError        a state of another recipe, or a damaged one
├── StoreError        a file that is not what it says
│   ├── MissingError      no such object
│   ├── AccessError       no permission, expired credentials, another region
│   ├── ChangedError      an object that was replaced under the run
│   ├── ChecksumError     bytes that are not those that were written, though fetched again
│   ├── UnavailableError  storage that goes on failing
│   └── CacheError        a cache folder that is full, too small, or not to be written
├── PrepareError      text that cannot be prepared as asked
├── MetricsError      a run log that cannot be written or read, or a sink that failed
└── DeliveryError     bytes that did not reach a rank
    ├── PeerError     a rank that is missing, late or gone
    └── VerifyError   ranks that should agree and do not

Each message says what is wrong, where (file and offset, rank, position or argument) and what to do.
"""

from collections.abc import Iterable


class MeshfeedError(Exception):
    """The root of the tree: catch this to catch all of them."""


class LayoutError(MeshfeedError, ValueError):
    """Ranks, dimensions, stage maps or meshes that do not fit together."""


class RoleError(MeshfeedError, ValueError):
    """Some rank needs data that no rank may or can give it."""


class RecipeError(MeshfeedError, ValueError):
    """A recipe that cannot make a stream of training steps."""


class PlanError(MeshfeedError, ValueError):
    """Lengths that cannot be packed, split or aligned as asked."""


class StateError(MeshfeedError, ValueError):
    """A saved state that belongs to another recipe, or is damaged."""


class StoreError(MeshfeedError, OSError):
    """A file or object that is missing, truncated or not of its format."""


class OptionError(RecipeError, StoreError):
    """A wrong argument: of another type, outside its range, or one that the others leave without effect."""


class MissingError(StoreError):
    """An object or file that is not there."""


class AccessError(StoreError):
    """Storage that refuses: no permission, expired credentials, a bucket of another region."""


class ChangedError(StoreError):
    """An object that was replaced or cut while a run was reading it."""


class ChecksumError(StoreError):
    """Bytes that are not those that were written, though they were fetched again."""


class UnavailableError(StoreError):
    """Storage that goes on failing, however often it is asked."""


class CacheError(StoreError):
    """A cache folder that is full, smaller than what a step needs, or not to be written."""


class PrepareError(MeshfeedError, RuntimeError):
    """Text that cannot be made tokens as asked: malformed lines, an output that exists, a dead worker."""


class MetricsError(MeshfeedError, OSError):
    """A run log that cannot be written or is damaged, or a sink of metrics that failed."""


class DeliveryError(MeshfeedError, RuntimeError):
    """Bytes that did not reach a rank."""


class PeerError(DeliveryError):
    """A rank that is missing, late or gone.

    Attributes:
        ranks: the global ranks at fault, as far as they are known.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class VerifyError(DeliveryError):
    """Ranks that should hold the same bytes and do not.

    Attributes:
        ranks: the global ranks that differ from the majority; all of the group where there is none.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
