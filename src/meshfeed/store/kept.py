"""Results of functions of a store, kept for as long as the store exists."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def kept_by_store(most: int) -> Callable[[F], F]:
    """Keep a function's last `most` results for each store, its first argument, as long as the store exists.

    The other arguments must be hashable. A result must not refer to the store.
    """

    def decorate(make: F) -> F:
        caches: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()

        def cache_of(store: Any) -> Callable[..., Any]:
            this = weakref.ref(store)
            return functools.lru_cache(most)(lambda *rest: make(this(), *rest))

        @functools.wraps(make)
        def kept(store: Any, *rest: Any) -> Any:
            cache = caches.get(store) or caches.setdefault(store, cache_of(store))
            return cache(*rest)

        return cast(F, kept)

    return decorate
