"""Packed feeds under Megatron-core: PackedSeqParams on every stage, MTP stages, changing cp groups, replay."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.multi_token_prediction import roll_tensor
from megatron_world import Case, initialized, iterators_of, plain, run, stage_kinds, write_documents

import meshfeed as mf
from megatron_calls import on_this_cp_rank
from meshfeed.integrations import megatron
from meshfeed.integrations.megatron import batches
from meshfeed.order import draws_of_step
from meshfeed.plan import packs_of
from soak import SOAK, only_soak
from user_datasets import Rich, samples_recipe

STEPS = 2
ALIGN = mf.Align(sequence=4, pack=16)


def recipe_of(path: Path, sequences: int = 24) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=sequences), seed=9)


def packing_of(policy: Any, capacity: int = 256, **options: Any) -> mf.Packing:
    return mf.Packing(capacity=capacity, policy=policy, align=ALIGN, **options)


def indices_of_cp(cu_seqlens: torch.Tensor, total: int, size: int, rank: int) -> torch.Tensor:
    """What transformer-engine's thd_get_partitioned_indices gives: of each sequence, chunks r and 2n-1-r."""
    kept = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        chunk = (stop - start) // (2 * size)
        kept += range(start + rank * chunk, start + (rank + 1) * chunk)
        kept += range(stop - (rank + 1) * chunk, stop - rank * chunk)
    assert total == cu_seqlens[-1]
    return torch.tensor(kept, dtype=torch.int64)


def full_pack(recipe: mf.Recipe, step: Any, microbatch: int, at: int) -> dict[str, torch.Tensor]:
    """A whole pack, document after document, made from the store alone."""
    (store,), pack = recipe.sources, packs_of(step.plan, at)[microbatch]
    index = draws_of_step(recipe, step.index).index[step.plan.sequence[pack.sequences]]
    parts: dict[str, list[np.ndarray]] = {k: [] for k in ("tokens", "labels", "loss_mask", "position_ids")}
    for document, width in zip(index.tolist(), pack.padded_lengths.tolist()):
        start = int(store.offsets(np.array([document]))[0])
        size = int(store.lengths(np.array([document]))[0])
        tokens = store.read_stream(np.array([start]), np.array([start + size])).astype(np.int64)
        for key, values in {
            "tokens": tokens,
            "labels": tokens[1:],
            "loss_mask": np.ones(max(size - 1, 0), np.float32),
            "position_ids": np.arange(size),
        }.items():
            parts[key].append(np.pad(values, (0, width - values.size)))
    made = {k: torch.from_numpy(np.concatenate(v))[None] for k, v in parts.items()}
    return made | {
        "cu_seqlens": torch.from_numpy(np.array(pack.cu_seqlens)),
        "cu_seqlens_padded": torch.from_numpy(np.array(pack.cu_seqlens_padded)),
    }


def megatrons(full: dict[str, torch.Tensor], kinds: tuple[bool, bool, bool]) -> dict[str, Any]:
    """By Megatron's own cut of packs; it asks transformer-engine for the indices alone."""
    first, last, mtp = kinds
    cu, padded = full.pop("cu_seqlens"), full.pop("cu_seqlens_padded")
    longest = (padded[1:] - padded[:-1]).max().reshape(1)
    utils.tex = type("tex", (), {"thd_get_partitioned_indices": staticmethod(indices_of_cp)})
    utils.is_te_min_version = lambda version: True
    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):
        batch, params = utils.get_thd_batch_on_this_cp_rank(full, cu, padded, longest)
    else:  # since 0.18 its callers make the params
        batch = on_this_cp_rank(full | {"cu_seqlens": cu[None], "cu_seqlens_padded": padded[None]})
        batch = {name: batch[name] for name in full}
        params = PackedSeqParams("thd", cu, cu, padded, padded, int(longest), int(longest))
    wanted = (("tokens", "position_ids") if first or mtp else ()) + (("labels", "loss_mask") if last else ())
    return {k: batch[k] if k in wanted else None for k in batch} | {"packed_seq_params": params}


