"""Remote storage: objects read like local files, each fetched once per node.

cached reads an object through the node's cache, which keeps each block (blocks, cut) as a file: it asks its
process's fetcher for blocks, then reads their files. The fetcher is a light process, and the only one that
reads from storage: obstore does not survive a fork. client is what it reads with, retries and errors what it
does about failures, codec what undoes compression and compares hashes. hub reads datasets of the Hugging Face
Hub, whose URLs hub_url parses; revision finds a commit, listing lists a folder, answers shares what storage
has said among the processes of a node. Nothing here imports torch. The core knows this package by its name
alone, see `plugins.remote_storage`.
"""

from meshfeed.remote.cached import CachedFile, listed
from meshfeed.remote.revision import pinned

__all__ = ["CachedFile", "listed", "pinned"]
