"""One virtual dataloader for every rank of an N-D-parallel training job.

import meshfeed as mf

layout = mf.Layout.parse("tp2-cp2-dp2-pp2", ranks_per_node=8)
recipe = mf.Recipe(data=mf.open("corpus"), sequence=mf.Windows(4096), batch=mf.Batch(sequences=256))
with mf.Feed(recipe, layout) as feed:
    for step in feed:
        for microbatch in step.microbatches:
            train(microbatch)
        save(feed.state_dict())
"""

import typing

from meshfeed.errors import (
    AccessError,
    CacheError,
    ChangedError,
    ChecksumError,
    DeliveryError,
    LayoutError,
    MeshfeedError,
    MetricsError,
    MissingError,
    OptionError,
    PeerError,
    PlanError,
    PrepareError,
    RecipeError,
    RoleError,
    StateError,
    StoreError,
    UnavailableError,
    VerifyError,
)
from meshfeed.exchange import Exchange
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch, Step
from meshfeed.files import Cache
from meshfeed.layout import Coord, Layout
from meshfeed.mixture import Mixture
from meshfeed.order import Draws, EpochIndex, rng
from meshfeed.plan import Align, CostModel, ModelShape, Packing
from meshfeed.recipe import Batch, Blocks, Recipe
from meshfeed.roles import Field, Role, StageMap, assign_roles
from meshfeed.sequence import Chat, Documents, Masked, Samples, Windows
from meshfeed.simulate import simulate
from meshfeed.state import State
from meshfeed.store import DatasetWriter, IndexedWriter, Lengths, Mapped, Resampled, SameEveryEpoch
from meshfeed.store import open_store as open

if typing.TYPE_CHECKING:
    from meshfeed.integrations.megatron.gpt import MegatronGPT

__all__ = [
    "AccessError",
    "Align",
    "Batch",
    "Blocks",
    "Cache",
    "CacheError",
    "ChangedError",
    "Chat",
    "ChecksumError",
    "Coord",
    "CostModel",
    "DatasetWriter",
    "DeliveryError",
    "Documents",
    "Draws",
    "EpochIndex",
    "Exchange",
    "Feed",
    "Field",
    "IndexedWriter",
    "Layout",
    "LayoutError",
    "Lengths",
    "Mapped",
    "Masked",
    "MegatronGPT",
    "MeshfeedError",
    "MetricsError",
    "Microbatch",
    "MissingError",
    "Mixture",
    "ModelShape",
    "OptionError",
    "Packing",
    "PeerError",
    "PlanError",
    "PrepareError",
    "Recipe",
    "RecipeError",
    "Resampled",
    "Role",
    "RoleError",
    "SameEveryEpoch",
    "Samples",
    "StageMap",
    "State",
    "StateError",
    "Step",
    "StoreError",
    "UnavailableError",
    "VerifyError",
    "Windows",
    "assign_roles",
    "open",
    "rng",
    "simulate",
]


def __getattr__(name: str) -> typing.Any:
    if name != "MegatronGPT":  # imported on its first use: few jobs need it, and it is a third of all imports
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from meshfeed.integrations.megatron.gpt import MegatronGPT

    return globals().setdefault(name, MegatronGPT)
