"""Where a node keeps what it has fetched."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from meshfeed.errors import CacheError
from meshfeed.files.lock import locked
from meshfeed.files.own_folder import refuse_swappable
from meshfeed.files.url import without_secrets

_MIB = 1 << 20
_checked: dict[Path, tuple[int, int]] = {}  # a job of 10,000 sources asks for its folder as often


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder on a disk of the node, for blocks of remote objects.

    Processes and jobs may share one; so may users, where root made it as /tmp is (mode 1777): each user has a
    part of it, which others do not see. It is made if missing, for this user alone; what lies there already
    and is not meshfeed's is left alone. Refused is a folder that another user could swap, or a parent of it.

    Attributes:
        folder: None takes $MESHFEED_CACHE, else meshfeed-cache-UID in the system's temporary folder.
        limit_bytes: that a user's part may hold; of several jobs' limits the largest counts. It must hold the
            blocks that are needed at one time. None takes what the folder was last given, else 64 GiB.
        block_bytes: what is fetched and dropped as one; a multiple of 4096.

    Raises CacheError for sizes that cannot be.
    """

    folder: str | os.PathLike[str] | None = None
    limit_bytes: int | None = None
    block_bytes: int = 4 * _MIB

    def __post_init__(self) -> None:
        if type(self.block_bytes) is not int or self.block_bytes < 4096 or self.block_bytes % 4096:
            raise CacheError(f"Cache(block_bytes={self.block_bytes!r}): a multiple of 4096 bytes")
        limit = self.limit_bytes
        if limit is not None and (type(limit) is not int or limit < self.block_bytes):
            raise CacheError(
                f"Cache(limit_bytes={self.limit_bytes!r}): a whole number of bytes, at least one block of "
                f"{self.block_bytes}"
            )

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        given = self.folder or os.environ.get("MESHFEED_CACHE")
        if given and "://" in os.fspath(given):
            raise CacheError(
                f"{without_secrets(os.fspath(given))}: a cache is a folder on a disk of the node, not a URL"
            )
        default = Path(tempfile.gettempdir()) / f"meshfeed-cache-{os.getuid()}"
        return Path(given or default).expanduser().absolute()

    @property
    def own_path(self) -> Path:
        """This user's part of it."""
        return self.path / f"u{os.getuid()}"

    def kept(self) -> Path:
        """`kept_path`, in a folder that is made if missing. Raises CacheError."""
        self.make()
        self.kept_path.mkdir(mode=0o700, exist_ok=True)
        return self.kept_path

    @property
    def kept_path(self) -> Path:
        """What is worked out of files and kept, in this user's part: lengths of documents, and the like."""
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
                f"{own}: {error.strerror or error}; give cache=mf.Cache(folder) a folder that this "
                f"user can write, on a disk of the node"
            ) from error
        return own

    @contextlib.contextmanager
    def anew(self) -> Generator[Cache, None, None]:
        """An empty one on the same disk, removed in the end, or by the next where this process is killed.

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
                raise CacheError(f"{self.own_path}: {error.strerror or error}") from error
            yield Cache(folder, self.limit_bytes, self.block_bytes)


def _identity(folder: Path) -> tuple[int, int]:
    """While it stays the same, so do the folder's owner and its place: see `refuse_swappable`."""
    found = os.stat(folder)  # noqa: PTH116 - a third of Path.stat's time
    return found.st_dev, found.st_ino
