"""One virtual dataloader for every rank of an N-D-parallel training job.

import meshfeed as mf

layout = mf.Layout.parse("tp2-cp2-dp2-pp2", ranks_per_node=8)
recipe = mf.Recipe(mf.open("corpus"), mf.Windows(4096), batch=256)
with mf.Feed(recipe, layout) as feed:
    for step in feed:
        for microbatch in step.microbatches:
            train(microbatch)
        save(feed.state_dict())
"""

import importlib
import os
import typing

from meshfeed import errors as errors
from meshfeed import layout as layout
from meshfeed import order as order
from meshfeed import plan as plan
from meshfeed import roles as roles
from meshfeed.batch import Batch
from meshfeed.errors import MeshfeedError
from meshfeed.layout import Layout
from meshfeed.machine import Machine
from meshfeed.mixture import Mixture
from meshfeed.order import step_at
from meshfeed.plan import Align, CostModel, ModelShape, Packing
from meshfeed.recipe import Blocks, Recipe
from meshfeed.roles import Field, StageMap
from meshfeed.state import State
from meshfeed.transport import Transport

if typing.TYPE_CHECKING:
    from meshfeed import amendments as amendments
    from meshfeed.datasets import Mapped, Resampled, SameEveryEpoch, Samples
    from meshfeed.exchange import Exchange
    from meshfeed.feed import Feed
    from meshfeed.feed.batch import Microbatch, Step
    from meshfeed.files import Cache
    from meshfeed.losses import loss_by_source
    from meshfeed.masked import Masked
    from meshfeed.multimodal import Multimodal, exchange_encoded
    from meshfeed.sequence import Chat, Documents, Windows
    from meshfeed.simulation import simulate
    from meshfeed.store import DatasetWriter, IndexedWriter, Lengths
    from meshfeed.store import open_store as open

    MegatronGPT: typing.Any

__all__ = [
    "Align",
    "Batch",
    "Blocks",
    "Cache",
    "Chat",
    "CostModel",
    "DatasetWriter",
    "Documents",
    "Exchange",
    "Feed",
    "Field",
    "IndexedWriter",
    "Layout",
    "Lengths",
    "Machine",
    "Mapped",
    "Masked",
    "MegatronGPT",
    "MeshfeedError",
    "Microbatch",
    "Mixture",
    "ModelShape",
    "Multimodal",
    "Packing",
    "Recipe",
    "Resampled",
    "SameEveryEpoch",
    "Samples",
    "StageMap",
    "State",
    "Step",
    "Transport",
    "Windows",
    "exchange_encoded",
    "loss_by_source",
    "open",
    "simulate",
    "step_at",
]

_ON_FIRST_USE = {
    "Cache": "meshfeed.files",
    "Chat": "meshfeed.sequence",
    "DatasetWriter": "meshfeed.store",
    "Documents": "meshfeed.sequence",
    "Exchange": "meshfeed.exchange",
    "Feed": "meshfeed.feed",
    "IndexedWriter": "meshfeed.store",
    "Lengths": "meshfeed.store",
    "Mapped": "meshfeed.datasets",
    "Masked": "meshfeed.masked",
    "Microbatch": "meshfeed.feed.batch",
    "Multimodal": "meshfeed.multimodal",
    "Resampled": "meshfeed.datasets",
    "SameEveryEpoch": "meshfeed.datasets",
    "Samples": "meshfeed.datasets",
    "Step": "meshfeed.feed.batch",
    "Windows": "meshfeed.sequence",
    "exchange_encoded": "meshfeed.multimodal.encoded",
    "loss_by_source": "meshfeed.losses",
    "open": "meshfeed.store:open_store",
    "simulate": "meshfeed.simulation",
}
"""Name -> module of what imports torch. The planner and the rest of the core need NumPy alone."""

_PACKAGES = {
    *("amendments", "deliver", "feed", "files", "metrics", "sequence", "store"),
    *("datasets", "exchange", "multimodal"),  # around it
    *("formats", "processors", "report", "sinks"),  # of the outer circle
}
"""What `import meshfeed` offers as attributes, imported on first use too."""

importlib.import_module("meshfeed.forks")  # it must know of every fork from here on
if "TORCHELASTIC_RUN_ID" in os.environ:
    importlib.import_module("meshfeed.uncaught").shorten()


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        return importlib.import_module("meshfeed.extras").version_of("meshfeed")
    if name in _PACKAGES:
        return importlib.import_module(f"meshfeed.{name}")
    if name == "MegatronGPT":  # an adapter: the core knows it by its registered name alone
        plugins = importlib.import_module("meshfeed.plugins")
        try:
            return globals().setdefault(name, plugins.named(plugins.RULES, "megatron_gpt"))
        except errors.OptionError as error:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, other_name = _ON_FIRST_USE[name].partition(":")
    return globals().setdefault(name, getattr(importlib.import_module(module), other_name or name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
