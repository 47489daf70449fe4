"""Local and remote files: bytes at random offsets, each fetched once per node.

Start at byte_file, the interface, and folder, which opens files. local is a file of this machine. cached is a
remote object in the node's cache, where each block is a file: it asks its process's fetcher for blocks and
reads their files. cache is what the processes of a node share. The fetcher is a light process; only it reads
from storage, through remote. codec and sums are what bytes are checked with. Nothing here imports torch.
"""

from meshfeed.files.byte_file import ByteFile, Content, FileStats, Vector
from meshfeed.files.cache.cache import Cache
from meshfeed.files.folder import Folder
from meshfeed.files.local.file import LocalFile, typed_errors

__all__ = ["ByteFile", "Cache", "Content", "FileStats", "Folder", "LocalFile", "Vector", "typed_errors"]
