"""Users' datasets: items by `EpochIndex`, made ahead in worker processes, with any fields.

mapped is the store over a dataset, views turn its indices around, workers make items ahead, and samples is
the rule: what a microbatch has of items.
"""

from meshfeed.datasets.mapped import Mapped
from meshfeed.datasets.samples import Samples
from meshfeed.datasets.views import Resampled, SameEveryEpoch

__all__ = ["Mapped", "Resampled", "SameEveryEpoch", "Samples"]
