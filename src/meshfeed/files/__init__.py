"""Files, here or far away: bytes at random places, each fetched once per node.

Start at byte_file, the contract. local is a file of this machine. cached is a remote object in the node's
cache: it asks the leader through link, and reads what the table says is there. The leader (leader, and fetch
and shelf below it) is a light process of its own, which alone reads from storage (client); writer is for
whoever writes there. Nothing here imports torch.
"""

from meshfeed.files.byte_file import ByteFile, Content, FileStats, Vector
from meshfeed.files.cache import Cache
from meshfeed.files.local import LocalFile, typed_errors
from meshfeed.files.open_file import Folder

__all__ = ["ByteFile", "Cache", "Content", "FileStats", "Folder", "LocalFile", "Vector", "typed_errors"]
