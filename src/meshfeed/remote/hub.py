"""Datasets on the Hugging Face Hub: hf://datasets/OWNER/NAME@REVISION/PATH, read at one commit.

The Hub's answers about a commit never change, so the processes of a node share them through a folder of the
cache; see `cache.answers`.

    revision-KEY    the commit of a branch or tag, and when it was requested
    tree-KEY        size and hash of every file of a commit
    url-KEY         a signed URL for the bytes of a file; requested again when it has expired
    pause-KEY       no request before the modification time of this file

So the number of requests to the Hub depends on neither ranks nor blocks; blocks come from the signed URL.
They are not read by obstore, which would need a client with connections of its own for each signed URL, and
whose errors do not say how long the server asks to wait. Used by the fetcher.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from meshfeed.errors import AccessError, ChangedError, MissingError, StoreError
from meshfeed.extras import install
from meshfeed.remote.answers import recent, shared
from meshfeed.remote.errors import REPLACED, reason, refuse_other_size
from meshfeed.remote.hub_url import hub_options, hub_path, is_commit
from meshfeed.remote.retries import Patience, Retries, Stat

ENDPOINT = "https://huggingface.co"
_MOST_PAUSE_S = 600.0
_PAGE = 1000  # files in a page of the Hub's listing
_FULL = 50  # divides the number of files in full pages, also of mirrors


class HubError(Exception):
    """An unexpected answer of the Hub, or of the storage behind it.

    Attributes:
        status: of HTTP.
        wait_s: how long the server asks to wait; 0 if it does not say.
    """

    def __init__(self, status: int, wait_s: float, text: str) -> None:
        super().__init__(text)
        self.status, self.wait_s = status, wait_s


class HubClient(Retries):
    """Reads the files of one dataset at one revision. Threads share one. All methods may raise StoreError.

    Args:
        root: hf://datasets/OWNER/NAME@REVISION.
        options: `endpoint` and `token`; HF_ENDPOINT and HF_TOKEN are their defaults. And GIVE_UP.
        folder: for what the node shares; private to this user, since signed URLs are secrets.
        patience: timeouts and retries; None for those of the options.
    """

    def __init__(
        self, root: str, options: Mapping[str, str], folder: Path, patience: Patience | None = None
    ) -> None:
        super().__init__(root, patience or Patience.of(options))
        given = hub_options(root, options)
        self._repo, self._revision, _ = hub_path(root)
        self._endpoint = given.get("endpoint", ENDPOINT).rstrip("/")
        self._given_token = given.get("token")
        self._folder = folder
        # not a cached_property: in Python 3.11, that holds a lock of the class during the request
        self._commit = self._revision if is_commit(self._revision) else None
        self._listing: dict[str, list[Any]] | None = None

    @property
    def commit(self) -> str:
        """The commit of the revision; the same for all processes of the node that ask at the same time."""
        if self._commit is None:
            self._commit = self._resolved()
        return self._commit

    def _resolved(self) -> str:
        def ask() -> str:
            found = self._asked(
                lambda: self._api.dataset_info(
                    self._repo, revision=self._revision, expand=["sha"], timeout=self._patience.timeout_s
                ),
                "",
            )
            return str(found.sha)

        return str(self._shared("revision", self._revision, *recent(ask))[0])

    def stat(self, path: str) -> Stat:
        """Size and hash of a file. Raises MissingError."""
        found = self._tree.get(path)
        if found is None:
            raise MissingError(f"{self._name(path)}: no such object; check the URL")
        return Stat(found[0], found[1])

    def glance(self, path: str, num_bytes: int) -> tuple[Stat, Any]:
        """Size and hash of a file, with its first bytes as a buffer. Raises MissingError."""
        stat = self.stat(path)
        return stat, self.read(path, 0, min(num_bytes, stat.size_bytes), stat.tag)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(path, size) of all files below a folder, sorted."""
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        return sorted((path, size) for path, (size, _) in self._tree.items() if path.startswith(below))

    def read(self, path: str, begin: int, end: int, tag: str, size_bytes: int | None = None) -> Any:
        """Exactly the bytes [begin, end) of the file with the hash `tag`, as a buffer."""
        if begin == end:
            return b""
        stat = self.stat(path)
        if stat.tag != tag:
            raise ChangedError(f"{self._name(path)}: bytes {begin}..{end}: {REPLACED}")

        def at(url: str) -> Any:
            return self._read(lambda where: self._range(url, begin, end, where, stat), path, begin, end)

        url = self._url(path, tag)
        try:
            return at(url)
        except (AccessError, MissingError):
            return at(self._url(path, tag, expired=url))

    # -- the Hub ------------------------------------------------------------------------------------------

    @property
    def _tree(self) -> dict[str, list[Any]]:
        """Path -> [size, hash] of every file."""
        if self._listing is None:
            self._listing = self._listed()
        return self._listing

    def _listed(self) -> dict[str, list[Any]]:
        def ask() -> dict[str, list[Any]]:
            found = self._asked(listed, "")
            files = (each for each in found if hasattr(each, "blob_id"))  # a folder has a tree_id
            return {each.path: [each.size, each.lfs.sha256 if each.lfs else each.blob_id] for each in files}

        def listed() -> list[Any]:
            entries = iter(
                self._api.list_repo_tree(
                    self._repo, recursive=True, revision=self.commit, repo_type="dataset"
                )
            )
            found, names = list[Any](), set[str]()
            # huggingface_hub waits out a 429 itself, and waits for a silent Hub without limit
            ends_s = time.monotonic() + _MOST_PAUSE_S + self._patience.give_up_s
            while page := self._pool.submit(some, entries).result(max(ends_s - time.monotonic(), 0)):
                found += page
                if names.issuperset(here := {each.path for each in page}):
                    raise ConnectionError("the listing brings the same names again and again")
                names |= here
            if len(found) % _FULL == 0:  # pages are full, and somebody may have dropped what names the next
                info = self._api.dataset_info(self._repo, revision=self.commit, expand=["siblings"])
                if left := {each.rfilename for each in info.siblings or ()} - names:
                    raise StoreError(
                        f"{self._root}: the listing leaves out {len(left)} files, such as {min(left)!r}; the "
                        f"endpoint must pass on the header Link, which names the next page"
                    )
            return found

        def some(entries: Iterator[Any]) -> list[Any]:
            return list(islice(entries, _PAGE))

        return self._shared("tree", self.commit, ask)

    def _url(self, path: str, tag: str, expired: str | None = None) -> str:
        """The URL of a file's bytes. expired: an earlier URL that does not work any more."""
        url = f"{self._endpoint}/datasets/{self._repo}/resolve/{self.commit}/{quote(path)}"

        def ask() -> str:
            found = self._asked(
                lambda: self._hub.get_hf_file_metadata(
                    url, token=self._token or False, timeout=self._patience.timeout_s
                ),
                path,
            )
            if found.etag != tag or found.commit_hash not in (None, self.commit):
                raise ChangedError(f"{self._name(path)}: {REPLACED}")
            return str(found.location)

        return str(self._shared("url", f"{self.commit} {path}", ask, lambda said: said != expired))

    def _asked(self, ask: Callable[[], Any], path: str) -> Any:
        """The Hub's answer through huggingface_hub; retried."""

        def one() -> Any:
            try:
                return ask()
            except Exception as error:
                response = getattr(error, "response", None)
                if response is None:
                    raise
                raise self._wrong(response, str(error)) from error

        return self._retry(one, path, self._name(path))

    def _range(self, url: str, begin: int, end: int, where: str, stat: Stat) -> Any:
        """Bytes [begin, end) from a signed URL."""
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        if self._token and urlsplit(url)[:2] == urlsplit(self._endpoint)[:2]:
            headers["Authorization"] = f"Bearer {self._token}"
        answer = self._hub.get_session().get(url, headers=headers, timeout=self._patience.timeout_s)
        if answer.status_code not in (200, 206):
            raise self._wrong(answer, answer.text[:300])
        if answer.status_code == 206:
            sent = str(answer.headers.get("Content-Range"))
            if not sent.startswith(f"bytes {begin}-{end - 1}/"):
                raise ConnectionError(f"asked for bytes {begin}-{end - 1}, received {sent}")
            if (size := sent.rpartition("/")[2]).isdecimal():
                refuse_other_size(where, stat.size_bytes, int(size))
        body = answer.content
        return body[begin:end] if answer.status_code == 200 else body  # a server that ignores Range

    def _wrong(self, response: Any, text: str) -> HubError:
        """The error for an answer. If it asks to wait, all processes of the node do."""
        wait = str(response.headers.get("Retry-After") or "").strip()
        wait_s = min(float(wait), _MOST_PAUSE_S) if wait.isdecimal() else 0.0
        if wait_s:
            until = time.time() + wait_s
            os.close(os.open(self._pause, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))  # keeps its time
            if self._pause.stat().st_mtime < until:
                os.utime(self._pause, (until, until))
        return HubError(int(response.status_code), wait_s, f"status {response.status_code}: {text}")

    def _wait(self) -> float:
        """Wait for as long as the Hub has asked any process of this node to."""
        try:
            rest_s = self._pause.stat().st_mtime - time.time()
        except FileNotFoundError:
            return 0.0
        if not 0 < rest_s <= _MOST_PAUSE_S:
            return 0.0
        began = time.monotonic()
        time.sleep(rest_s + random.uniform(0, min(rest_s, 1.0)))
        return time.monotonic() - began

    # -- errors -------------------------------------------------------------------------------------------

    def _refuse(self, error: Exception, path: str, where: str) -> None:
        said = reason(error)
        if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
            return  # a truncated answer
        if not isinstance(error, HubError):
            if isinstance(error, (TypeError, ValueError)) or type(error).__name__ == "OfflineModeIsEnabled":
                raise StoreError(f"{where}: {said}") from error
        elif error.status in (401, 403):
            raise AccessError(
                f"{where}: no permission, or no such dataset; set HF_TOKEN to a token that may read it "
                f"(status {error.status})"
            ) from error
        elif error.status in (404, 410):
            raise MissingError(f"{where}: no such dataset, revision or file; check the URL") from error
        elif error.status == 416:
            raise ChangedError(f"{where}: {REPLACED}") from error
        elif error.status < 500 and error.status not in (408, 425, 429):
            raise StoreError(f"{where}: {said}") from error

    def _asked_to_wait_s(self, error: Exception) -> float:
        return error.wait_s if isinstance(error, HubError) else 0.0

    # -- what the node shares -------------------------------------------------------------------------------

    def _shared(
        self, kind: str, of: str, ask: Callable[[], Any], is_good: Callable[[Any], bool] = lambda said: True
    ) -> Any:
        """An answer that one process of the node got. All processes that waited share a failure."""
        # answers depend on what the token may read
        secret = hashlib.blake2b((self._token or "").encode(), digest_size=16).hexdigest()
        return shared(self._folder, kind, [self._endpoint, secret, self._repo, of], ask, is_good)

    @cached_property
    def _pause(self) -> Path:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        key = hashlib.blake2b(self._endpoint.encode(), digest_size=16).hexdigest()
        return self._folder / f"pause-{key}"

    @cached_property
    def _token(self) -> str | None:
        """The given token, or the one that `hf auth login` saved on this machine."""
        return self._given_token or self._hub.get_token()

    @cached_property
    def _api(self) -> Any:
        return self._hub.HfApi(endpoint=self._endpoint, token=self._token or False)

    @cached_property
    def _hub(self) -> Any:
        try:
            return importlib.import_module("huggingface_hub")
        except ImportError as missing:
            raise StoreError(f"{self._root}: hf:// needs huggingface_hub: {install('hub')}") from missing
