"""The files that take longest come first: where several processes share the files, none is left with one at
the end."""

from __future__ import annotations

import pytest

LONGEST = ("test_demo.py", "test_prepare_engines.py", "test_histories.py", "test_cached.py", "test_pages.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))
