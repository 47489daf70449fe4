"""Locks between processes (flock): the one way to wait for one, with a word and a limit."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from meshfeed.errors import CacheError

_log = logging.getLogger("meshfeed")

LIMIT_S = 60.0
"""How long one holder may keep a lock that others wait for."""
_SAY_S = 10.0
_LOOK_S = 1.0
_SHARE, _SHORTEST_S, _LONGEST_S = 0.1, 0.0005, 0.1  # of the time waited so far, until the next try


@contextlib.contextmanager
def locked(
    path: Path,
    mode: int = 0o600,
    *,
    wait: bool = True,
    create: bool = True,
    limit_s: float | None = None,
    works: bool = False,
) -> Generator[None, None, None]:
    """Hold the system's lock (flock) on a folder, or on a file, which is created if missing.

    mode: of the file. create: if False, a missing file raises FileNotFoundError. wait: see `take`; otherwise
    a held lock raises BlockingIOError. A dead holder releases the lock. Raises CacheError, OSError.
    """
    # NFS locks only what is open for writing
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | (os.O_CREAT if create else 0)
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        if wait:
            take(fd, path, limit_s=limit_s, works=works)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.suffix == ".lock":
            _sign(fd)
        yield
    finally:
        with contextlib.suppress(OSError):  # explicit, since children forked meanwhile share the descriptor
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def take(
    fd: int, path: Path, operation: int = fcntl.LOCK_EX, *, limit_s: float | None = None, works: bool = False
) -> None:
    """Lock an open file; a signal such as Ctrl-C interrupts the wait. Says after 10 s for whom it waits.

    limit_s: how long one process may hold it meanwhile; None for LIMIT_S. works: one that runs may hold it
    for as long as its work takes; only the time in which it is stopped counts.

    Raises CacheError after `limit_s`; OSError.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    waited_s = counted_s = looked_s = 0.0
    holder, say_s = None, _SAY_S
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            began = time.monotonic()
        time.sleep(min(max(waited_s * _SHARE, _SHORTEST_S), _LONGEST_S))
        passed_s = min(time.monotonic() - began, _LOOK_S)  # this process may be stopped, too
        waited_s, counted_s = waited_s + passed_s, counted_s + passed_s
        if waited_s < looked_s + min(_LOOK_S, limit_s / 2):
            continue
        looked_s, now = waited_s, _Holder.of(fd, path)
        if now != holder or (works and not now.is_stopped):
            holder, counted_s = now, 0.0
        if counted_s >= limit_s:
            raise CacheError(
                f"{path}: {now} has held this lock for {counted_s:.0f} s; let that process go on, or end it"
            )
        if waited_s >= say_s:
            say_s *= 2
            _log.warning("waiting for %.0f s for %s, which holds %s", waited_s, now, path)


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds a lock.

    Attributes:
        pid: of a process that this one can see; 0 if it cannot.
        signed: what a holder has written into the file of the lock: its number and its host.
        is_stopped: whether it is suspended.
        changed_ns: the time of the file's last change: a process may take the lock again and again.
    """

    pid: int
    signed: str
    is_stopped: bool
    changed_ns: int

    @classmethod
    def of(cls, fd: int, path: Path) -> _Holder:
        """Of the lock on an open file."""
        pid = 0
        with contextlib.suppress(OSError, ValueError):
            pid = _pid_in(Path("/proc/locks").read_text(), _place_of(fd))
        signed = os.pread(fd, 200, 0).decode(errors="replace") if path.suffix == ".lock" else ""
        return cls(pid, signed, _is_stopped(pid), os.fstat(fd).st_mtime_ns)

    def __str__(self) -> str:
        if not self.pid:
            return self.signed or "a process that cannot be seen from here"
        doing = ", stopped by SIGSTOP" if self.is_stopped else ""
        return f"process {self.pid} (host {os.uname().nodename}{doing})"


def _pid_in(locks: str, place: str) -> int:
    """Who holds the lock on a place, of those in /proc/locks; 0 if nobody does whom this process can see."""
    found = 0
    for line in locks.splitlines():
        _, kind, _, _, pid, where, *_ = line.split()  # 12: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF
        if kind == "FLOCK" and where == place:
            found = max(int(pid), 0)
    return found


def _place_of(fd: int) -> str:
    """Device and inode of an open file, as /proc/locks has them.

    The device is that of its mount: files of btrfs and of overlays may tell another one (st_dev). Where an
    overlay numbers its files anew, no line has this place, and what the holder has written tells who it is.
    """
    status, at = os.fstat(fd), Path("/proc/self")
    mount = dict(line.split(":\t", 1) for line in (at / f"fdinfo/{fd}").read_text().splitlines())["mnt_id"]
    mounts = (line.split(maxsplit=3) for line in (at / "mountinfo").read_text().splitlines())
    device = next((device for number, _, device, _ in mounts if number == mount), "")
    major, minor = (
        map(int, device.split(":")) if device else (os.major(status.st_dev), os.minor(status.st_dev))
    )
    return f"{major:02x}:{minor:02x}:{status.st_ino}"


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _sign(fd: int) -> None:
    """Write into the file of a lock who holds it, for processes of other hosts."""
    with contextlib.suppress(OSError):  # a full disk
        text = f"process {os.getpid()} (host {os.uname().nodename})".encode()
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
