"""Recipe(verify_data="full"): every byte of the data is compared, between ranks and with a saved state."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import meshfeed.store.content
import mosaic
import world
from corpus import recipe_of, write_corpus
from observe import content_of, take
from pictures import write_pictures
from services.needs import needs
from services.nginx import Nginx


def flip(path: Path, at: int | None = None) -> None:
    """Another byte in place; of the same size, and with the old modification time."""
    told = path.stat()
    place = told.st_size // 3 if at is None else at
    with path.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that digests have read, piece by piece."""
    sizes: list[int] = []
    sums = meshfeed.store.content._sums

    def counted(file: Any, piece: Any) -> Any:
        sizes.append(piece.end - piece.begin)
        return sums(file, piece)

    monkeypatch.setattr(meshfeed.store.content, "_sums", counted)
    return sizes


# -- ranks ----------------------------------------------------------------------------------------------------


def ended(rank: int, folder: str, verify_data: Any) -> tuple[str, str, int]:
    """How a rank ends, and how many steps it was handed."""
    steps = 0
    data = mf.Mixture({"same": mf.open(f"{folder}/same"), "other": mf.open(f"{folder}/{rank}/text")})
    recipe = replace(recipe_of(f"{folder}/same"), data=data, verify_data=verify_data, steps=3)
    try:
        with mf.Feed(recipe, mf.Layout(dp=2)) as feed:
            for step in feed:
                list(step.microbatches)
                steps += 1
    except mf.MeshfeedError as error:
        return type(error).__name__, str(error), steps
    return "done", "", steps


def test_a_rank_with_one_other_token_ends_the_job_before_its_first_step(tmp_path: Path) -> None:
    write_corpus(tmp_path / "same", checksum_bytes=None)
    (tmp_path / "0").mkdir()
    write_corpus(tmp_path / "0" / "text", seed=1, checksum_bytes=None)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    flip(tmp_path / "1" / "text.bin")
    assert [end[::2] for end in world.run(ended, 2, str(tmp_path), "sampled")] == [("done", 3)] * 2
    for kind, text, steps in world.run(ended, 2, str(tmp_path), "full"):
        assert (kind, steps) == ("PeerError", 0), text
        assert "rank 1 and rank 0 disagree" in text or "rank 0 and rank 1 disagree" in text, text
        assert "the digest of source 'other' (" in text and "'same'" not in text, text


def test_equal_copies_pass_with_and_without_checksums(tmp_path: Path) -> None:
    write_corpus(tmp_path / "same")
    (tmp_path / "0").mkdir()
    write_corpus(tmp_path / "0" / "text", seed=1)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    (tmp_path / "1" / "text.sums").unlink()
    assert [end[::2] for end in world.run(ended, 2, str(tmp_path), "full")] == [("done", 3)] * 2


# -- states ---------------------------------------------------------------------------------------------------


def mixed(folder: Path, names: list[str], verify_data: Any) -> mf.Recipe:
    data = mf.Mixture({name: mf.open(folder / name) for name in names})
    return mf.Recipe(data=data, sequence=mf.Windows(64), batch=mf.Batch(sequences=4), verify_data=verify_data)


def test_a_state_refuses_other_bytes_and_names_the_store(tmp_path: Path) -> None:
    names = ["code", "docs"]
    for seed, name in enumerate(names):
        write_corpus(tmp_path / name, seed=seed, checksum_bytes=None)
    full, sampled = (mixed(tmp_path, names, each) for each in ("full", "sampled"))
    saved: list[Any] = []
    for recipe in (full, sampled):
        with mf.Feed(recipe) as feed:
            take(feed, 2)
            saved.append(json.loads(json.dumps(feed.state_dict())))
    assert content_of(saved[0])["data"] and content_of(saved[0]) | {"data": []} | {
        "fingerprint": 0
    } == content_of(saved[1]) | {"fingerprint": 0}
    flip(tmp_path / "docs.bin")
    now = mixed(tmp_path, names, "full")
    with pytest.raises(mf.errors.StateError, match=r"other bytes") as refused:
        mf.Feed(now).load_state_dict(saved[0])
    assert f"source 'docs' ({tmp_path / 'docs'})" in str(refused.value) and "'code'" not in str(refused.value)
    mf.Feed(mixed(tmp_path, names, "sampled")).load_state_dict(saved[0])  # what is not asked for
    mf.Feed(now).load_state_dict(saved[1])  # and what the state does not have
    flip(tmp_path / "docs.bin")
    with mf.Feed(mixed(tmp_path, names, "full")) as feed:
        feed.load_state_dict(saved[0])
        assert next(iter(feed)).index == 2


