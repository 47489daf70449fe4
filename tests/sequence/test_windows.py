"""Windows, against a model of them written in plain loops over the token stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.order import draws_of_step, key_of
from meshfeed.plan import plan_fixed
from meshfeed.sequence import portions_of
from meshfeed.store import IndexedWriter, Store
from soak import cases, some

OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


class Model:
    """What a window is, one token at a time."""

    def __init__(self, documents: list[np.ndarray], recipe: mf.Recipe) -> None:
        self.stream = np.concatenate(documents)
        self.starts = set(np.cumsum([0, *(len(d) for d in documents[:-1])]).tolist())
        self.recipe, self.rule = recipe, recipe.sequence

    def place(self, epoch: int, index: int, at: int) -> int:
        length = self.rule.length
        shift = key_of(self.recipe.seed, 0, epoch, length) % length if epoch else 0
        return (index * length + shift + at) % len(self.stream)

    def window(self, epoch: int, index: int) -> dict[str, list[Any]]:
        fields: dict[str, list[Any]] = {
            "tokens": [],
            "labels": [],
            "position_ids": [],
            "loss_mask": [],
            "starts": [],
        }
        first = 0
        for at in range(self.rule.length):
            here, after = self.place(epoch, index, at), self.place(epoch, index, at + 1)
            if at and here in self.starts:
                first = at
                fields["starts"].append(at)
            fields["tokens"].append(int(self.stream[here]))
            fields["labels"].append(int(self.stream[after]))
            fields["position_ids"].append(at - first if self.rule.reset_position_ids else at)
            masked = self.rule.eod_mask_loss and after in self.starts
            fields["loss_mask"].append(0.0 if masked else 1.0)
        return fields


def chunks_of(cp: int, rank: int, padded: int, split: str) -> list[int]:
    """The places of a padded window that one cp rank holds, in order."""
    if split == "contiguous" or cp == 1:
        size = padded // cp
        return list(range(rank * size, (rank + 1) * size))
    size = padded // (2 * cp)
    return [c * size + i for c in (rank, 2 * cp - 1 - rank) for i in range(size)]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    rng = np.random.default_rng(3)
    made = [rng.integers(1, 60_000, rng.integers(1, 40)).astype(np.uint16) for _ in range(60)]
    path = tmp_path_factory.mktemp("windows") / "c"
    with IndexedWriter(path, np.uint16) as writer:
        for document in made:
            writer.add_document(document)
    return path, made


@settings(max_examples=cases(50, 1_000), deadline=None)
@given(
    length=st.integers(1, 40),
    options=st.sets(st.sampled_from(OPTIONS)),
    cp=st.integers(1, 8),
    dp=st.integers(1, 3),
    rows=st.integers(1, 3),
    split=st.sampled_from(["zigzag", "contiguous"]),
    sequences=st.integers(1, 12),
    step=st.integers(0, 400),
)
def test_every_field_of_every_rank(
    documents: tuple[Path, list[np.ndarray]],
    length: int,
    options: set[str],
    cp: int,
    dp: int,
    rows: int,
    split: Any,
    sequences: int,
    step: int,
) -> None:
    path, made = documents
    recipe = recipe_of(path, length=length, sequences=sequences, **dict.fromkeys(options, True))
    model = Model(made, recipe)
    multiple = 2 * cp if cp > 1 else 1
    padded = -(-length // multiple) * multiple
    handed: list[tuple[int, int, int, int]] = []
    valid = 0
    layout = mf.Layout(cp=cp, dp=dp)
    for got in mf.simulate(recipe, layout, [step], micro_batch_size=rows, cp_split=split, no_loss="allow"):
        assert got.batch.tokens == sequences * length
        assert got.batch.sum_sq == sequences * length**2
        mine = chunks_of(cp, got.coord.cp, padded, split)
        for microbatch in got.microbatches:
            check_microbatch(model, microbatch, mine, rows, padded)
            if got.coord.cp == 0:
                for row, (epoch, index) in enumerate(zip(microbatch.draws.epoch, microbatch.draws.index)):
                    handed.append((microbatch.index, got.coord.dp, row, int(index)))
                    valid += int(sum(model.window(int(epoch), int(index))["loss_mask"]))
        assert got.batch.plan.num_microbatches == len(got.microbatches)
    assert [index for *_, index in sorted(handed)] == got.batch.draws.index.tolist()
    assert valid == got.batch.valid_tokens


def check_microbatch(
    model: Model, microbatch: mf.Microbatch, mine: list[int], rows: int, padded: int
) -> None:
    length = model.rule.length
    windows = [model.window(int(e), int(i)) for e, i in zip(microbatch.draws.epoch, microbatch.draws.index)]
    for name in ("tokens", "labels", "position_ids", "loss_mask"):
        value = microbatch[name]
        assert value.is_contiguous()
        expected = [[w[name][p] if p < length else 0 for p in mine] for w in windows]
        expected += [[0] * len(mine)] * (rows - len(windows))
        assert value.tolist() == expected, name
    if model.rule.reset_attention_mask:
        bounds = [
            row * padded + at
            for row in range(rows)
            for at in [0, *(windows[row]["starts"] if row < len(windows) else [])]
        ]
        assert microbatch["cu_seqlens"].tolist() == [*bounds, rows * padded]
        assert int(microbatch["max_seqlen"]) == max(np.diff([*bounds, rows * padded]))
    else:
        assert "cu_seqlens" not in microbatch


def test_an_epoch_has_as_many_windows_as_fit_and_the_edges_move(
    documents: tuple[Path, list[np.ndarray]],
) -> None:
    path, made = documents
    stream = np.concatenate(made)
    recipe = recipe_of(path, length=16, sequences=len(stream) // 16)
    seen: list[set[int]] = []
    for step in range(3):
        (got,) = mf.simulate(recipe, mf.Layout(), [step], micro_batch_size=len(stream))
        tokens = got.microbatches[0]["tokens"][: len(stream) // 16]
        assert got.batch.draws.epoch.tolist() == [step] * (len(stream) // 16)
        seen.append({hash(tuple(row)) for row in tokens.tolist()})
    assert len(seen[0]) == len(stream) // 16
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]


def test_a_store_of_less_than_a_window_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", num_tokens=300)
    recipe = recipe_of(tmp_path / "c", length=300)
    with pytest.raises(mf.errors.StoreError, match=r"300 tokens.*need 301"):
        next(iter(mf.Feed(recipe)))
    assert next(iter(mf.Feed(recipe_of(tmp_path / "c", length=299)))).tokens == 16 * 299


def test_a_store_without_a_stream_is_refused() -> None:
    class Pictures(Store):
        fingerprint = "pictures"

        def lengths(self, documents: np.ndarray) -> np.ndarray:
            return np.ones_like(documents)

    with pytest.raises(mf.errors.RecipeError, match="stream of tokens"):
        mf.Windows(8).num_sequences(Pictures())


def store_of(path: Path, made: list[np.ndarray], dtype: type = np.uint16) -> Path:
    with IndexedWriter(path, dtype) as writer:
        for document in made:
            writer.add_document(document)
    return path


@some(5)
@pytest.mark.parametrize("lengths", [[2], [1, 1], [5], [1, 4], [0, 3, 0, 0, 4, 0], [4, 1], [2, 9], [1] * 7])
def test_every_window_of_small_stores(tmp_path: Path, lengths: list[int]) -> None:
    """Every length that fits, every window of six epochs: most of them run round the stream's end."""
    ends = np.cumsum(lengths)
    made = [np.arange(end - size, end) for end, size in zip(ends, lengths)]
    store_of(tmp_path / "c", made)
    total, wrapped = int(ends[-1]), 0
    for length in range(1, total):
        per_epoch = total // length
        recipe = recipe_of(tmp_path / "c", length=length, sequences=per_epoch, **dict.fromkeys(OPTIONS, True))
        model = Model([document for document in made if len(document)], recipe)
        for cp, split in ((1, "zigzag"), (2, "zigzag"), (3, "contiguous")):
            multiple = 2 * cp if cp > 1 else 1
            padded = -(-length // multiple) * multiple
            options = {"micro_batch_size": 2, "cp_split": split, "no_loss": "allow"}
            for got in mf.simulate(recipe, mf.Layout(cp=cp), 6, **options):
                for microbatch in got.microbatches:
                    mine = chunks_of(cp, got.coord.cp, padded, split)
                    check_microbatch(model, microbatch, mine, 2, padded)
        for epoch in range(6):
            windows = [[model.place(epoch, i, at) for at in range(length)] for i in range(per_epoch)]
            wrapped += any(window != sorted(window) for window in windows)
    assert wrapped or total < 5, "some window goes on at token 0"


def test_an_epoch_holds_no_token_twice(tmp_path: Path) -> None:
    """Its windows are disjoint arcs of the ring; what is left over is less than one, and moves."""
    store_of(tmp_path / "c", [np.arange(100), np.arange(100, 1003)])
    for length in (1, 7, 64, 501, 1002):
        per_epoch = 1003 // length
        recipe = recipe_of(tmp_path / "c", length=length, sequences=per_epoch)
        left: set[frozenset[int]] = set()
        firsts: set[int] = set()
        for got in mf.simulate(recipe, mf.Layout(), 6, micro_batch_size=per_epoch):
            (microbatch,) = got.microbatches
            tokens = microbatch["tokens"]
            assert tokens.numel() == len(set(tokens.ravel().tolist())) == per_epoch * length
            assert ((tokens + 1) % 1003 == microbatch["labels"]).all()
            left.add(frozenset(range(1003)) - set(tokens.ravel().tolist()))
            firsts.add(int(tokens[np.argmin(microbatch.draws.index), 0]))
        assert all(len(unread) == 1003 - per_epoch * length for unread in left)
        if length > 50:
            assert len(firsts) >= 4, "each epoch starts elsewhere"
        if 50 < length < 1002:
            assert len(left) >= 4, "each epoch leaves out others"


@settings(max_examples=cases(40, 1_000), deadline=None)
@given(
    length=st.integers(1, 50),
    cp=st.integers(1, 8),
    rows=st.integers(1, 3),
    together=st.integers(1, 4),
    split=st.sampled_from(["zigzag", "contiguous"]),
    step=st.integers(0, 50),
    data=st.data(),
)
def test_one_reader_may_serve_any_ranks_of_its_group(
    documents: tuple[Path, list[np.ndarray]],
    length: int,
    cp: int,
    rows: int,
    together: int,
    split: Any,
    step: int,
    data: st.DataObject,
) -> None:
    """What a reader loads for several cp ranks builds for each of them what it would have read itself."""
    served = data.draw(st.lists(st.integers(0, cp - 1), min_size=1, max_size=cp, unique=True))
    recipe = recipe_of(documents[0], length=length, sequences=7, **dict.fromkeys(OPTIONS, True))
    rule, draws = recipe.sequence, draws_of_step(recipe, step)
    names = [field.name for field in rule.fields]
    plan = plan_fixed(rule.lengths(recipe, draws), dp=1, cp=cp, micro_batch_size=rows)
    with recipe.data:
        for rank in served:

            def portions(group: list[int], rank: int = rank) -> list[Any]:
                return portions_of(
                    plan,
                    draws,
                    plan.lengths,
                    rank,
                    group=group,
                    rows=rows,
                    split=split,
                    together=together,
                    rank_of_dp_cp=np.arange(plan.num_ranks),
                )

            for alone, shared in zip(portions([rank]), portions(served)):
                own = rule.load(recipe, alone, np.empty)
                held = rule.load(recipe, shared, np.empty)
                for portion, columns in ((alone, own), (shared, held)):
                    size = sum(np.asarray(column).nbytes for column in columns.values())
                    assert size == rule.num_bytes(recipe, portion)
                made = rule.build(recipe, alone, own, names, np.empty)
                again = rule.build(recipe, shared, held, names, np.empty)
                assert len(made) == len(again) == len(alone.microbatches)
                for mine, theirs in zip(made, again):
                    assert list(mine) == list(theirs) and set(mine) == set(names)
                    for name in names:
                        assert np.array_equal(mine[name], theirs[name]), name


@settings(max_examples=cases(30, 600), deadline=None)
@given(names=st.sets(st.sampled_from(("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"))))
def test_only_the_fields_that_are_named_are_made(
    documents: tuple[Path, list[np.ndarray]], names: set[str]
) -> None:
    """And those that lengths decide need no columns: a rank between the stages reads nothing."""
    recipe = recipe_of(documents[0], length=30, sequences=4, **dict.fromkeys(OPTIONS, True))
    rule, draws = recipe.sequence, draws_of_step(recipe, 2)
    plan = plan_fixed(rule.lengths(recipe, draws), dp=1, cp=1, micro_batch_size=4)
    (portion,) = portions_of(
        plan,
        draws,
        plan.lengths,
        0,
        group=[0],
        rows=4,
        split="zigzag",
        together=1,
        rank_of_dp_cp=np.arange(1),
    )
    with recipe.data:
        columns = rule.load(recipe, portion, np.empty)
        (full,) = rule.build(recipe, portion, columns, [f.name for f in rule.fields], np.empty)
        (some,) = rule.build(recipe, portion, columns, sorted(names), np.empty)
        expected = names | ({"max_seqlen"} if "cu_seqlens" in names else set())
        assert set(some) == expected
        assert all(np.array_equal(some[name], full[name]) for name in expected)
        free = sorted(names - {"tokens", "labels"})
        (unread,) = rule.build(recipe, portion, None, free, np.empty)
        assert all(np.array_equal(unread[name], full[name]) for name in free)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_tokens_are_whole_numbers_of_any_width(tmp_path: Path, dtype: type) -> None:
    top = min(np.iinfo(dtype).max, 2**40)
    store_of(tmp_path / "c", [np.array([0, 1, top, 3, top - 1, 5, 6], dtype)], dtype)
    (got,) = mf.simulate(recipe_of(tmp_path / "c", length=6, sequences=1), mf.Layout(), 1)
    microbatch = got.microbatches[0]
    assert microbatch["tokens"].tolist() == [[0, 1, top, 3, top - 1, 5]]
    assert microbatch["labels"].tolist() == [[1, top, 3, top - 1, 5, 6]]
    kinds = {name: str(value.dtype) for name, value in microbatch.items()}
    assert kinds == {"tokens": "torch.int64", "labels": "torch.int64", "position_ids": "torch.int64"} | {
        "loss_mask": "torch.float32"
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_store_of_fractions_is_refused(tmp_path: Path, dtype: type) -> None:
    store_of(tmp_path / "c", [np.array([0.5, 1.5, 2.5])], dtype)
    with pytest.raises(mf.errors.RecipeError, match=f"integer tokens.*{np.dtype(dtype).name}"):
        list(mf.simulate(recipe_of(tmp_path / "c", length=1), mf.Layout(), 1))


@settings(max_examples=cases(25, 400), deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 8))
def test_the_last_batch_of_all_is_filled_up_with_rows_of_no_loss(
    documents: tuple[Path, list[np.ndarray]], sequences: int, dp: int, rows: int, cp: int, epochs: int
) -> None:
    path, made = documents
    recipe = recipe_of(path, length=29, sequences=sequences, epochs=epochs, **dict.fromkeys(OPTIONS, True))
    model = Model(made, recipe)
    total = epochs * (len(model.stream) // 29)
    last = (total - 1) // sequences
    padded = -(-29 // (2 * cp)) * 2 * cp if cp > 1 else 29
    real = handed = 0
    got = None
    for got in mf.simulate(recipe, mf.Layout(dp=dp, cp=cp), [last, last + 1], micro_batch_size=rows):
        assert got.batch.step == last, "nothing after the end"
        assert len(got.microbatches) == -(-len(got.batch.draws) // (dp * rows))
        for microbatch in got.microbatches:
            mine = chunks_of(cp, got.coord.cp, padded, "zigzag")
            check_microbatch(model, microbatch, mine, rows, padded)
            real += int(microbatch["loss_mask"].sum())
            handed += len(microbatch.draws)
    assert got is not None
    assert handed == cp * len(got.batch.draws) == cp * (total - last * sequences)
    assert real == got.batch.valid_tokens, "summed over all ranks: the denominator of the loss"


def test_what_each_field_is_declared_as() -> None:
    """Roles and deliveries go by this: what is stored, what is split, and which stage wants it."""
    declared = {field.name: field for field in mf.Windows(8, reset_attention_mask=True).fields}
    assert {name for name, field in declared.items() if field.stored} == {"tokens", "labels"}
    assert {name for name, field in declared.items() if not field.split} == {"cu_seqlens", "max_seqlen"}
    assert {name: field.stages for name, field in declared.items()} == {
        "tokens": ("first", "mtp"),
        "labels": ("last",),
        "loss_mask": ("last",),
        "position_ids": ("all",),
        "cu_seqlens": ("all",),
        "max_seqlen": ("all",),
    }
    assert [field.name for field in mf.Windows(8).fields] == list(declared)[:4]
    assert all(field.pad == 0 for field in declared.values()), "padding bears no loss"
