"""What the fork server imports once for all test processes."""

import megatron.core.parallel_state
import megatron.core.utils  # noqa: F401
import torch.distributed  # noqa: F401

import meshfeed  # noqa: F401
