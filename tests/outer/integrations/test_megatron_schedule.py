"""Megatron's schedulers' places: equal to a Feed's plan, for all that crashes theirs, on every stage."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron_world import Case, initialized, plain, run, sample_of, write_documents

import meshfeed as mf
from meshfeed.exchange import Keys
from meshfeed.integrations import megatron
from meshfeed.integrations.megatron.samples import sequences_of
from meshfeed.order import draws_of_step
from soak import cases

STEPS, SEQUENCES, CAPACITY = 2, 24, 256


def config_of(case: Case, scheduler: Any, capacity: int = CAPACITY, **options: Any) -> SimpleNamespace:
    config = case.config
    config.sequence_packing_scheduler = scheduler
    config.max_seqlen_per_dp_cp_rank = capacity
    vars(config).update(options)
    return config


def padded(sample: dict[str, Any], multiple: int) -> dict[str, Any]:
    """Padded beforehand, as Megatron asks for, and telling so."""
    size = len(sample["tokens"])
    width = -(-size // multiple) * multiple
    made = {k: torch.nn.functional.pad(v, [0, width - size], value=9) for k, v in sample.items()}
    return made | {"original_seq_len": torch.tensor([size]), "padded_seq_len": torch.tensor([width])}


def recipe_of(path: Path) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=SEQUENCES), seed=9)


def given_by(path: Path, dp_rank: int, dp: int, pulls: int) -> Iterator[list[dict[str, Any]]]:
    """What a data-parallel rank's own iterator gives: its run of each step's documents, in so many lists."""
    recipe = recipe_of(path)
    (store,) = recipe.sources
    with store:
        for step in range(STEPS):
            index = np.array_split(draws_of_step(recipe, step).index, dp)[dp_rank]
            starts, lengths = store.offsets(index), store.lengths(index)
            samples = [
                padded(sample_of(store.read_stream(np.array([a]), np.array([a + n]))), 16)
                for a, n in zip(starts, lengths)
            ]
            for part in np.array_split(np.arange(len(samples)), pulls):
                yield [samples[i] for i in part]


def seen(wrapped: megatron.Wrapped, groups: Any = None) -> list[Any]:
    """Every microbatch of a step, stage by stage, and its numbers."""
    iterators, count, tokens, sum_sq = wrapped
    iterators = iterators if isinstance(iterators, list) else [iterators]
    made: list[Any] = [count, tokens, sum_sq]
    for _ in range(count):
        for iterator in iterators:
            batch = megatron.get_batch(iterator)
            params = batch.pop("packed_seq_params")
            batch.pop("sequence_ids", None)
            group = params.cp_group and dist.get_process_group_ranks(params.cp_group)
            sizes = (params.max_seqlen_q, params.local_cp_size, group)
            made.append((sizes, plain(params.cu_seqlens_q), plain(params.cu_seqlens_q_padded)))
            made.append({name: plain(value) for name, value in batch.items()})
    with pytest.raises(StopIteration):
        next(iterators[0])
    return made


CASES = [
    (Case(tp=2, pp=4, stages="Et|t|m|L", mtp=1), "dp_balanced", "broadcast"),
    (Case(tp=2, cp=2), SimpleNamespace(value="default_dynamic_cp"), "broadcast"),
    (Case(cp=2, pp=2, vpp=2), "balanced", "shared"),
    (Case(tp=2, pp=2), "in_order", "replicated"),
    (Case(tp=2, pp=4), "dp_balanced", "broadcast"),  # see BARE
]
BARE = {"max_seqlen_per_dp_cp_rank": CAPACITY, "sequence_packing_scheduler": "dp_balanced"}
BARE |= dict.fromkeys(("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"))
"""All that Megatron's own function reads; then tp rank 0 of every stage has an iterator, too."""


def untouched() -> Iterator[Any]:
    raise AssertionError("the data of this stage come from another one")
    yield


