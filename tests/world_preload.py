"""What the fork servers import once for all ranks, and the last thing that they import."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch.distributed  # noqa: F401

import meshfeed.exchange
import meshfeed.simulation  # noqa: F401

gc.collect()
gc.freeze()  # no rank looks at it again, which takes long and copies its pages
