"""A listing of storage that is proved complete.

A page that says nothing of a next one ends a listing, and so does an error's document, which obstore reads as
a page without names. So after what seems the end, storage is asked to begin after the last name but one: it
must begin with the last name, and is at its end once nothing follows. That costs one request.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshfeed.errors import StoreError, UnavailableError

_TRIES = 3
"""Listings that contradict themselves before they are refused, since objects may be removed meanwhile; and
empty ones before they are believed."""


class Listing:
    """All objects below a prefix.

    Args:
        store: of obstore.
        prefix: a folder's path; "" for all objects.
        shown: names it in messages.
        limit_s: for the whole listing.
        begins_anywhere: whether storage begins where it is asked to; Azure may ignore that.
    """

    def __init__(self, store: Any, prefix: str, shown: str, limit_s: float, *, begins_anywhere: bool) -> None:
        self._store, self._prefix, self._shown = store, prefix.strip("/"), shown
        self._limit_s, self._ends_s = limit_s, time.monotonic() + limit_s
        self._begins_anywhere = begins_anywhere
        self._num_wrong = 0
        self._forget()

    def _forget(self) -> None:
        self._found = list[tuple[str, int]]()  # in their order
        self._place_of = dict[str, int]()

    def complete(self, *, proved: bool = True) -> list[tuple[str, int]]:
        """(path, size) of all objects, sorted. Call it again after an error that may pass: it goes on.

        proved: False for storage that cannot begin anywhere and has no order.

        Raises StoreError if the listing contradicts itself or takes too long, and what obstore raises.
        """
        try:
            self._ask()
            num_asked = 1
            while proved and (self._ask() or (not self._found and num_asked < _TRIES)):
                num_asked += 1
            if proved and not any(map(self._is_sorted, _ORDERS)):
                raise _Wrong("its names are in no order, so nobody can tell whether some are left out")
        except _Wrong as wrong:
            self._num_wrong += 1
            self._forget()
            if self._num_wrong < _TRIES:
                raise
            raise StoreError(
                f"{self._shown}: {wrong} (listed {_TRIES} times); list it through another endpoint, or name "
                f"the files one by one"
            ) from wrong
        return sorted(self._found)

    def _is_sorted(self, key: Callable[[str], Any]) -> bool:
        names = (key(name) for name, size in self._found if size)  # a folder's mark lost its slash
        return all(before < after for before, after in itertools.pairwise(names))

    def _ask(self) -> bool:
        """List what follows the names that are known; whether there was any."""
        return asyncio.run(self._in_time())

    async def _in_time(self) -> bool:
        limit = asyncio.timeout(max(self._ends_s - time.monotonic(), 0))
        try:
            async with limit:
                return await self._more()
        except TimeoutError as late:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"{self._shown}: the listing has not ended in {self._limit_s:g} s; it has {len(self._found)} "
                f"names so far; check the storage service, or give more time by the option give_up_s"
            ) from late

    async def _more(self) -> bool:
        import obstore

        num_known = len(self._found)
        full = (place for place in reversed(range(num_known - 1)) if self._found[place][1])
        start = next(full, -1)  # an empty object may mark a folder, whose name is another
        offset = None if start < 0 else self._found[start][0]
        begin = place = start + 1
        async for page in obstore.list(self._store, self._prefix or None, offset=offset):
            is_new = False
            for item in page:
                if self._is_folder(item):
                    is_new = True
                    continue
                name = item["path"]
                known = self._place_of.get(name, len(self._found))
                if place == begin and not self._begins_anywhere and known < place:
                    begin = place = known
                if known == place:
                    self._take(name, item["size"])
                    is_new, place = True, place + 1
                elif not begin <= known < place:  # pages may overlap
                    raise _Wrong(f"after {offset or 'its beginning'!r} it goes on with {name!r}")
            if not is_new:
                raise _Wrong("it brings the same names again and again")
        if place < num_known:
            raise _Wrong(f"it leaves out {self._found[place][0]!r}, which was there before")
        return place > num_known

    def _is_folder(self, item: Mapping[str, Any]) -> bool:
        """Whether it only marks the folder that is listed. Raises _Wrong outside that folder."""
        name = item["path"]
        if self._prefix and not name.startswith(f"{self._prefix}/"):
            if name != self._prefix or item["size"]:
                raise _Wrong(f"it has {name!r}, which is not below {self._prefix!r}")
            return True
        return False

    def _take(self, name: str, size_bytes: int) -> None:
        if name not in self._place_of:
            self._place_of[name] = len(self._found)
            self._found.append((name, size_bytes))


class _Wrong(ConnectionError):
    """A listing that contradicts itself."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the listing cannot be trusted: {why}")


_ORDERS: tuple[Callable[[str], Any], ...] = (
    str,
    lambda name: name.encode("utf-16-be"),
    lambda name: name.split("/"),
)
"""Storage sorts by code points; some of it by UTF-16, or within folders."""