def equal_job(rank: int, path: Path) -> list[bool]:
    got: list[bool] = []
    for case, scheduler, loading in CASES:
        dynamic = "dynamic" in str(scheduler)
        with initialized(
            Case(**{**vars(case), "options": {"hybrid_context_parallel": True} if dynamic else {}})
        ):
            config = config_of(case, scheduler)
            layout = megatron.layout()
            bare = case is CASES[-1][0]
            config = SimpleNamespace(**BARE) if bare else config
            reads = megatron.is_reader(config=config, readers=loading)
            own = given_by(path, layout.coord(rank).dp, layout.dp, pulls=3) if reads else None
            if bare and not reads and layout.coord(rank).tp == 0:
                own = untouched()
            iterator: Any = RerunDataIterator(own) if own is not None else None
            if case.vpp:
                iterator = [iterator] * case.vpp
            packing = megatron.packing_of(config, layout)
            with (
                megatron.SequencePacking(readers=loading, timeout_s=120) as wrap,
                megatron.feed(
                    recipe_of(path),
                    config,
                    packing=packing,
                    device="cpu",
                    transport=mf.Transport(timeout_s=120),
                ) as feed,
            ):
                planned = megatron.data_iterators(feed)
                for groups in (None, ProcessGroupCollection.use_mpu_process_groups()):  # STEPS of them
                    wanted = seen(wrap(planned, config, 3))
                    got.append(seen(wrap(iterator, config, 3, groups)) == wanted)
                with pytest.raises(StopIteration):
                    wrap(iterator, config, 3)
    return got


