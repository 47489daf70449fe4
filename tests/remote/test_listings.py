"""A listing is the exact set of names, or an error, whatever storage sends; and it ends."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest

import meshfeed as mf
from meshfeed.errors import StoreError, UnavailableError
from meshfeed.remote.client import Client
from meshfeed.remote.retries import Patience
from services import listings
from services.listings import Lie, Lister
from soak import SEED, cases

PATIENCE = Patience(timeout_s=5, give_up_s=5)
OBJECTS = {f"raw/p-{number:02}.jsonl": b"x" * (number + 1) for number in range(36)}
TRUE = sorted((key, len(content)) for key, content in OBJECTS.items())


def listed(server: Lister, prefix: str = "raw", patience: Patience = PATIENCE) -> list[tuple[str, int]]:
    client = Client("s3://bucket", server.options, patience)
    try:
        return client.list(prefix)
    finally:
        client.close()


def test_the_proof_costs_one_request() -> None:
    with Lister(OBJECTS) as server:
        assert listed(server) == TRUE
        assert server.num_listings == 4 + 1


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (listings.first_version, "'raw/p-08.jsonl' it goes on with 'raw/p-00.jsonl'"),
        (listings.same_token, "the same names again and again"),
        (listings.backwards, "'raw/p-31.jsonl' it goes on with 'raw/p-35.jsonl'"),
        (listings.swapped, "in no order"),
        (listings.outside, "'zzz/elsewhere.jsonl', which is not below 'raw'"),
    ],
)
def test_a_listing_that_contradicts_itself_is_refused(lie: Lie, says: str) -> None:
    with Lister(OBJECTS, lie) as server, pytest.raises(StoreError, match=f"s3://bucket/raw: .*{says}"):
        listed(server)
    assert server.num_listings < 50, "at once"


@pytest.mark.parametrize("lie", [listings.no_token, listings.overlapping])
def test_what_can_be_made_good_is(lie: Lie) -> None:
    with Lister(OBJECTS, lie) as server:
        assert listed(server) == TRUE


@pytest.mark.parametrize("lie", [listings.error, listings.broken])
@pytest.mark.parametrize("page", range(5))
def test_no_page_that_fails_is_the_end(lie: Lie, page: int) -> None:
    """Of four pages, and of the one that proves the end."""
    with Lister(OBJECTS, listings.once(page + 1, lie)) as server:
        assert listed(server) == TRUE


def test_pages_without_names_end_with_the_time_for_the_listing() -> None:
    with Lister(OBJECTS, listings.empty_forever) as server:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="has not ended in 1 s; it has 0 names so far"):
            listed(server, patience=Patience(timeout_s=1, give_up_s=1))
        seen = server.num_listings
        assert time.monotonic() - began < 50
        time.sleep(0.2)
        assert server.num_listings <= seen + 1, "it is not asked any more"


def test_folders_and_what_marks_them() -> None:
    """'en-fr' is before 'en/' by name and behind it within folders; consoles make objects such as 'raw/'."""
    objects = {
        f"raw/{name}": content
        for name, content in {"": b"", "en/": b"", "en/a": b"x", "en-fr/a": b"x", "en.txt": b"x"}.items()
    }
    files = [("raw/en", 0), ("raw/en-fr/a", 1), ("raw/en.txt", 1), ("raw/en/a", 1)]
    for size in (1, 2, 3, 4, 9):
        with Lister(objects, page_size=size) as server:
            assert listed(server) == files
    for objects in ({}, {"raw/": b""}, {"raw/": b"", "raw/a": b""}, {"raw/a": b"x"}):
        with Lister(objects) as server:
            assert [name for name, _ in listed(server)] == ["raw/a"] * ("raw/a" in objects)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_law_the_exact_names_or_an_error_in_time(share: float) -> None:
    num_listed, num_seeds = 0, cases(20, 400)
    patience = Patience(timeout_s=5, give_up_s=5 if share < 0.2 else 1)
    for seed in range(num_seeds):
        with Lister(OBJECTS, listings.at_random(SEED + seed, share)) as server:
            began = time.monotonic()
            with contextlib.suppress(StoreError):
                assert listed(server, patience=patience) == TRUE, f"seed {seed}"
                num_listed += 1
            assert time.monotonic() - began < 30, f"seed {seed}"
    assert share > 0.2 or num_listed >= num_seeds // 2, num_listed


@pytest.mark.parametrize("lie", [listings.no_token, listings.first_version, listings.overlapping])
def test_documents_are_all_there_or_none(lie: Lie, tmp_path: Path) -> None:
    line = json.dumps({"tokens": list(range(5))}) + "\n"
    objects = {key: (line * 3).encode() for key in OBJECTS}
    with Lister(objects, lie) as server:
        try:
            store = mf.open("s3://bucket/raw/p-*.jsonl", options=server.options, cache=tmp_path / "cache")
        except StoreError as refused:
            assert lie is listings.first_version and "cannot be trusted" in str(refused)
        else:
            with store:
                assert store.num_documents == 3 * len(objects)