def test_a_store_that_joins_later_is_no_part_of_a_state_before(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, seed=seed, checksum_bytes=None)
    recipe = mixed(tmp_path, ["a"], "full")
    state = mf.State.at(recipe, 3).to_json()
    longer = replace(recipe, data=recipe.data.then(3, {"a": 1, "b": (mf.open(tmp_path / "b"), 1)}))
    mf.Feed(longer).load_state_dict(state)
    assert mf.State.at(longer, 3).to_json() == state
    assert len(mf.State.at(longer, 4).data) == 2


def test_a_state_of_many_stores_stays_small_and_narrows_down_which(tmp_path: Path) -> None:
    stores = {f"source-{i:03}": mf.Lengths([10 + i]) for i in range(200)}
    recipe = mf.Recipe(
        data=mf.Mixture({name: (store, 1) for name, store in stores.items()}, by="repeat"),
        sequence=mf.Documents(),
        batch=mf.Batch(sequences=4),
        verify_data="full",
    )
    digests = [store.content_digest() for store in stores.values()]
    state = mf.State.at(recipe, 5, digests)
    assert len(json.dumps(state.to_json())) <= 4096 and len(state.data) <= 24
    other = mf.State.at(recipe, 5, [*digests[:100], "0" * 32, *digests[101:]])
    with pytest.raises(mf.errors.StateError, match="one of 9 sources, 'source-099' to 'source-107'"):
        other.check(recipe)


def test_the_choice_is_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    recipe = recipe_of(tmp_path / "c")
    full = replace(recipe, verify_data="full")
    assert recipe.verify_data == "sampled" and recipe.data_digests() == ()
    assert full.fingerprint == recipe.fingerprint and full.summary() == recipe.summary() and full == recipe
    with pytest.raises(mf.errors.RecipeError, match="verify_data='all'"):
        replace(recipe, verify_data="all")


# -- digests --------------------------------------------------------------------------------------------------


def test_what_a_node_has_read_is_kept_until_the_files_change(tmp_path: Path, read: list[int]) -> None:
    write_corpus(tmp_path / "c", checksum_bytes=None)
    files = [tmp_path / "c.bin", tmp_path / "c.idx"]
    first = mf.open(tmp_path / "c").content_digest()
    assert sum(read) == sum(file.stat().st_size for file in files)
    assert mf.open(tmp_path / "c").content_digest() == first
    assert sum(read) == sum(file.stat().st_size for file in files)
    flip(files[0])
    assert mf.open(tmp_path / "c").content_digest() != first
    flip(files[0])
    assert mf.open(tmp_path / "c").content_digest() == first
    assert sum(read) == 3 * sum(file.stat().st_size for file in files)


def test_files_larger_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]) -> None:
    """The same digest whatever the pieces, and that of the .sums."""
    write_corpus(tmp_path / "c", num_tokens=1_200_000)
    guarded = mf.open(tmp_path / "c").content_digest()
    assert not read
    (tmp_path / "c.sums").unlink()
    monkeypatch.setattr(meshfeed.store.content, "_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(meshfeed.store.content, "_PART_PIECES", 2)
    assert mf.open(tmp_path / "c").content_digest() == guarded
    assert len(read) == 4


@pytest.mark.parametrize("checksum_bytes", [None, 1 << 12, 1 << 16, 1 << 20])
def test_a_digest_is_the_same_with_any_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checksum_bytes: int | None
) -> None:
    """States have it; so it must not change."""
    monkeypatch.setattr(meshfeed.store.content, "_AT_ONCE", 2)
    write_corpus(tmp_path / "c", num_tokens=1_200_000, checksum_bytes=checksum_bytes)
    assert mf.open(tmp_path / "c").content_digest() == "98e17a681f91b34c42dbb1c8543ea443"


