"""Files: bytes at random offsets, and what a node keeps.

Read byte_file, the interface and files of this machine, and folder, which opens files; those in remote
storage are in the package `remote`. cache is a folder that all processes of a node share: what one of them
has made once for all (once), and blocks of remote objects. sums are checksums of a pair's blocks. Nothing
here imports torch.
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
