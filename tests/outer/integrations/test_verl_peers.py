"""verl with meshfeed's functions in the place of its own, beside its own: cap, order, and its own ways back."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch

from meshfeed.integrations import rl
from services.needs import checkout, missing_thing


@pytest.fixture
def balancing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(checkout("verl")))
    if find_spec("tensordict") is None:
        missing_thing("verl needs tensordict")
    return importlib.import_module("verl.utils.seqlen_balancing")


def replace_all(balancing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rearrange_micro_batches", "get_seqlen_balanced_partitions", "get_reverse_idx"):
        monkeypatch.setattr(balancing, name, getattr(rl, name))


@pytest.mark.parametrize("nested", [False, True])
def test_results_return_by_verls_own_functions(
    balancing: ModuleType, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    from tensordict import TensorDict
    from verl.protocol import DataProto

    rng = np.random.default_rng(0)
    lengths = torch.tensor(rng.integers(20, 100, 40))
    mask = (torch.arange(100) < lengths[:, None]).long()
    ids = torch.arange(4000).reshape(40, 100)
    theirs, _ = balancing.rearrange_micro_batches(
        TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=40), 300
    )
    replace_all(balancing, monkeypatch)
    if nested:
        rows = [row[:length] for row, length in zip(ids, lengths.tolist())]
        batch = TensorDict(
            {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=40
        )
        made, taken = balancing.rearrange_micro_batches(batch, 300)
        assert max(len(each["input_ids"].values()) for each in made) <= 300
        results = torch.nested.as_nested_tensor(
            [row for each in made for row in each["input_ids"].unbind()], layout=torch.jagged
        )
        back = balancing.restore_dynamic_batch(results, taken)
        assert all(torch.equal(mine, row) for mine, row in zip(back.unbind(), rows, strict=True))
    else:
        data = DataProto.from_dict({"input_ids": ids, "attention_mask": mask}, {"uid": np.arange(40)})
        made, taken = balancing.prepare_dynamic_batch(data, max_token_len=300)
        assert max(int(each.batch["attention_mask"].sum()) for each in made) <= 300
        assert [each.non_tensor_batch["uid"].tolist() for each in made] == taken
        results = torch.cat([each.batch["input_ids"] for each in made])
        assert torch.equal(balancing.restore_dynamic_batch(results, taken), ids)
        assert type(made[0].batch) is type(theirs[0])


@pytest.mark.parametrize("size", [1, 2])
def test_verls_engine_splits_its_batches(
    balancing: ModuleType, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The engine's own call, with each argument that it gives, and its way back."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    replace_all(balancing, monkeypatch)
    monkeypatch.delitem(sys.modules, "verl.workers.engine.utils", raising=False)  # imports them by name
    engine = importlib.import_module("verl.workers.engine.utils")
    assert engine.rearrange_micro_batches is rl.rearrange_micro_batches
    rng = np.random.default_rng(3)
    lengths = rng.integers(20, 100, 40).tolist()
    rows = [torch.arange(length) + 1000 * at for at, length in enumerate(lengths)]
    data = TensorDict(
        {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(rows)
    )
    options = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 150, "sp_size": 2, "force_group_size": size}
    tensordict_utils.assign_non_tensor(data, **options)
    made, taken = engine.prepare_micro_batches(data, num_batches_divided_by=2, min_num_micro_batch=3)
    assert len(made) % 2 == 0 and len(made) >= 3
    assert max(len(each["input_ids"].values()) for each in made) <= 300
    whole = [pack[at : at + size] for pack in taken for at in range(0, len(pack), size)]
    assert sorted(whole) == [[*range(at, at + size)] for at in range(0, len(rows), size)]
    results = torch.nested.as_nested_tensor(
        [row for each in made for row in each["input_ids"].unbind()], layout=torch.jagged
    )
    back = balancing.restore_dynamic_batch(results, taken)
    assert all(torch.equal(mine, row) for mine, row in zip(back.unbind(), rows, strict=True))


def test_reverse_indices_and_groups(balancing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(1).permutation(50).tolist()
    assert rl.get_reverse_idx(order) == balancing.get_reverse_idx(order)
    replace_all(balancing, monkeypatch)
    parts = balancing.get_group_balanced_partitions(
        [100, 100, 200, 200, 50, 50, 150, 150], list("aabbccdd"), 2
    )
    assert sorted(map(tuple, parts)) == [(0, 1, 6, 7), (2, 3, 4, 5)]


@pytest.mark.parametrize("equal_size", [False, True])
def test_ranks_are_at_least_as_even_as_verls(balancing: ModuleType, equal_size: bool) -> None:
    rng = np.random.default_rng(2)
    work = balancing.calculate_workload(
        torch.tensor(np.clip(rng.lognormal(6, 1.2, 256), 1, 8192).astype(int))
    )
    most = {}
    for module in (rl, balancing):
        parts = module.get_seqlen_balanced_partitions(work.tolist(), 8, equal_size)
        most[module] = max(int(work[part].sum()) for part in parts)
    assert most[rl] <= 1.005 * most[balancing]
