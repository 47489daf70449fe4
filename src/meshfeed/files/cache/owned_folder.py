"""Folders that no other user can replace.

A user with write permission for a folder may rename its entries and replace them, unless the folder is
sticky, as /tmp is; then only its owner may. So every folder on the path from the root must belong to root or
this user. The check begins at the root: once a folder's parents have passed, nobody can swap it.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

_MOST_LINKS = 40


def refuse_swappable(path: Path) -> None:
    """Make a folder and its missing parents, for this user alone.

    path: absolute; the last folder must be this user's. Raises PermissionError naming a folder that another
    user could replace; other OSErrors.
    """
    trusted, at, links = _trusted(), Path(path.anchor), 0
    names = [*reversed(path.parts[1:])]
    _refuse(at, at.stat(), trusted)
    while names:
        below = at / names.pop()
        if not os.path.lexists(below):
            with contextlib.suppress(FileExistsError):  # another process has just made it
                below.mkdir(0o700)
        found = below.lstat()
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS or found.st_uid not in trusted:
                raise PermissionError(13, f"{below} is another user's link, or one of too many links")
            target = at / below.readlink()
            names += reversed(target.parts[1:])
            at = Path(target.anchor)
            continue
        at = below
        if not names and found.st_uid != os.getuid():
            raise PermissionError(13, "belongs to another user, who could put anything there")
        _refuse(at, found, trusted)


def _refuse(at: Path, found: os.stat_result, trusted: set[int]) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(20, f"{at} is not a folder")
    if found.st_uid not in trusted:
        raise PermissionError(13, f"{at} belongs to another user, who could replace its contents")
    mode = found.st_mode
    by_group = mode & stat.S_IWGRP and not _is_private(found.st_gid)
    if (by_group or mode & stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise PermissionError(
            13, f"{at} is writable by others, who could replace its contents; set its sticky bit (chmod +t)"
        )


def _trusted() -> set[int]:
    """This user and root; in a user namespace without root, the id that root is mapped to."""
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError, ValueError):
        shown_as = int(Path("/proc/sys/fs/overflowuid").read_text())
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(int(first) <= shown_as < int(first) + int(count) for first, _, count in mapped):
            trusted.add(shown_as)
    return trusted


def _is_private(gid: int) -> bool:
    """Whether a group has this user as its only member, as on systems with a group per user."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