def check_packed(case: Case, path: Path, policy: Any, loading: Any) -> list[Any]:
    """Every microbatch equals Megatron's; returns what all stages of a replica must have alike."""
    recipe = recipe_of(path)
    seen: list[Any] = []
    with megatron.feed(
        recipe,
        case.config,
        readers=loading,
        packing=packing_of(policy),
        device="cpu",
        transport=mf.Transport(timeout_s=600),
    ) as feed:
        iterators, coord = iterators_of(feed), feed.layout.coord(feed.rank)
        for _ in range(STEPS):
            step = iterators[0].begin()
            for iterator in iterators[1:]:
                assert iterator.begin().index == step.index
            for microbatch in range(step.num_microbatches):
                for v, iterator in enumerate(iterators):
                    batch = megatron.get_batch(iterator)
                    params = batch["packed_seq_params"]
                    assert isinstance(params, PackedSeqParams)
                    assert (params.qkv_format, type(params.max_seqlen_q)) == ("thd", int)
                    assert params.local_cp_size is params.cp_group is None
                    told = {f.name: plain(getattr(params, f.name)) for f in dataclasses.fields(params)}
                    seen.append((v, microbatch, told, tuple(batch["padding_mask"].shape)))
                    if packs_of(step.plan, coord.dp * feed.layout.cp + coord.cp)[microbatch].sequences.size:
                        at = coord.dp * feed.layout.cp + coord.cp
                        full, kinds = full_pack(recipe, step, microbatch, at), stage_kinds(case, v)
                        if case.mtp:
                            full["cu_seqlens"] = full["cu_seqlens_padded"]
                        if kinds[2]:
                            ahead = roll_tensor(
                                batch["tokens"],
                                cp_group=parallel_state.get_context_parallel_group(),
                                packed_seq_params=params,
                            )[0]
                            labels = megatrons({**full}, (True, True, True))["labels"]
                            assert plain(ahead) == plain(labels), "what Megatron's MTP layers shift"
                        wanted = megatrons(full, kinds)
                        theirs = wanted.pop("packed_seq_params")
                        for field in dataclasses.fields(theirs):
                            value = plain(getattr(theirs, field.name))
                            assert value is None or told[field.name] == value, field.name
                        for key, value in wanted.items():
                            assert plain(batch[key]) == plain(value), (case, policy, v, key)
    return seen


CASES = [
    Case(tp=2, pp=4),
    Case(tp=2, pp=4, stages="Et|t|m|L", mtp=1),
    Case(tp=2, cp=2, pp=2, vpp=2, stages="Et|t|tm|L", mtp=1),
    Case(cp=2, pp=2),
]
WAYS = (("balanced", "shared"), ("in_order", "broadcast"))


def packed_job(rank: int, path: Path) -> int:
    for at, case in enumerate(CASES):
        with initialized(case):
            for policy, loading in WAYS if SOAK else (WAYS[at % 2],):
                seen = check_packed(case, path, policy, loading)
                group = parallel_state.get_model_parallel_group()
                others: list[Any] = [None] * group.size()
                dist.all_gather_object(others, seen, group=group)
                assert seen
                assert all(other == seen for other in others), "every stage has cu_seqlens, and one shape"
    return len(CASES)


