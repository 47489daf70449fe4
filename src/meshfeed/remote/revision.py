"""The revision of a dataset on the Hugging Face Hub, resolved to a commit once per job."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping

from meshfeed.files.cache.cache import Cache
from meshfeed.remote.fetcher.objects import Address
from meshfeed.remote.fetcher.protocol import fetcher, retried
from meshfeed.remote.hub_url import at_commit, hub_options, hub_path, is_commit


def pinned(url: str, cache: Cache, options: Mapping[str, str]) -> str:
    """See `files.folder.pinned`."""
    if is_commit(hub_path(url).revision):
        return url
    address = Address.of(url, options)

    def ask() -> str:
        return retried(lambda: fetcher().ask("commit", address, cache.make(), what=address.url))

    endpoint = hub_options(address.root, address.options).get("endpoint")
    digest = hashlib.blake2b(f"{endpoint} {address.root}".encode(), digest_size=16)
    return at_commit(url, _first_found(f"meshfeed/hub/{digest.hexdigest()}", ask))


def _first_found(key: str, ask: Callable[[], str]) -> str:
    """What the first rank of the job found, shared through the default process group's store."""
    dist = sys.modules.get("torch.distributed")  # not imported means no process group
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return ask()
    store = dist.distributed_c10d._get_default_store()
    if store.check([key]):
        return store.get(key).decode()
    return store.compare_set(key, "", ask()).decode()
