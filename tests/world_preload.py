"""What the fork server imports once for all test processes."""

import torch.distributed  # noqa: F401

import meshfeed  # noqa: F401
