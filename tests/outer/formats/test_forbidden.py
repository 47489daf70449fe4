"""Storage that answers 403 for what is missing, as S3 does to who may get objects but not list the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
import mosaic
from meshfeed.errors import AccessError, MissingError
from services.needs import needs
from services.nginx import Nginx

TOKENS = [[1, 2, 3], [4, 5], [6]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    needs("nginx")
    folder = tmp_path_factory.mktemp("served")
    samples = [{"tokens": np.array(tokens, np.uint16)} for tokens in TOKENS]
    mosaic.written(folder / "mds", {"tokens": "ndarray:uint16"}, samples)
    with mf.DatasetWriter(folder / "dataset", {"tokens": "uint16"}) as writer:
        for tokens in TOKENS:
            writer.add_document(tokens=tokens)
    with mf.IndexedWriter(folder / "plain", np.uint16, checksum_bytes=None) as writer:
        for tokens in TOKENS:
            writer.add_document(tokens)
    for name in ("docs.jsonl", "errors.jsonl"):
        (folder / name).write_text("".join(f'{{"tokens": {tokens}}}\n' for tokens in TOKENS))
    with Nginx(folder, "try_files $uri =403;") as nginx:
        yield nginx


@pytest.mark.parametrize(
    "name", ["mds", "dataset", "plain", "plain.idx", "docs.jsonl", "errors.jsonl", "mds/"]
)
def test_a_store_is_found_where_missing_objects_are_forbidden(
    served: Nginx, tmp_path: Path, name: str
) -> None:
    with mf.open(f"{served.url}/{name}", cache=tmp_path / "cache") as store:
        assert [store.read(i, 0, len(tokens)).tolist() for i, tokens in enumerate(TOKENS)] == TOKENS


def test_where_nothing_is_found_all_that_was_tried_is_named(served: Nginx, tmp_path: Path) -> None:
    with pytest.raises(AccessError) as caught:
        mf.open(f"{served.url}/none", cache=tmp_path / "cache")
    for name in ("none.bin", "none.idx", "none/dataset.json", "none/index.json"):
        assert f"{served.url}/{name}" in str(caught.value)
    assert "may not be listed" in str(caught.value)


def test_a_file_that_a_store_names_is_not_taken_for_missing(served: Nginx, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"half\.bin: no permission"):
        open_half(served, tmp_path)


def open_half(served: Nginx, tmp_path: Path) -> None:
    with Nginx(tmp_path, "try_files $uri =403;") as nginx:
        with mf.IndexedWriter(tmp_path / "half", np.uint16, checksum_bytes=None) as writer:
            writer.add_document([1])
        (tmp_path / "half.bin").unlink()
        mf.open(f"{nginx.url}/half", cache=tmp_path / "cache")


def test_missing_objects_are_named_too(tmp_path: Path) -> None:
    needs("nginx")
    with (
        Nginx(tmp_path) as nginx,
        pytest.raises(MissingError, match=r"storage has no .*/none\.bin, .*index\.json"),
    ):
        mf.open(f"{nginx.url}/none", cache=tmp_path / "cache")
