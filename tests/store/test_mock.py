"""Made-up documents behave as a real store with the same tokens does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.store import IndexedWriter


def batches(store: Any, **options: Any) -> list[Any]:
    recipe = mf.Recipe(data=store, batch=mf.Batch(sequences=6), **options.pop("recipe"))
    made = []
    for got in mf.simulate(recipe, mf.Layout(cp=2, dp=2), 5, **options):
        made += [{name: value.tolist() for name, value in m.items()} for m in got.microbatches]
    return made


def test_it_gives_what_a_store_on_disk_with_its_tokens_gives(tmp_path: Path) -> None:
    mock = mf.Lengths([5, 0, 90, 1, 33, 33, 2, 70])
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for document in range(mock.num_documents):
            writer.add_document(mock.read(document, 0, int(mock.lengths(np.array([document]))[0])))
    real = mf.open(tmp_path / "c")
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    for options in (
        {"recipe": {"sequence": mf.Documents()}, "packing": mf.Packing(capacity=64)},
        {"recipe": {"sequence": mf.Windows(16, **flags)}, "micro_batch_size": 2},
    ):
        assert batches(mock, **dict(options)) == batches(real, **dict(options))


def test_lengths_from_a_file_and_from_a_distribution(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("3\n0\n12\n")
    (tmp_path / "lengths.csv").write_text("length,other\n3,0\n12,7\n")
    assert mf.Lengths.from_file(tmp_path / "lengths.csv").lengths(np.arange(4)).tolist() == [3, 0, 12, 7]
    assert mf.Lengths.from_file(tmp_path / "lengths.txt").lengths(np.arange(3)).tolist() == [3, 0, 12]
    drawn = mf.Lengths.lognormal(50_000, mean=1000, sigma=0.8, shortest=10, longest=20_000, seed=3)
    lengths = drawn.lengths(np.arange(50_000))
    assert abs(lengths.mean() - 1000) < 30
    assert (lengths.min() >= 10, lengths.max() <= 20_000) == (True, True)
    again = mf.Lengths.lognormal(50_000, mean=1000, sigma=0.8, shortest=10, longest=20_000, seed=3)
    assert drawn.fingerprint == again.fingerprint


@pytest.mark.parametrize("lengths", [[-1], [1.5], [[1, 2]]])
def test_what_is_no_length_is_refused(lengths: Any, tmp_path: Path) -> None:
    with pytest.raises(mf.errors.StoreError):
        mf.Lengths(lengths)
    (tmp_path / "words.txt").write_text("three\n")
    for path in (tmp_path / "words.txt", tmp_path / "missing.txt"):
        with pytest.raises(mf.errors.StoreError):
            mf.Lengths.from_file(path)
    with pytest.raises(mf.errors.StoreError):
        mf.Lengths.lognormal(5, mean=0, sigma=1)
