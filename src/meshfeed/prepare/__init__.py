"""Text -> token store: files are cut into parts, the parts encoded anywhere, and joined in order.

`prepare` is the straight line; `encode_part` is what an `Engine` runs, knowing a folder and a number.
`ChatEncoder` makes tokens and a loss mask of conversations, `Conversion` one format of tokens of another.
"""

from meshfeed.prepare.chat import ChatEncoder
from meshfeed.prepare.convert import Conversion
from meshfeed.prepare.encode import encode_part
from meshfeed.prepare.encoders import Chats, Text
from meshfeed.prepare.encoding import Encoder, Encoding
from meshfeed.prepare.engine import Engine, Local
from meshfeed.prepare.multimodal import Multimodal
from meshfeed.prepare.on_ray import OnRay
from meshfeed.prepare.on_slurm import OnSlurm
from meshfeed.prepare.prepare import Prepared, Progress, prepare

__all__ = [
    "ChatEncoder",
    "Chats",
    "Conversion",
    "Encoder",
    "Encoding",
    "Engine",
    "Local",
    "Multimodal",
    "OnRay",
    "OnSlurm",
    "Prepared",
    "Progress",
    "Text",
    "encode_part",
    "prepare",
]
