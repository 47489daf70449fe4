"""docs/migrating.md: what it shows of ours runs as it stands, and gives what it says."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

import lit
import meshfeed as mf
import mosaic
from corpus import write_corpus
from pages import run_page

CONSUMED = 40 * 16


def megatrons(path: Path) -> GPTDataset:
    """The training set that a Megatron job with the page's numbers has."""
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=64,
        blend=([str(path)], None),
        split="969,30,1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=types.SimpleNamespace(eod=0, vocab_size=60_000, unique_identifiers={}),
    )
    sizes = [100 * 16, None, None]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def test_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stream = write_corpus(tmp_path / "corpus")
    samples = [{"tokens": part.astype(np.uint16)} for part in np.array_split(stream, 50)]
    mosaic.written(tmp_path / "mds", {"tokens": "ndarray:uint16"}, samples)
    halves = [torch.from_numpy(half.astype(np.int32)) for half in np.split(stream, 2)]
    lit.written(tmp_path / "lit", halves, chunk_bytes=1 << 17)
    raw = stream.astype(np.uint16)
    raw[raw == 50256] = 1
    raw[[9, 10, 5000]] = 50256
    raw.tofile("train.bin")
    with pytest.raises(mf.errors.MissingError, match=r"mf\.open\('train\.bin', dtype='uint16'\)"):
        mf.open("train.bin")
    names = run_page("migrating.md", 10)
    assert len(names["first"]) == len(names["windows"]) == len(names["blocks"]) == 16 // 2

    dataset = megatrons(tmp_path / "corpus")
    wanted = torch.stack([dataset[CONSUMED + i]["tokens"] for i in range(16)])
    assert torch.equal(torch.cat(names["first"]), wanted), "a Megatron job goes on with its next samples"

    with names["recipe"].data as whole, mf.open("nano") as nano:
        assert np.array_equal(whole.read_stream(np.array([0]), np.array([raw.size])), raw)
        assert nano.lengths(np.arange(4)).tolist() == [10, 1, 4990, raw.size - 5001]
        assert np.array_equal(nano.read_stream(np.array([0]), np.array([raw.size])), raw)

    local = mf.Recipe(
        data=mf.open("corpus"), sequence=mf.Windows(64), batch=mf.Batch(sequences=16), seed=5, shuffle="none"
    )
    for folder in ("mds", "lit"):
        other = mf.Recipe(
            data=mf.open(folder),
            sequence=mf.Windows(64),
            batch=mf.Batch(sequences=16),
            seed=5,
            shuffle="none",
        )
        (one,), (two,) = (list(mf.simulate(each, mf.Layout(), 1)) for each in (local, other))
        for ours, theirs in zip(one.microbatches, two.microbatches, strict=True):
            assert torch.equal(ours["tokens"], theirs["tokens"]), (
                "every token of the files is there, in order"
            )

    (items,) = (microbatch["tokens"] for microbatch in names["items"].microbatches[:1])
    assert all(item.dtype == torch.uint16 for item in items)
