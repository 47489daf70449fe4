"""Local and remote files: bytes at random offsets, each fetched once per node.

Start at byte_file, the interface. local is a file on this machine. cached is a remote object in the node's
cache (blocks), where each block is a file: it asks its process's helper for blocks (ask, channel) and reads
their files. The helper (helper, with fetch and objects) is a light process; only it reads from storage
(client). writer writes to storage. Nothing here imports torch.
"""

from meshfeed.files.byte_file import ByteFile, Content, FileStats, Vector
from meshfeed.files.cache import Cache
from meshfeed.files.local import LocalFile, typed_errors
from meshfeed.files.open_file import Folder

__all__ = ["ByteFile", "Cache", "Content", "FileStats", "Folder", "LocalFile", "Vector", "typed_errors"]
