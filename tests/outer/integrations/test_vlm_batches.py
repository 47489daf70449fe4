"""Samples of vision-language models through the drop-ins of frameworks: as they were given, or refused by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron_world import Case, initialized, run

import meshfeed as mf
from meshfeed.exchange import Keys
from meshfeed.integrations import megatron
from meshfeed.integrations.megatron.samples import AXES_FIRST, sequences_of, with_axes
from soak import cases
from vlm import Size, VisualInputs, nested, same, tensor

LOADINGS: tuple[megatron.Readers, ...] = ("replicated", "broadcast", "shared")
KEYS = Keys(
    mf.Field(name="tokens", dtype="int64", stages=("first",), split=True),
    mf.Field(name="labels", dtype="int64", stages=("last",), split=True),
    mf.Field(name="loss_mask", dtype="float32", stages=("last",), split=True),
    mf.Field(name="visual_inputs", dtype="any", stages=("first",)),
)
NUM_ELEMENTS = cases(12, 100)
OWN = ("visual_inputs", "crops", "about")


def sample_of(number: int, size: int | None = None) -> dict[str, Any]:
    """A sample with images or without; its tokens are found nowhere else."""
    rng = np.random.default_rng(number)
    size = size or int(rng.integers(4, 30))
    tokens = 1000 * number + 1 + torch.arange(size)
    crops = [tensor(rng) for _ in range(int(rng.integers(0, 3)))]
    sample: dict[str, Any] = {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(size),
        "position_ids": torch.from_numpy(rng.integers(0, 99, (3, size))),
        "attention_mask": torch.from_numpy(rng.random(size) < 0.8),
        "crops": crops,
        "about": {"held": nested(rng), "uid": number},
    }
    if rng.random() < 0.4:
        sample["visual_inputs"] = VisualInputs(
            torch.from_numpy(rng.random((3, 8))).bfloat16(), None, {"deepstack": crops}
        )
    return sample


def size_of(number: int) -> int | None:
    """Tokens of one of `elements`: 3 axes beside 3 tokens have no shape that says which is which."""
    return None if number % 4 == 3 else 3 if number % 16 == 13 else 9


def elements(first: int) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """What a trainer's iterator gives, in all its forms, and the samples in it."""
    for number in range(first, first + 4 * NUM_ELEMENTS, 4):
        one, other = sample_of(number, size_of(number)), sample_of(number + 1, 9)
        form = number // 4 % 4
        if form == 0:
            yield one, [one]
        elif form == 1:
            yield [one, other, sample_of(number + 2)], [one, other, sample_of(number + 2)]
        elif form == 2:  # a row [1, T]: what has no entry per token stays as it is
            rows = {name: value[None] for name, value in one.items() if name not in OWN}
            yield one | rows, [one]
        else:  # rows [2, T], the first of them padded
            sizes = torch.tensor([len(one["tokens"]), 9])
            names = [name for name in one if name not in OWN]
            wide = {name: torch.nn.functional.pad(one[name], (0, 9 - len(one["tokens"]))) for name in names}
            both = {name: torch.stack([wide[name], other[name]]) for name in names}
            both["position_ids"] = torch.stack([wide["position_ids"], other["position_ids"]], dim=1)
            both["original_seq_len"] = sizes
            yield both | {name: [one.get(name), other.get(name)] for name in OWN}, [one, other]


def config_of(case: Case, capacity: int) -> SimpleNamespace:
    config = case.config
    config.sequence_packing_scheduler, config.max_seqlen_per_dp_cp_rank = "balanced", capacity
    return config


