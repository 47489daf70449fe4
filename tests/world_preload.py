"""What the fork server imports once for all test processes."""

import gc
import sys
from pathlib import Path

import hypothesis  # noqa: F401
import megatron.core.utils  # noqa: F401

sys.path.append(str(Path(__file__).parent / "outer" / "integrations"))

import megatron_world  # noqa: F401

gc.collect()
gc.freeze()  # no rank looks at it again, which takes long and copies its pages
