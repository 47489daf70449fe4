"""What the fork server imports once for all test processes."""

import meshfeed  # noqa: F401
import torch.distributed  # noqa: F401