def packed(case: Case, loading: megatron.Readers) -> list[int]:
    """What SequencePacking and get_batch give to this rank; every sample is checked where it arrives."""
    first = 1 + 4 * NUM_ELEMENTS * parallel_state.get_data_parallel_rank()
    given = [sample for at in (1, 1 + 4 * NUM_ELEMENTS) for _, own in elements(at) for sample in own]
    samples, config, seen = {each["about"]["uid"]: each for each in given}, config_of(case, 64), list[int]()
    is_first = parallel_state.is_pipeline_first_stage()
    own = (
        (element for element, _ in elements(first))
        if megatron.is_reader(config=config, readers=loading)
        else None
    )
    with megatron.SequencePacking(readers=loading, keys=KEYS, timeout_s=600) as wrap:
        iterator, count, *_ = wrap(own, config, NUM_ELEMENTS)
        for _ in range(count):
            batch = megatron.get_batch(iterator)
            assert ("visual_inputs" in batch) == is_first == (batch["tokens"] is not None)
            assert (batch["labels"] is None) == is_first or case.pp == 1
            tokens = batch["tokens" if is_first else "labels"][0]
            for at, about in enumerate(batch["about"]):
                sample = samples[about["uid"]]
                seen.append(about["uid"])
                for name in OWN[0 if is_first else 1 :]:
                    assert same(batch[name][at], sample.get(name)), name
                here = (tokens // 1000 == about["uid"]).nonzero()[:, 0]
                index = tokens[here] % 1000 - 1
                assert torch.equal(batch["attention_mask"][0, here], sample["attention_mask"][index])
                if is_first:
                    assert batch["position_ids"].shape == (3, 1, tokens.numel())
                    assert torch.equal(batch["position_ids"][:, 0, here], sample["position_ids"][:, index])
    return seen


def hybrid(case: Case) -> list[int]:
    """What HybridCPDataLoaderWrapper gives to this rank."""
    first = 1 + 4 * NUM_ELEMENTS * parallel_state.get_data_parallel_rank()
    seen: list[int] = []
    wrapper = megatron.HybridCPDataLoaderWrapper(
        (element for element, _ in elements(first)), config_of(case, 64), timeout_s=600
    )
    for _ in range(NUM_ELEMENTS):
        mine, _ = next(wrapper)
        for made in (mine or {}).values():
            if "about" not in made:  # a dummy
                continue
            number, size = made["about"]["uid"], int((made["tokens"] > 0).sum())
            sample = sample_of(number, size_of(number))
            seen.append(number)
            assert made["position_ids"].shape == (3, made["tokens"].numel())
            for name in (*OWN, "tokens", "position_ids"):
                value: Any = made.get(name)
                value = value[..., :size].clone() if name in ("tokens", "position_ids") else value
                assert same(value, sample.get(name)), name
            assert torch.equal(made["attention_mask"], sample["attention_mask"])
    return seen


def jobs(rank: int) -> list[Any]:
    got: list[Any] = []
    for case in (Case(tp=2), Case(cp=2, pp=2)):
        with initialized(case):
            got += [packed(case, loading) for loading in LOADINGS]
    case = Case(cp=2, options={"hybrid_context_parallel": True})
    with initialized(case):
        got.append(hybrid(case))
    return got


def test_samples_arrive_as_they_were_given_through_megatrons_drop_ins() -> None:
    results = run(jobs, 4)
    starts = (1, 1 + 4 * NUM_ELEMENTS)  # of each data-parallel rank
    of_rank = [sorted(s["about"]["uid"] for _, own in elements(at) for s in own) for at in starts]
    every = [*of_rank[0], *of_rank[1]]
    for at, _ in enumerate(LOADINGS):
        for tp in range(2):  # tp 2, dp 2: both dp ranks together have all samples, each once
            assert sorted(results[tp][at] + results[2 + tp][at]) == every
        for result in results:  # cp 2, pp 2
            assert sorted(result[3 + at]) == of_rank[0]
    hybrid = [set(result[-1]) for result in results]
    assert set.union(*hybrid) == set(every)


ROW = {"tokens": torch.arange(1, 9).reshape(2, 4)}
PACK = {"tokens": torch.arange(1, 9), "cu_seqlens": torch.tensor([0, 3, 8])}
ONE = {"tokens": torch.arange(1, 5)}


@pytest.mark.parametrize(
    ("element", "text"),
    [
        (ROW | {"visual_inputs": {"pixel_values": torch.ones(2, 3)}}, r"\['visual_inputs'\] beside 2 rows"),
        (ROW | {"size": Size(3, 4)}, r"\['size'\] beside 2 rows .* a dict for each sequence"),
        (ROW | {"position_ids": torch.ones(2, 2, 4)}, r"position_ids have shape \(2, 2, 4\).*unclear"),
        (ROW | {"position_ids": torch.ones(3, 4)}, r"'position_ids' has shape \(3, 4\)"),
        (
            PACK | {"visual_inputs": [torch.ones(2, 3)]},
            r"\['visual_inputs'\] beside 2 sequences of cu_seqlens",
        ),
        (PACK | {"image": torch.ones(3, 8)}, r"\['image'\] beside 2 sequences of cu_seqlens"),
        (ONE | {"position_ids": torch.ones(4, 4)}, r"position_ids have shape \(4, 4\).*declare position_ids"),
        (ONE | {"attention_mask": torch.ones(1, 4, 4)}, r"attention_mask has shape \(1, 4, 4\).*not causal"),
        (ONE | {"attention_mask": torch.ones(1, 5, 5).tril()}, r"attention_mask has shape \(1, 5, 5\) for 4"),
        (ONE | {"attention_mask": "full"}, r"attention_mask is str; give a tensor with one entry per token"),
        (ONE | {"attention_mask": {"full": None}}, r"attention_mask is dict"),
        (ONE | {"position_ids": torch.ones(4, 1, 3)}, r"position_ids have shape \(4, 1, 3\).*unclear"),
    ],
)
def test_what_cannot_be_assigned_to_a_sequence_is_refused_by_name(element: Any, text: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=text):
        sequences_of(element)


def test_what_is_declared_is_taken_as_declared() -> None:
    keys = Keys("attention_mask", mf.Field(name="position_ids", dtype="any", split=True))
    mask, ids = torch.ones(1, 4, 4), torch.ones(4, 4)
    (made,) = sequences_of(ONE | {"attention_mask": mask, "position_ids": ids, "cu_seqlens": [0, 4]}, keys)
    assert made["attention_mask"] is mask and torch.equal(made["position_ids"], ids)
    causal = torch.full((1, 1, 4, 4), -torch.inf).triu(1)
    assert set(sequences_of([ONE | {"attention_mask": causal}])[0]) == {"tokens"}
    for form in (torch.ones(3, 4), torch.ones(3, 1, 4), torch.ones(1, 3, 4)):
        (made,) = sequences_of({"tokens": ONE["tokens"][None], "position_ids": form, "original_seq_len": 2})
        assert with_axes(made)["position_ids"].shape == (3, 2)


@pytest.mark.parametrize("size", range(1, 6))
def test_one_row_is_the_same_sequence_in_all_its_shapes(size: int) -> None:
    tokens, ids = torch.arange(size), torch.arange(3 * size).reshape(3, size)
    mask = torch.arange(size) % 2 == 0
    for row in (tokens, tokens[None]):
        for form in (ids[:, None], ids[None], *([ids] if size != 3 else [])):
            if form.shape == (1, 3, 3):  # [1, T, axes] is of this shape too
                continue
            (made,) = sequences_of({"tokens": row, "position_ids": form})
            assert torch.equal(made[AXES_FIRST], ids.T) and torch.equal(made["tokens"], tokens)
        for given in (mask, mask[None], mask.numpy()):
            (made,) = sequences_of({"tokens": row, "attention_mask": given})
            assert torch.equal(torch.as_tensor(made["attention_mask"]), mask)


def test_three_tokens_of_a_longer_sample_keep_their_three_axes() -> None:
    ids, tokens = torch.arange(24).reshape(3, 8), torch.arange(8)
    for sample in (
        {"tokens": tokens, "cu_seqlens": [0, 3, 8], "position_ids": ids},
        {
            "tokens": tokens.expand(2, 8),
            "original_seq_len": [3, 5],
            "position_ids": ids[:, None].expand(3, 2, 8),
        },
    ):
        made = [with_axes(each)["position_ids"] for each in sequences_of(sample)]
        assert torch.equal(made[0], ids[:, :3]) and made[1].shape == (3, 5)
    (made, _) = sequences_of({"tokens": tokens, "cu_seqlens": [0, 3, 8], "position_ids": ids.T})
    assert torch.equal(with_axes(made)["position_ids"], ids.T[:3])


def test_bridges_batch_refuses_images(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, of in (("data.base", "DatasetProvider"), ("training.callbacks", "Callback")):
        module = ModuleType(f"megatron.bridge.{name}")
        setattr(module, of, type(of, (), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "meshfeed.integrations.bridge", raising=False)
    bridge = importlib.import_module("meshfeed.integrations.bridge")
    monkeypatch.delitem(sys.modules, "meshfeed.integrations.bridge")
    batch = {"tokens": torch.zeros(1, 4), "padding_mask": torch.zeros(1, 4)}
    assert bridge.get_batch(iter([batch]), None)[0] is batch["tokens"]
    with pytest.raises(mf.errors.RecipeError, match=r"no place for pixel_values; .*bridge\.vision_step"):
        bridge.get_batch(iter([batch | {"pixel_values": torch.zeros(2, 3)}]), None)
    ends, qwen = torch.tensor([0, 4], dtype=torch.int32), type("Qwen25VLModel", (), {})()
    batch |= {"cu_seqlens": ends, "cu_seqlens_padded": ends, "max_seqlen": 4, "total_tokens": 4}
    batch |= {"pad_between_seqs": False, "pixel_values": torch.zeros(2, 3, dtype=torch.uint8)}
    with pytest.raises(mf.errors.RecipeError, match="pixel_values are bytes, and Qwen25VLModel takes"):
        bridge._vision_batch(iter([batch]), qwen)
