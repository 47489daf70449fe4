"""NeMo-RL's shard_by_batch_size with meshfeed's packer, and the way back by reorder_data."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from meshfeed.integrations import rl
from services.needs import checkout


@pytest.mark.parametrize("order", ["packer", "largest_first"])
def test_shards(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.syspath_prepend(str(checkout("NeMo-RL")))
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    monkeypatch.setattr(batches, "get_packer", rl.get_packer)
    lengths = torch.tensor(np.random.default_rng(0).integers(10, 100, 96))
    ids = torch.arange(96)[:, None] * (torch.arange(100) < lengths[:, None])
    data = batches.BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "number": list(range(96))})
    shards, indices = data.shard_by_batch_size(
        4,
        batch_size=48,
        sequence_packing_args={
            "max_tokens_per_microbatch": 256,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "algorithm": "modified_first_fit_decreasing",
            "microbatch_order": order,
            "sequence_length_pad_multiple": 4,
        },
    )
    assert len(shards) == 4
    for chunk in range(2):  # two training steps; all ranks have as many microbatches
        numbers = []
        counts = set()
        for shard in shards:
            batch = shard.get_batch(chunk)
            made = list(batch.make_microbatch_iterator_for_packable_sequences())
            counts.add(len(made))
            assert max(int((-(-each["input_lengths"] // 4) * 4).sum()) for each in made) <= 256
            assert all(len(each["number"]) for each in made)
            numbers += [number for each in made for number in each["number"]]
        assert len(counts) == 1 and sorted(numbers) == list(range(48 * chunk, 48 * chunk + 48))
    results = batches.BatchedDataDict.from_batches([{"ids": shard["input_ids"]} for shard in shards])
    results.reorder_data(indices)
    assert torch.equal(results["ids"], ids)
