"""Where a node keeps what it has fetched."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshfeed.errors import CacheError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder on a disk of the node, for blocks of remote objects.

    Processes, jobs and users may share one: each user has a part of it, which others do not see. It is made
    if missing; what lies there already and is not meshfeed's is left alone.

    Attributes:
        folder: None takes $MESHFEED_CACHE, else meshfeed-cache in the system's folder for temporary files.
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
            raise CacheError(f"{os.fspath(given)}: a cache is a folder on a disk of the node, not a URL")
        return Path(given or Path(tempfile.gettempdir()) / "meshfeed-cache").expanduser().absolute()

    @property
    def own_path(self) -> Path:
        """This user's part of it."""
        return self.path / f"u{os.getuid()}"

    def kept(self) -> Path:
        """`kept_path`, in a folder that is made if missing. Raises CacheError."""
        self.make()
        return self.kept_path

    @property
    def kept_path(self) -> Path:
        """What is worked out of files and kept, in this user's part: lengths of documents, and the like."""
        return self.own_path / "kept"

    def make(self) -> Path:
        """Make the folder and this user's part of it; returns the latter. Raises CacheError."""
        try:
            if not self.path.exists():
                self._make_for_all()
            self.own_path.mkdir(mode=0o700, exist_ok=True)
            found = self.own_path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise PermissionError(13, "is of another user, who could put anything there")
            if not os.access(self.own_path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(13, "not to be written by this user")
        except OSError as error:
            raise CacheError(
                f"{self.own_path}: {error.strerror or error}; give cache=mf.Cache(folder) a folder that this "
                f"user can write, on a disk of the node"
            ) from error
        return self.own_path

    def _make_for_all(self) -> None:
        """The folder, as /tmp is: other users make parts of their own. It is there when it is ready.

        It comes with this user's part in it, because a rename may replace a folder that is empty, and then
        whoever had just made that one would hold a folder that is gone.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        made.chmod(0o1777)
        own = made / self.own_path.name
        own.mkdir(mode=0o700)
        try:
            made.rename(self.path)
        except OSError:
            own.rmdir()
            made.rmdir()  # somebody else has just made it
            if not self.path.is_dir():
                raise
