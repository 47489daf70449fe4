"""The cache folder of a node."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from meshfeed.errors import CacheError
from meshfeed.files.cache.once import DAY_S, sweep
from meshfeed.files.cache.owned_folder import refuse_swappable
from meshfeed.files.local.lock import locked
from meshfeed.files.url import without_secrets
from meshfeed.whole import is_whole, settle

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Errors of a disk that has no space or no inodes left for this user."""
_MIB = 1 << 20
_checked: dict[Path, tuple[int, int]] = {}  # a job with 10,000 sources asks 10,000 times


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder on a disk of the node, for blocks of remote objects.

    Processes and jobs may share one. So may users, if root created it with mode 1777 like /tmp: each user has
    a private part. It is created if missing, for this user alone; files in it that are not meshfeed's are
    left alone. A folder is refused if another user could replace it or one of its parents.

    Attributes:
        folder: None takes $MESHFEED_CACHE, else meshfeed-cache-UID in the system's temporary folder.
        limit_bytes: of a user's part; of several jobs, the largest limit applies. One block is enough, but if
            it is less than what is in use, blocks are fetched again. None takes the folder's last limit, else
            64 GiB.
        block_bytes: the unit of fetching and eviction; a multiple of 4096.

    Raises CacheError for invalid sizes.
    """

    folder: str | os.PathLike[str] | None = None
    limit_bytes: int | None = None
    block_bytes: int = 4 * _MIB

    def __post_init__(self) -> None:
        settle(self)
        if not is_whole(self.block_bytes, 4096) or self.block_bytes % 4096:
            raise CacheError(f"Cache(block_bytes={self.block_bytes!r}): a multiple of 4096 bytes")
        limit = self.limit_bytes
        if limit is not None and not is_whole(limit, self.block_bytes):
            raise CacheError(
                f"Cache(limit_bytes={self.limit_bytes!r}): a whole number of bytes, at least one block of "
                f"{self.block_bytes}"
            )

    @property
    def path(self) -> Path:
        given = os.fspath(self.folder or os.environ.get("MESHFEED_CACHE", ""))
        if "://" in given:
            raise CacheError(
                f"{without_secrets(given)}: a cache is a folder on a disk of the node, not a URL"
            )
        given = given or f"{tempfile.gettempdir()}/meshfeed-cache-{os.getuid()}"
        return _path(given) if given.startswith("/") else Path(given).expanduser().absolute()

    @property
    def own_path(self) -> Path:
        """This user's part of it."""
        return _below(self.path, f"u{os.getuid()}")

    def kept(self) -> Path:
        """`kept_path`, created if missing, less what nobody has used for a month. Raises CacheError."""
        self.make()
        path = self.kept_path
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise cache_error(path, error) from error
        sweep(path, "?" * 32 + "*", 30 * DAY_S)  # keys; other folders are of other kinds
        return path

    @property
    def kept_path(self) -> Path:
        """The folder for derived data in this user's part, such as lengths of documents."""
        return self.own_path / "kept"

    def make(self) -> Path:
        """Make the folder and this user's part of it; returns the latter. Raises CacheError."""
        own = self.own_path
        with contextlib.suppress(OSError):
            if _checked.get(own) == _identity(own):
                return own
        try:
            refuse_swappable(own)
            if not os.access(own, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(13, "this user may not write there")
            _checked[own] = _identity(own)
        except OSError as error:
            raise CacheError(
                f"{own}: {error.strerror or error}; give cache=mf.Cache(folder) (--cache) a folder "
                f"that this user can write, on a disk of the node"
            ) from error
        return own

    @contextlib.contextmanager
    def anew(self) -> Generator[Cache, None, None]:
        """A temporary, empty cache on the same disk, removed on exit; after a kill, the next call removes it.

        Raises CacheError.
        """
        with contextlib.ExitStack() as stack:
            try:
                own = self.make()
                with locked(own / "anew.lock"):
                    for leftover in own.glob("anew-*"):
                        with contextlib.suppress(OSError), locked(leftover, wait=False):
                            shutil.rmtree(leftover, ignore_errors=True)
                    folder = Path(tempfile.mkdtemp(prefix="anew-", dir=own))
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    stack.enter_context(locked(folder))
            except OSError as error:
                raise cache_error(self.own_path, error) from error
            yield Cache(folder, self.limit_bytes, self.block_bytes)


def cache_error(where: Path, error: OSError) -> CacheError:
    """What an error of a cache's disk means, and what to do. where: unless the error names a file."""
    if isinstance(error, CacheError):
        return error
    said = f"{error.filename or where}: {error.strerror or error}"
    match error.errno:
        case code if code in FULL:
            cure = "free space and inodes on this disk, raise the quota, or give a cache folder on another"
        case errno.ENOENT | errno.ENOTDIR | errno.ESTALE:
            cure = "was the cache folder cleared during this run? Leave it in place, and resume the run"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            cure = "this user cannot write to the cache folder; allow it or give another, and resume the run"
        case _:
            cure = "check the disk of the cache folder, or give a folder on another"
    return CacheError(f"{said}; {cure}")


# each of 10,000 sources asks for these, and a Path costs more than a look at the file system
_path = functools.lru_cache(Path)
_below = functools.lru_cache(Path.joinpath)


def _identity(folder: Path) -> tuple[int, int]:
    """(device, inode). While it stays the same, so do the folder's owner and path: see `refuse_swappable`."""
    found = os.stat(folder)  # noqa: PTH116 - a third of Path.stat's time
    return found.st_dev, found.st_ino
