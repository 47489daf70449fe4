"""Text -> token store: files are cut into parts, the parts encoded anywhere, and joined in order.

`prepare` is the straight line; `encode_part` is what an `Engine` runs, knowing a folder and a number.
"""

from meshfeed.prepare.encoders import Chats, Encoder, Encoding, Text
from meshfeed.prepare.engine import Engine, Local
from meshfeed.prepare.on_ray import OnRay
from meshfeed.prepare.on_slurm import OnSlurm
from meshfeed.prepare.prepare import Prepared, Progress, prepare
from meshfeed.prepare.task import encode_part

__all__ = [
    "Chats",
    "Encoder",
    "Encoding",
    "Engine",
    "Local",
    "OnRay",
    "OnSlurm",
    "Prepared",
    "Progress",
    "Text",
    "encode_part",
    "prepare",
]
