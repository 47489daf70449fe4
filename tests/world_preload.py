"""What the fork servers import once for all ranks, and the last thing that they import."""

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch.distributed  # noqa: F401

import forks
import meshfeed.exchange
import meshfeed.simulation  # noqa: F401

forks.settle()
