"""Text -> token store: cut files into parts, encode the parts on any machine, join them in order.

Read `prepare` first, then the packages in the order of the data:

    inputs     paths and URLs -> files, cut into parts -> records
    encoding   records -> tokens: text, chats, images, audio and video
    job        the folder of a job: its parts, each encoded once, merged in order, published
    engines    start the tasks that encode parts

`raw_text` does the same when `mf.open` gets text.
"""

from meshfeed.prepare.encoding.chat import ChatEncoder, Chats
from meshfeed.prepare.encoding.encodings import Encoder, Encoding
from meshfeed.prepare.encoding.multimodal import Multimodal
from meshfeed.prepare.encoding.text import Text
from meshfeed.prepare.engines.local import Local
from meshfeed.prepare.engines.on_ray import OnRay
from meshfeed.prepare.engines.on_slurm import OnSlurm
from meshfeed.prepare.engines.tasks import Engine
from meshfeed.prepare.job.encode_part import encode_part
from meshfeed.prepare.prepare import Prepared, Progress, prepare

__all__ = [
    "ChatEncoder",
    "Chats",
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
