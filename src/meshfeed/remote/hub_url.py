"""URLs of datasets on the Hugging Face Hub: hf://datasets/OWNER/NAME@REVISION/PATH."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote

from meshfeed.errors import StoreError
from meshfeed.files.url import HUB
from meshfeed.remote.retries import GIVE_UP

_ROOT = re.compile(rf"{HUB}([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.S)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubPath(NamedTuple):
    """The parts of a URL.

    Attributes:
        repo: owner/name.
        revision: branch, tag or commit; "main" if the URL names none.
        path: in the repository.
    """

    repo: str
    revision: str
    path: str

    @property
    def root(self) -> str:
        """The URL of the repository at the revision."""
        return f"{HUB}{self.repo}@{quote(self.revision, safe='')}"


def hub_path(url: str) -> HubPath:
    """The parts of a URL. Raises StoreError for one that names no dataset."""
    found = _ROOT.fullmatch(url)
    if found is None:
        raise StoreError(f"{url}: names no dataset; write hf://datasets/OWNER/NAME@REVISION/PATH")
    return HubPath(found[1], unquote(found[2] or "main"), found[3] or "")


def at_commit(url: str, commit: str) -> str:
    """The same URL at a commit."""
    repo, _, path = hub_path(url)
    return f"{HUB}{repo}@{commit}/{path}".rstrip("/")


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit, which never changes."""
    return _COMMIT.fullmatch(revision) is not None


def hub_options(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """`endpoint` and `token`, in any case, with or without HF_ before. Raises StoreError for others."""
    lower = {name.lower().removeprefix("hf_"): value for name, value in options.items() if name != GIVE_UP}
    unknown = sorted(lower.keys() - {"endpoint", "token"})
    if unknown:
        raise StoreError(
            f"{root}: unknown options {unknown}; the Hub has endpoint and token; a revision is written in "
            f"the URL, as in hf://datasets/OWNER/NAME@REVISION/PATH"
        )
    return lower