def test_checksums_of_another_pair_do_not_stand_in(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, seed=seed)
    shutil.copy(tmp_path / "b.sums", tmp_path / "a.sums")
    with pytest.raises(mf.errors.StoreError, match=r"a\.sums"):
        mf.open(tmp_path / "a").content_digest()


def test_parts_and_columns_count(tmp_path: Path) -> None:
    """Every pair of a dataset.json; of columns, those in use."""
    write_pictures(tmp_path / "d", mask=True)
    first = mf.open(tmp_path / "d").content_digest()
    pairs = sorted((tmp_path / "d").rglob("*.bin"))
    assert {pair.stem for pair in pairs} >= {"parts", "part_sizes", "tokens", "loss_mask"}
    for pair in pairs:
        pair.with_suffix(".sums").unlink()
        assert mf.open(tmp_path / "d").content_digest() == first, pair
        flip(pair)
        assert mf.open(tmp_path / "d").content_digest() != first, pair
        flip(pair)


class Items:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": np.array([at.index])}


def test_a_users_dataset_says_its_version() -> None:
    def digest(**options: Any) -> str:
        return mf.Mapped(Items(), **options).content_digest()

    with pytest.raises(mf.errors.OptionError, match=r"version=\.\.\."):
        digest()
    assert digest(version="1") == digest(version="1") != digest(version="2")


def test_a_store_without_digests_is_refused_when_the_feed_is_entered() -> None:
    class Own(mf.Lengths):
        content_digest = mf.mixture.Store.content_digest

    recipe = mf.Recipe(
        data=Own([20] * 8), sequence=mf.Windows(4), batch=mf.Batch(sequences=2), verify_data="full"
    )
    with pytest.raises(mf.errors.OptionError, match="Own has no content_digest"), mf.Feed(recipe):
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Nginx]:
    needs("nginx")
    (tmp_path / "served").mkdir()
    with Nginx(tmp_path / "served") as nginx:
        yield nginx


def test_of_a_remote_pair_the_checksums_stand_in(server: Nginx, tmp_path: Path, read: list[int]) -> None:
    served = tmp_path / "served"
    write_corpus(served / "c")
    write_corpus(served / "bare", checksum_bytes=None)
    near, far = mf.open(served / "c"), mf.open(f"{server.url}/c", cache=tmp_path / "cache")
    assert far.content_digest() == near.content_digest()
    with pytest.raises(mf.errors.OptionError, match="inspect PATH --write-checksums"):
        mf.open(f"{server.url}/bare", cache=tmp_path / "cache").content_digest()
    (served / "lines.jsonl").write_text('{"tokens": [1, 2]}\n')
    with pytest.raises(mf.errors.OptionError, match="copy other formats"):
        mf.open(f"{server.url}/lines.jsonl", cache=tmp_path / "cache").content_digest()
    assert not read


def test_of_remote_shards_the_hashes_stand_in(server: Nginx, tmp_path: Path, read: list[int]) -> None:
    def digest(name: str, seed: int, **options: Any) -> str:
        tokens = np.random.default_rng(seed).integers(0, 9, (6, 5), np.int32)
        samples = [{"tokens": each} for each in tokens]
        mosaic.written(tmp_path / "served" / name, {"tokens": "ndarray:int32"}, samples, **options)
        return mf.open(f"{server.url}/{name}", cache=tmp_path / "cache").content_digest()

    assert (
        digest("a", 0, hashes=["sha1"]) == digest("b", 0, hashes=["sha1"]) != digest("c", 1, hashes=["sha1"])
    )
    with pytest.raises(mf.errors.OptionError, match="copy other formats"):
        digest("d", 0)
    assert not read
