"""What no release may change: recipes' fingerprints, the order of every rule, the bytes of its fields.

A checkpoint holds a step and no order, so a new order under an old fingerprint would train on other data
without a word. A value that differs here is a break for every job that runs: give the rule or the option
that changes another fingerprint instead. `python tests/test_goldens.py` prints what the code makes now.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed.order import draws_between, draws_of_step


class Numbers:
    """A map-style dataset whose items tell which they are."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": np.array([at.epoch, at.index])}


def recipes(folder: Path) -> dict[str, mf.Recipe]:
    """One of every rule and every way to mix, over stores of fixed content."""
    for k, name in enumerate(("a", "b", "c")):
        write_corpus(folder / name, num_tokens=2_000 + 700 * k, seed=k, mean=60)
    with mf.DatasetWriter(folder / "chat", {"tokens": "u2", "loss_mask": "u1"}) as writer:
        for size in (5, 30, 1, 12, 44, 9, 17, 2):
            values = np.arange(size)
            writer.add_document(
                tokens=(values * 7 + size).astype("u2"), loss_mask=(values % 3 > 0).astype("u1")
            )
    a, b, c = (mf.open(folder / name) for name in ("a", "b", "c"))
    blocks = mf.Blocks(sequences=4, window=2, lanes=3)
    masked = mf.Masked(
        32, vocab_size=1000, mask_token=1001, first_token=1002, last_token=1003, pad_token=1004
    )
    batch = mf.Batch(sequences=8)

    def of(data: Any, rule: Any, **options: Any) -> mf.Recipe:
        return mf.Recipe(**({"data": data, "sequence": rule, "batch": batch, "seed": 5} | options))

    two = mf.Mixture({"first": (a, 0.7), "second": (b, 0.3)})
    later = two.then(4, {"first": 1, "third": (c, 2.5)}).then(9, {"second": 1, "third": 1})
    return {
        "windows": of(a, mf.Windows(64)),
        "windows of a mixture": of(two, mf.Windows(64, reset_position_ids=True, eod_mask_loss=True), seed=-1),
        "documents": of(a, mf.Documents(), epochs=3),
        "documents by blocks": of(a, mf.Documents(max_len=100), shuffle=blocks),
        "documents in order": of(a, mf.Documents(), shuffle="none"),
        "chat": of(mf.open(folder / "chat"), mf.Chat(40)),
        "samples": of(mf.Mapped(Numbers(), version="1"), mf.Samples("x")),
        "masked": of(a, masked),
        "masked mixture by blocks": of(two, masked, shuffle=blocks, seed=2**63 - 1),
        "megatron": of(a, mf.MegatronGPT(64, samples=200), seed=1234),
        "megatron blend": of(two, mf.MegatronGPT(64, samples=200, split="90,10"), seed=1234),
        "a mixture that changes": of(later, mf.Documents(), batch=mf.Batch(sequences=8).then(3, 5).then(7, 12)),
        "by repeat": of(
            mf.Mixture({"a": (a, 1), "b": (b, 2.5)}, by="repeat"),
            mf.Documents(),
            batch=mf.Batch(sequences=8, last="pad"),
        ),
        "by count": of(
            mf.Mixture({"a": (a, 70), "b": (b, 11)}, by="count"),
            mf.Documents(),
            batch=mf.Batch(sequences=8, last="drop"),
        ),
        "by size": of(mf.Mixture({"a": a, "b": b, "c": c}), mf.Windows(64)),
        "by repeat and count": of(
            mf.Mixture({"a": (a, 1), "b": (b, 30), "c": (c, 0)}, by={"a": "repeat", "b": "count", "c": "count"}),
            mf.Documents(),
        ),
        "batches of one source": of(
            mf.Mixture({"a": (a, 2), "b": (b, 1)}, batches="per_source").then(7, {"a": 1, "b": 3}),
            mf.Documents(),
            batch=mf.Batch(sequences=8).then(4, 6),
        ),
        "blocks as they come": of(a, mf.Documents(), shuffle="blocks"),
        "masked with crops": of(
            a,
            mf.Masked(16, vocab_size=1000, mask_token=1001, crop="random", special_tokens=(5, 7), random_tokens=(9, 20)),
        ),
    }  # fmt: skip


def digest(*arrays: Any) -> str:
    held = hashlib.blake2b(digest_size=8)
    for array in arrays:
        array = np.ascontiguousarray(array)
        held.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    return held.hexdigest()


def facts_of(recipe: mf.Recipe) -> dict[str, Any]:
    """Fingerprint; step 0 as (source, epoch, index); digests of 160 draws, and of what steps 0, 5, 11, 30 hold."""
    packing = mf.Packing(capacity=1024) if isinstance(recipe.sequence, mf.Documents) else None
    fields: list[Any] = []
    for made in mf.simulate(recipe, mf.Layout(), [0, 5, 11, 30], packing=packing):
        for microbatch in made.microbatches:
            fields += [np.asarray(microbatch[name]) for name in sorted(microbatch)]
    first, run = draws_of_step(recipe, 0), draws_between(recipe, 0, 160)
    return {
        "fingerprint": recipe.fingerprint,
        "first": [
            list(each) for each in zip(first.source.tolist(), first.epoch.tolist(), first.index.tolist())
        ],
        "draws": digest(run.source, run.epoch, run.index),
        "fields": digest(*fields),
    }


GOLDEN = json.loads(Path(__file__).with_name("goldens.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mf.Recipe]:
    return recipes(tmp_path_factory.mktemp("goldens"))


@pytest.mark.parametrize("name", GOLDEN)
def test_fingerprint_order_and_bytes_are_what_they_were(made: dict[str, mf.Recipe], name: str) -> None:
    assert facts_of(made[name]) == GOLDEN[name]["facts"]


@pytest.mark.parametrize("name", GOLDEN)
def test_states_are_saved_as_they_were(made: dict[str, mf.Recipe], name: str) -> None:
    """What this version writes, other versions of it read."""
    assert mf.State(recipe=made[name].summary(until=6), step=6).to_json() == GOLDEN[name]["saved"]


def test_every_recipe_is_pinned(made: dict[str, mf.Recipe]) -> None:
    assert made.keys() == GOLDEN.keys()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        now: dict[str, Any] = {}
        for name, recipe in recipes(Path(folder)).items():
            saved = mf.State(recipe=recipe.summary(until=6), step=6).to_json()
            now[name] = {"facts": facts_of(recipe), "saved": saved}
    lines = (f"{json.dumps(name)}: {json.dumps(of)}" for name, of in now.items())
    print("{\n" + ",\n".join(lines) + "\n}")