def test_a_trainers_own_samples_become_what_a_feed_plans(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus")
    assert run(equal_job, 8, path) == [[True] * STEPS * len(CASES)] * 8


RAMP = ((2, 2, 3), (4, 5, 6), (7, 8, 9))  # num_microbatches, of three steps a turn


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def turns_job(rank: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """Training and validation through one object, of other sizes, validation over and over again."""

    def numbers(first: int, count: int | None = None) -> Iterator[dict[str, Any]]:
        for n in itertools.count() if count is None else range(count):
            yield sample_of(np.full(3 + n % 5, first + n))

    got: list[Any] = []
    holding: list[tuple[int, int]] = []
    case = Case(tp=2)
    config = config_of(case, "dp_balanced")
    with initialized(case), megatron.SequencePacking(timeout_s=120) as wrap:
        reads, dp = megatron.is_reader(), parallel_state.get_data_parallel_rank()
        train = numbers(1000 * dp + 1) if reads else None
        for turn, ramp in enumerate(RAMP):
            for pulls in ramp:
                got.append(set(next(wrap(train, config, pulls)[0])["tokens"].unique().tolist()) - {0})
            valid = numbers(5001 + 1000 * dp, 4) if reads else None
            for _ in range(2):
                got.append(set(next(wrap(valid, config, 2)[0])["tokens"].unique().tolist()) - {0})
            if turn == 1:
                with pytest.raises(StopIteration):
                    wrap(valid, config, 2)
            dist.barrier()
            holding.append(held())
    return got, holding


def test_data_sets_take_turns() -> None:
    results, holding = zip(*run(turns_job, 4))
    for first, *others in holding:
        assert others == [first] * (len(RAMP) - 1), "a batch size that grows opens nothing"
    assert results[0] == results[1]
    assert results[2] == results[3]
    steps = [one | other for one, other in zip(results[0], results[2])]
    first = 1
    for turn, ramp in enumerate(RAMP):  # so many of training a turn, and validation from its start
        for at, count in enumerate(ramp):
            own = range(first, first + count)
            assert steps[5 * turn + at] == {*own, *(n + 1000 for n in own)}
            first += count
        for at, own in enumerate(((5001, 5002), (5003, 5004))):
            assert steps[5 * turn + 3 + at] == {*own, *(n + 1000 for n in own)}


def ends_job(rank: int) -> tuple[list[list[int]], str, str]:
    """A validation set that ends sooner on one rank, between steps of training that goes on."""

    def numbers(first: int, count: int) -> Iterator[dict[str, Any]]:
        return iter([sample_of(np.full(4, first + n)) for n in range(count)])

    def step(samples: Any) -> list[int]:
        iterator, count, _, _ = wrap(samples, config, 1)
        return sorted(n for _ in range(count) for n in next(iterator)["tokens"].unique().tolist() if n)

    case = Case()
    config = config_of(case, "dp_balanced")
    with initialized(case), megatron.SequencePacking(timeout_s=120) as wrap:
        train, valid = numbers(100 * (rank + 1), 6), numbers(1000 * (rank + 1), 2 + rank)
        got = [step(train), *(step(valid) for _ in range(3)), step(train)]
        with pytest.raises(StopIteration):
            step(valid)
        got += [step(train) for _ in range(4)]
        with pytest.raises(StopIteration):
            step(train)
    case, told = Case(tp=2), ""
    with initialized(case), megatron.SequencePacking(timeout_s=120) as wrap:
        step(None if rank else numbers(1, 2))
        if rank:
            with pytest.raises(mf.errors.RecipeError) as refused:
                step(numbers(1, 2))
            told = str(refused.value)
        dist.barrier()
    with (
        initialized(case),
        megatron.SequencePacking(timeout_s=120) as wrap,
        pytest.raises(mf.errors.RoleError) as misplaced,
    ):
        step(numbers(1, 2))  # on both
    return got, told, str(misplaced.value)


def test_the_end_of_one_data_set_is_not_that_of_another() -> None:
    (one, _, misplaced), (other, told, _) = run(ends_job, 2)
    steps = [sorted({*a, *b}) for a, b in zip(one, other, strict=True)]
    train = [[100 + n, 200 + n] for n in range(6)]
    assert steps == [train[0], [1000, 2000], [1001, 2001], [2002], *train[1:]]
    assert "no data iterator before" in told
    assert "rank 1 has a data iterator, but is_reader() is True on ranks [0] alone" in misplaced


def short_job(rank: int) -> str:
    """Rank 1's iterator has one element too few for the second step."""
    case = Case()
    config = config_of(case, "dp_balanced")
    with initialized(case), megatron.SequencePacking(timeout_s=120) as wrap:
        samples = iter([sample_of(np.full(4, n)) for n in range(4 - rank)])
        wrap(samples, config, 2)
        try:
            wrap(samples, config, 2)
        except mf.MeshfeedError as short:
            return f"{type(short).__name__} {short}"
    return "no error"


def test_an_iterator_that_ends_within_a_step_ends_all_ranks() -> None:
    told = run(short_job, 2)
    assert told[0] == told[1] and "ended after 1 of num_microbatches=2" in told[0], told


def images_job(rank: int) -> list[Any]:
    """Images of varying shape, in some samples only, and names: rerouted with the tokens, however loaded."""
    got: list[Any] = []
    case = Case(tp=2)
    config = config_of(case, "dp_balanced", capacity=8)
    with initialized(case):
        dp_rank = parallel_state.get_data_parallel_rank()
        samples = [sample_of(np.full(5, 10 * dp_rank + n), uid=f"{dp_rank}/{n}") for n in range(2)]
        samples[1]["image"] = torch.full((3, 2 + dp_rank), 10 * dp_rank)
        for loading in ("replicated", "broadcast", "shared"):
            reads = megatron.is_reader(config=config, readers=loading)
            with megatron.SequencePacking(readers=loading, timeout_s=120) as wrap:
                iterator, count, _, _ = wrap(iter([samples]) if reads else None, config, 1)
                batches = [megatron.get_batch(iterator) for _ in range(count)]
            got.append(
                [(b["uid"], plain(b["tokens"]), [plain(i) for i in b.get("image", [])]) for b in batches]
            )
    assert got[0] == got[1] == got[2]
    return got[0]


def test_images_travel_with_their_tokens() -> None:
    results = run(images_job, 4)
    assert results[0] == results[1]
    assert results[2] == results[3]
    seen = {uid: (tokens[2][0][0], images) for (uid,), tokens, images in results[0] + results[2]}
    assert set(seen) == {b"0/0", b"0/1", b"1/0", b"1/1"}
    for dp_rank, (bare, with_image) in enumerate(((b"0/0", b"0/1"), (b"1/0", b"1/1"))):
        shape = (3, 2 + dp_rank)
        image = ("torch.int64", shape, [[10 * dp_rank] * shape[1]] * 3)
        assert seen[bare] == (10 * dp_rank, [])
        assert seen[with_image] == (10 * dp_rank + 1, [image])


# (lengths by data-parallel rank, capacity, cp, scheduler): what crashes or silently breaks known schedulers
CRASHES = [
    ([[10]] * 4, 1024, 1, "dp_balanced"),
    ([[10], [], [], []], 1024, 1, "dp_balanced"),
    ([[10] * 3, [10] * 2, [10] * 2, [10] * 2], 4096, 1, "dp_balanced"),
    ([[40], [], [], []], 12, 1, "default_dynamic_cp"),
    ([[24576 // 16], [], [], []], 8192 // 16, 1, "default_hybrid_cp"),
    ([[2000], [1] * 400, [2] * 300, [3] * 323], 1024, 2, "default_dynamic_cp"),
    ([[4000] * 2, [4000] * 2, [4000] * 2, [4000]], 4096, 1, "dp_balanced"),
]


def crash_job(rank: int) -> list[Any]:
    got: list[Any] = []
    for cp in (1, 2):
        case = Case(cp=cp, options={"hybrid_context_parallel": True})
        with initialized(case), megatron.SequencePacking(timeout_s=120) as wrap:
            dp_rank = parallel_state.get_data_parallel_rank()
            for lengths, capacity, wanted_cp, scheduler in CRASHES:
                if wanted_cp != cp:
                    continue
                own = lengths[dp_rank] if dp_rank < len(lengths) else []
                samples = iter([[sample_of(np.full(n, 1 + rank // cp)) for n in own]])
                iterator, count, tokens, sum_sq = wrap(samples, config_of(case, scheduler, capacity), 1)
                batches = [megatron.get_batch(iterator) for _ in range(count)]
                held = [batch["loss_mask"] for batch in batches]
                for batch in batches:  # dummies too
                    params = batch["packed_seq_params"]
                    assert params.max_seqlen_q == int(params.cu_seqlens_q_padded.diff().max())
                every = [n for one in lengths for n in one]
                assert (tokens, sum_sq) == (sum(every), sum(n * n for n in every))
                assert all(mask.shape[1] <= capacity for mask in held)
                got.append((count, sum(int(mask.sum()) for mask in held), sum(n - 1 for n in every)))
    return got


def test_what_crashes_known_schedulers_works() -> None:
    results = run(crash_job, 8)
    assert len(results[0]) == len(CRASHES)
    for case in range(len(CRASHES)):
        (count,) = {result[case][0] for result in results}
        assert count > 0
        assert sum(result[case][1] for result in results) == results[0][case][2]


def refusal_job(rank: int) -> list[str]:
    told: list[str] = []
    case = Case()
    with initialized(case), megatron.SequencePacking(timeout_s=120) as wrap:
        for config, samples in (
            (config_of(case, "dp_balanced", 1024), [sample_of(np.ones(n)) for n in (5000, 100, 100, 100)]),
            (config_of(case, "fastest"), []),
            (config_of(case, None), []),
            (SimpleNamespace(sequence_packing_scheduler="balanced"), []),
            (config_of(case, "dp_balanced"), "no samples"),
        ):
            with pytest.raises(mf.MeshfeedError) as refused:
                wrap(iter([samples]), config, 1)
            told.append(f"{type(refused.value).__name__} {refused.value}")
    return told


def test_what_cannot_be_is_refused_by_name() -> None:
    (told,) = run(refusal_job, 1)
    assert all(
        word in text for word, text in zip(("5000", "fastest", "scheduler=None", "max_seqlen", "str"), told)
    ), told
    assert told[0].startswith("PlanError")


@settings(deadline=None, max_examples=cases(100))
@given(lengths=st.lists(st.integers(0, 9), max_size=6), multiple=st.integers(1, 8))
def test_samples_are_taken_apart_however_they_come(lengths: list[int], multiple: int) -> None:
    whole = [sample_of(np.arange(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    wanted = [plain(sample["tokens"]) for sample in whole if len(sample["tokens"])]
    widths = [-(-n // multiple) * multiple for n in lengths]
    parts = [padded(sample, multiple) for sample in whole]
    empty = sample_of(np.zeros(0))
    packed = {k: torch.cat([empty[k], *(part[k] for part in parts)])[None] for k in empty}
    packed["cu_seqlens"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed["cu_seqlens_padded"] = torch.tensor([0, *np.cumsum(widths)], dtype=torch.int32)[None]
    packed["max_seqlen"] = torch.tensor(9)
    unpadded = [packed | {"cu_seqlens_padded": None}] if widths == lengths else []
    for form in (parts, packed, [packed], *unpadded):
        made = sequences_of(form)
        assert [plain(each["tokens"]) for each in made] == wanted
        assert all(set(each) == {"tokens", "labels", "loss_mask", "position_ids"} for each in made)
    bare = [each for each in sequences_of(whole) if len(each["tokens"])]
    assert [plain(each["tokens"]) for each in bare] == wanted


def test_every_row_is_a_sequence_and_no_shape_says_what_is_per_token() -> None:
    tokens, loss = torch.arange(8).reshape(2, 4), torch.ones(2, 4)
    rows = {"tokens": tokens, "loss_mask": loss, "attention_mask": torch.ones(2, 1, 4, 4).tril()}
    assert [plain(each["tokens"]) for each in sequences_of(rows)] == [plain(row) for row in tokens]
    cut = sequences_of(rows | {"original_seq_len": torch.tensor([3, 1])})
    assert [each["tokens"].tolist() for each in cut] == [[0, 1, 2], [4]]
    assert [each["loss_mask"].shape for each in cut] == [(3,), (1,)]

    keys = Keys("image", mf.Field(name="weights", dtype="any", split=True))
    image = torch.ones(4, 2)  # as long as the tokens
    sample = {"tokens": tokens[:1], "weights": tokens[:1] * 2, "image": image, "original_seq_len": 3}
    (made,) = sequences_of(sample, keys)
    assert (made["tokens"].tolist(), made["weights"].tolist()) == ([0, 1, 2], [0, 2, 4])
    assert made["image"] is image
    for tokens_of_one, features in (
        (torch.ones(1), torch.ones(1, 1)),
        (torch.ones(1, 1), torch.ones(1, 1, 3)),
    ):
        (made,) = sequences_of({"tokens": tokens_of_one, "weights": features}, keys)
        assert made["weights"].shape == features.shape[tokens_of_one.ndim - 1 :]

    for wrong, word in (
        (rows | {"image": image}, "image"),
        (rows | {"loss_mask": torch.ones(4)}, "loss_mask"),
        (rows | {"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens"),
        (rows | {"original_seq_len": torch.tensor([3])}, "original_seq_len"),
    ):
        with pytest.raises(mf.errors.RecipeError, match=word):
            sequences_of(wrong)


@pytest.mark.parametrize(
    "dp, cp, least, sizes",
    [
        (8, 1, None, (1, 2, 4, 8)),
        (3, 2, 1, (1, 2, 6)),
        (3, 1, None, (1, 3)),
        (6, 2, 2, (2, 4, 12)),
        (1, 1, 4, (1,)),
    ],
)
def test_changing_cp_has_the_sizes_of_megatrons_groups(dp: int, cp: int, least: Any, sizes: Any) -> None:
    config = config_of(Case(), "default_dynamic_cp", min_dynamic_context_parallel_size=least)
    packing = megatron.packing_of(config, mf.Layout(tp=2, cp=cp, dp=dp))
    assert (packing.policy, packing.cp_sizes, packing.capacity) == ("dynamic_cp", sizes, CAPACITY)
    assert packing.align == mf.Align()


def test_megatrons_names_of_schedulers_are_known() -> None:
    assert {*megatron.SCHEDULERS} > {"dp_balanced", "default_dynamic_cp", "default_hybrid_cp"}
