"""Files, here or far away: bytes at random places, each fetched once per node.

byte_file is the contract; local is a file of this machine, cached a remote object in the node's cache.
Nothing here imports torch: the leader, which fetches for its node, is a light process of its own.
"""

from meshfeed.files.byte_file import ByteFile, Content, FileStats, Vector
from meshfeed.files.local import LocalFile, typed_errors

__all__ = ["ByteFile", "Content", "FileStats", "LocalFile", "Vector", "typed_errors"]
