"""A Feed alone: no torch.distributed, no processes, and the habits of a training loop."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import meshfeed as mf
from corpus import recipe_of, write_corpus
from observe import content_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c"
    write_corpus(path)
    return path


def taken(feed: mf.Feed, steps: int) -> list[list[int]]:
    """The indices of each of the next steps."""
    seen: list[list[int]] = []
    for step in feed:
        seen.append([i for m in step.microbatches for i in m.draws.index.tolist()])
        if len(seen) == steps:
            break
    return seen


def test_it_works_without_any_distribution(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus), micro_batch_size=4) as feed:
        assert feed.delivery == "direct"
        assert feed.role.reads
        step = next(iter(feed))
        assert step.num_microbatches == 4
        assert (step.tokens, step.valid_tokens, step.sum_sq) == (1024, 1024, 16 * 64 * 64)
        batches = list(step.microbatches)
    assert [m.index for m in batches] == [0, 1, 2, 3]
    assert {name: (tuple(v.shape), v.dtype) for name, v in batches[0].items()} == {
        "tokens": ((4, 64), torch.int64),
        "labels": ((4, 64), torch.int64),
        "loss_mask": ((4, 64), torch.float32),
        "position_ids": ((4, 64), torch.int64),
    }


@pytest.mark.parametrize("prefetch", [0, 1, 7])
def test_prefetch_changes_nothing_but_when(corpus: Path, prefetch: int) -> None:
    with (
        mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=prefetch)) as feed,
        mf.Feed(recipe_of(corpus)) as other,
    ):
        assert taken(feed, 5) == taken(other, 5)


def test_going_on_after_a_break_and_after_a_state(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus)) as feed:
        whole = taken(feed, 9)
    with mf.Feed(recipe_of(corpus)) as feed:
        assert taken(feed, 2) == whole[:2]
        assert taken(feed, 2) == whole[2:4]
        saved = feed.state_dict()
        assert content_of(saved)["step"] == 4
        assert saved == feed.state_dict(), "reading a state does not change it"
        assert taken(feed, 1) == whole[4:5]
        feed.load_state_dict(saved)
        assert taken(feed, 5) == whole[4:9]
    with mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=0)) as fresh:
        fresh.load_state_dict(saved)
        step = next(iter(fresh))
        assert step.index == 4
        assert [i for m in step.microbatches for i in m.draws.index.tolist()] == whole[4]
        assert fresh.next_step == 5


def test_an_iteration_from_before_a_load_is_refused(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus)) as feed:
        steps = iter(feed)
        step = next(steps)
        feed.load_state_dict(feed.state_dict())
        with pytest.raises(mf.errors.StateError, match="start a new one"):
            next(step.microbatches)
        with pytest.raises(mf.errors.StateError, match="start a new one"):
            next(steps)


def test_steps_may_be_left_half_taken(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus), micro_batch_size=2) as feed:
        whole = taken(feed, 3)
    with mf.Feed(recipe_of(corpus), micro_batch_size=2) as feed:
        steps = iter(feed)
        first = next(steps)
        assert next(first.microbatches).draws.index.tolist() == whole[0][:2]
        second = next(steps)
        assert [i for m in second.microbatches for i in m.draws.index.tolist()] == whole[1]
        with pytest.raises(mf.errors.StateError, match="belong to a finished step"):
            next(first.microbatches)


def test_a_step_of_an_iterator_that_nobody_holds(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus)) as feed:
        assert next(next(iter(feed)).microbatches)["tokens"].shape == (1, 64)


def test_without_with_it_closes_at_the_end_of_the_stream(corpus: Path) -> None:
    recipe = recipe_of(corpus, length=1000, epochs=1)
    feed = mf.Feed(recipe, micro_batch_size=16, pad_rows=True)
    assert [len([*step.microbatches]) for step in feed] == [1, 1]
    assert recipe.data.stats.opens == 1
    assert feed.next_step == 2


def test_batches_that_are_kept_are_not_written_over(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=3)) as feed:
        kept = []
        for step in feed:
            kept += [(m["tokens"], m["tokens"].clone()) for m in step.microbatches]
            if step.index == 40:
                break
    assert all(torch.equal(now, then) for now, then in kept)


def test_memory_of_batches_that_are_dropped_is_used_again(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=2)) as feed:
        addresses = set()
        for step in feed:
            for m in step.microbatches:
                addresses |= {m[name].untyped_storage().data_ptr() for name in ("tokens", "labels")}
            if step.index == 200:
                break
    most = 2 * 16 * (2 + 3)
    assert len(addresses) <= most, "read ahead, just taken, still held from before, and being built"


def test_ranges_of_one_store_are_counted_once(corpus: Path) -> None:
    store, usual = mf.open(corpus), recipe_of(corpus)
    data = mf.Mixture({"a": store[:40], "b": store[40:][:40], "c": store})
    with mf.Feed(dataclasses.replace(usual, data=data), micro_batch_size=2) as feed:
        step = next(iter(feed))
        list(step.microbatches)
        assert step.stats.bytes_read == 16 * 65 * 2


def test_what_step_stats_say(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus), micro_batch_size=2) as feed:
        for step in feed:
            list(step.microbatches)
            assert step.stats.bytes_read == 16 * 65 * 2
            assert step.stats.collectives == 0
            waits = step.stats.exposed_wait_s
            assert set(waits) <= {"start", "plan", "read", "deliver", "build", "copy", "other"}
            assert all(seconds >= 0 for seconds in waits.values())
            if step.index == 3:
                break


@pytest.mark.parametrize("prefetch", [0, 4])
def test_what_a_loop_writes_into_a_batch_stays_there(corpus: Path, prefetch: int) -> None:
    """Fields that are the same in every microbatch share memory, but for who writes to one."""
    recipe = recipe_of(corpus)
    expected = [
        made.microbatches for made in mf.simulate(recipe, mf.Layout.parse("dp1"), 4, micro_batch_size=4)
    ]
    with mf.Feed(recipe, micro_batch_size=4, transport=mf.Transport(prefetch=prefetch)) as feed:
        for step, wanted in zip(feed, expected):
            batches = list(step.microbatches)
            for i, (microbatch, other) in enumerate(zip(batches, wanted, strict=True)):
                for name, tensor in microbatch.items():
                    assert torch.equal(tensor, other[name]), name
                    match i:
                        case 0:
                            tensor.mul_(3)
                        case 1:
                            tensor.view(-1)[::2] = 5
                        case 2:
                            tensor.numpy()[:] = 7
                        case _:
                            tensor.data.zero_()
            masks = [microbatch["loss_mask"].unique().tolist() for microbatch in batches]
            assert masks == [[3], [1, 5], [7], [0]]


def test_fields_that_are_always_the_same_are_kept_once(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus), micro_batch_size=4) as feed:
        for step, _ in zip(feed, range(3)):
            for microbatch in step.microbatches:
                shared = {name for name, tensor in microbatch.items() if torch._C._is_cow_tensor(tensor)}
                assert shared == {"loss_mask", "position_ids"}


LAUNCHED = [
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
]


@pytest.mark.parametrize(("size", "rank"), LAUNCHED)
def test_every_rank_of_a_launched_job_needs_a_layout(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, size: str, rank: str
) -> None:
    for other in (name for pair in LAUNCHED for name in pair):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(size, "2")
    for number in ("0", "1"):
        monkeypatch.setenv(rank, number)
        feed = mf.Feed(recipe_of(corpus))
        for use in (lambda feed=feed: next(iter(feed)), lambda feed=feed: feed.num_microbatches(0)):
            with pytest.raises(mf.errors.LayoutError, match=r"2 processes needs a layout.*mf.Layout\(dp=2\)"):
                use()
        assert mf.Feed(recipe_of(corpus), mf.Layout(dp=2)).rank == int(number)
        with pytest.raises(mf.errors.LayoutError, match="dp4 needs 4 ranks, the job has 2"):
            next(iter(mf.Feed(recipe_of(corpus), mf.Layout(dp=4))))
        with mf.Feed(recipe_of(corpus), mf.Layout(dp=4), 2) as alone:  # of a job that was not launched
            assert next(iter(alone)).index == 0


def test_a_process_that_nobody_told_its_rank_is_not_taken_for_rank_0(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (name for pair in LAUNCHED for name in pair):
        monkeypatch.delenv(name, raising=False)
    for use in (lambda feed: feed.rank, lambda feed: next(iter(feed))):
        with pytest.raises(
            mf.errors.LayoutError, match=r"which of the 2 ranks of layout dp2.*torchrun.*rank="
        ):
            use(mf.Feed(recipe_of(corpus), mf.Layout(dp=2)))
    assert mf.Feed(recipe_of(corpus)).rank == 0


def test_microbatches_are_handed_out_once(corpus: Path) -> None:
    with mf.Feed(recipe_of(corpus), micro_batch_size=4) as feed:
        step = next(iter(feed))
        for _ in step.microbatches:
            break
        assert len(list(step.microbatches)) == step.num_microbatches - 1, "what is left of a pass"
        with pytest.raises(mf.errors.StateError, match=r"taken already.*list\(step.microbatches\)"):
            list(step.microbatches)
        step = next(iter(feed))
        assert len([each for _, each in zip(range(step.num_microbatches), step.microbatches)]) > 1
        with pytest.raises(mf.errors.StateError, match="taken already"):  # counted, and not asked for more
            list(step.microbatches)


def test_a_microbatch_is_a_mapping_of_its_own(corpus: Path) -> None:
    """Read together or not: its length and names agree with what it yields, and it equals itself alone."""
    with mf.Feed(recipe_of(corpus), micro_batch_size=2) as feed:
        first, second = list(next(iter(feed)).microbatches)[:2]
    for microbatch in (first, second):
        names = list(microbatch)
        assert len(microbatch) == len(names) == len(microbatch.fields) == len({*names})
        assert all(name in microbatch and microbatch[name] is not None for name in names)
        assert "no such field" not in microbatch
        assert dict(microbatch.items()).keys() == {*names}
        with pytest.raises(AttributeError):
            microbatch.index = 7  # pyright: ignore[reportAttributeAccessIssue]
    again = copy.copy(first)
    assert first == first and first != again and first != second, "tensors have no one truth of equality"
    assert len({first, second, first}) == 2


@pytest.mark.parametrize("rows", [1, 3, 6, 16, 17])
def test_the_number_of_microbatches_is_known_before_the_step(corpus: Path, rows: int) -> None:
    recipe = recipe_of(corpus, length=1000, epochs=1)
    with mf.Feed(recipe, micro_batch_size=rows, pad_rows=True) as feed:
        told = [feed.num_microbatches(step) for step in range(3)]
        made = [len(list(step.microbatches)) for step in feed]
    assert told == [*made, 0]


@pytest.mark.parametrize("rule", [mf.Windows(64), mf.Documents()])
def test_no_process_imports_masked_arrays(
    corpus: Path, rule: mf.Windows | mf.Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """np.unique would, in the first step of each rank."""
    monkeypatch.setitem(sys.modules, "numpy.ma", None)
    monkeypatch.delitem(vars(np), "ma", raising=False)
    packing = mf.Packing(capacity=4096) if isinstance(rule, mf.Documents) else None
    recipe = dataclasses.replace(recipe_of(corpus), sequence=rule, shuffle=mf.Blocks())
    with mf.Feed(
        recipe,
        layout=mf.Layout(tp=2, cp=2),
        rank=0,
        transport=mf.Transport(delivery="direct"),
        packing=packing,
    ) as feed:
        for _, step in zip(range(2), feed):
            assert [microbatch["tokens"] for microbatch in step.microbatches]
