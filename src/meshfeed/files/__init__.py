"""Local and remote files: bytes at random offsets, each fetched once per node.

Read byte_file, the interface and files of this machine, and folder, which opens files. cached reads
remote objects through the node's cache, which keeps each block as a file: it asks its process's fetcher for
blocks, then reads their files. cache is that folder, which all processes of the node share. The fetcher is a
light process, and the only one that reads from storage, through remote. codec and sums check what arrives.
Nothing here imports torch.
"""

from meshfeed.files.byte_file import ByteFile, Content, Fetching, FileStats, LocalFile, Vector, typed_errors
from meshfeed.files.cache.cache import Cache
from meshfeed.files.folder import Folder

__all__ = [
    "ByteFile",
    "Cache",
    "Content",
    "Fetching",
    "FileStats",
    "Folder",
    "LocalFile",
    "Vector",
    "typed_errors",
]