def test_every_stage_has_cu_seqlens_and_what_megatron_gives_it(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    assert run(packed_job, 8, path) == [len(CASES)] * 8


def dynamic_job(rank: int, path: Path) -> dict[str, Any]:
    got: dict[str, Any] = {}
    packing = packing_of("dynamic_cp", cp_sizes=(4, 8))
    with initialized(Case(cp=2)), megatron.feed(recipe_of(path), packing=packing, device="cpu") as feed:
        (iterator,) = iterators_of(feed)
        with pytest.raises(mf.errors.LayoutError, match="no context-parallel group of 4"):
            for _ in range(100):
                megatron.get_batch(iterator)
    case = Case(cp=2, options={"hybrid_context_parallel": True})
    sizes = (1, 2, 4, 8)
    with (
        initialized(case),
        megatron.feed(
            recipe_of(path, 64),
            case.config,
            packing=packing_of("dynamic_cp", 64, cp_sizes=sizes),
            device="cpu",
        ) as feed,
    ):
        (iterator,) = iterators_of(feed)
        got["sizes"] = []
        for _ in range(STEPS):
            for _ in range(iterator.begin().num_microbatches):
                params = megatron.get_batch(iterator)["packed_seq_params"]
                got["sizes"].append(params.local_cp_size)
                if params.local_cp_size == 1:
                    assert params.cp_group is None
                else:
                    members = dist.get_process_group_ranks(params.cp_group)
                    assert tuple(members) == feed.cp_groups[params.local_cp_size]
    # dp varies faster than cp, and Megatron's groups are other ranks than those that split a pack
    case = Case(cp=2, order="tp-dp-cp-ep-pp", options={"hybrid_context_parallel": True})
    with initialized(case), megatron.feed(recipe_of(path), packing=packing, device="cpu") as feed:
        own = {
            size: dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
            for size, ranks in feed.cp_groups.items()
        }
        (iterator,) = iterators_of(feed)
        with pytest.raises(mf.errors.LayoutError, match="sort_ranks=False"):
            for _ in range(iterator.begin().num_microbatches):
                megatron.get_batch(iterator)
        iterator.begin()
        params = megatron.get_batch(iterator, cp_groups=own)["packed_seq_params"]
        got["own"] = params.cp_group is own[params.local_cp_size]
    return got


@only_soak
def test_changing_cp_groups_are_megatrons_or_the_users(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    for got in run(dynamic_job, 8, path):
        assert len(set(got["sizes"])) > 1
        assert got["own"]


def replay_job(rank: int, path: Path) -> bool:
    with (
        initialized(Case(tp=2)),
        megatron.feed(
            recipe_of(path),
            packing=packing_of("balanced"),
            device="cpu",
            transport=mf.Transport(timeout_s=600),
        ) as feed,
    ):
        iterator = RerunDataIterator(megatron.data_iterators(feed))
        batch = next(iterator)
        kept = plain(batch["tokens"])
        iterator.saved_microbatches, iterator.replaying = [batch], True  # what a rerun that was recorded does
        again = megatron.get_batch(iterator)
        iterator.advance()
        other = megatron.get_batch(iterator)
        return plain(again["tokens"]) == kept != plain(other["tokens"])


def test_a_microbatch_can_be_replayed(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    assert run(replay_job, 2, path) == [True, True]


def images_job(rank: int) -> list[Any]:
    """Images of varying shape and captions beside tokens, packed, by all three ways of loading."""
    fields = (
        mf.Field(name="tokens", dtype="int32", stages=("first",), split=True),
        mf.Field(name="image", dtype="uint8", stages=("first",)),
        mf.Field(name="caption", dtype="bytes", stages=("first",)),
    )
    got: list[Any] = []
    with initialized(Case(tp=2, pp=2)):
        for loading in ("replicated", "broadcast", "shared"):
            dataset = Renamed()
            recipe = samples_recipe(dataset, *fields, packed=True, lengths=dataset.lengths())
            with megatron.feed(
                recipe,
                readers=loading,
                packing=packing_of("balanced"),
                device="cpu",
                transport=mf.Transport(timeout_s=600),
            ) as feed:
                batch = megatron.get_batch(megatron.data_iterators(feed))
            params = batch.pop("packed_seq_params")
            images = [plain(image) for image in batch.get("image", [])]
            got.append((plain(batch["tokens"]), images, batch.get("caption"), plain(params.cu_seqlens_q)))
    assert got[0] == got[1] == got[2]
    return got[0]


class Renamed(Rich):
    """Its ids under the name that Megatron has for them."""

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        item = super().__getitem__(at)
        return {"tokens": item["ids"], "image": item["image"], "caption": item["caption"].encode()}


def test_images_are_loaded_by_the_same_switch() -> None:
    first, beside, last, _ = results = run(images_job, 4)
    assert first == beside
    assert first[1]
    assert last[:3] == (None, [], None)
    assert {str(result[3]) for result in results} == {str(first[3])}


def test_rows_by_document_are_laid_end_to_end(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    rule = mf.Windows(32, reset_attention_mask=True, reset_position_ids=True)
    recipe = mf.Recipe(data=mf.open(path), sequence=rule, batch=mf.Batch(sequences=4))
    with mf.Feed(recipe, micro_batch_size=2) as feed:
        batch = megatron.get_batch(megatron.data_iterators(feed))
        params = batch["packed_seq_params"]
        assert batch["tokens"].shape == batch["labels"].shape == (1, 64)
        assert params.cu_seqlens_q[-1] == 64
        assert params.cu_seqlens_q_padded is params.cu_seqlens_q
        assert params.max_seqlen_q == int(params.cu_seqlens_q.diff().max())
    steps = mf.simulate(recipe, mf.Layout(cp=2), 1)
    rows = next(steps).microbatches[0]
    with pytest.raises(mf.errors.RecipeError, match="leave reset_attention_mask out"):
        megatron.get_batch(iter([dict(rows)]))


def test_mtp_layers_need_a_megatron_that_shifts_in_changing_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("megatron.core.packed_seq_params.resolve_cp_group", raising=False)  # since 0.17
    options = {"packing": packing_of("dynamic_cp"), "stage_map": mf.StageMap(mtp=(0,))}
    with (
        mf.Feed(recipe_of(write_documents(tmp_path / "corpus")), mf.Layout(cp=2), 0, **options) as feed,
        pytest.raises(mf.errors.RecipeError, match="MTP layers with changing cp groups"),
    ):
        megatron.data_iterators(feed)


def test_a_stage_without_an_iterator_gets_nothing() -> None:
    assert megatron.get_batch(None) == dict.fromkeys([*megatron.MODEL_KEYS, "packed_seq_params"])


@dataclasses.dataclass
class NewerParams(PackedSeqParams):
    """With the fields that later releases add."""

    total_tokens: int | None = None
    pad_between_seqs: bool | None = None


def test_newer_releases_get_their_further_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.packed_seq_params.PackedSeqParams", NewerParams)
    asked: list[int] = []

    def groups(group_size: int) -> Any:
        asked.append(group_size)
        return f"group of {group_size}"

    monkeypatch.setattr(parallel_state, "get_dynamic_data_context_parallel_groups", groups, raising=False)
    monkeypatch.setattr(batches, "get_process_group_ranks", lambda group: (0,))
    with mf.Feed(recipe_of(write_documents(tmp_path / "corpus")), packing=packing_of("balanced")) as feed:
        iterator = megatron.data_iterators(feed)
        microbatch = next(iterator)
        for dynamic in ({}, {"local_cp_size": 1, "cp_ranks": (0,)}):
            params = megatron.get_batch(iter([microbatch | dynamic]))["packed_seq_params"]
            assert params.total_tokens == int(params.cu_seqlens_q_padded[-1])
            assert params.pad_between_seqs == (
                not torch.equal(params.cu_seqlens_q, params.cu_seqlens_q_padded)
            )
            assert params.cp_group == ("group of 1" if dynamic else None)
    assert asked == [1]


def test_packs_of_one_shape_differ_in_nothing_that_a_graph_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.packed_seq_params.PackedSeqParams", NewerParams)
    packing = packing_of("balanced", fixed_shapes=True, max_sequences=6)
    seen: set[Any] = set()
    with mf.Feed(recipe_of(write_documents(tmp_path / "corpus")), packing=packing) as feed:
        iterator = megatron.data_iterators(feed)
        for _ in range(8):
            made = megatron.get_batch(iterator)
            params = vars(made.pop("packed_seq_params")) | made
            seen.add(tuple((name, getattr(value, "shape", value)) for name, value in params.items()))
    assert len(seen) == 1
    told = dict(seen.pop())
    assert (told["total_tokens"], told["max_seqlen_q"], told["cu_seqlens_q"]) == (256, 256, (8,))
