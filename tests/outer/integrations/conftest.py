"""What tests of several frameworks train on."""

from __future__ import annotations

import pytest

import loops


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return loops.write(tmp_path_factory.mktemp("corpus") / "text")
