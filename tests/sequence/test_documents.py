"""Documents, packed: against a model of them written in plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.recipe import entered
from meshfeed.store import IndexedStore, IndexedWriter
from soak import cases


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    rng = np.random.default_rng(4)
    sizes = [*rng.integers(0, 30, 40).tolist(), 1, 1, 2, 0, 150, 64]
    documents = [rng.integers(1, 60_000, size).astype(np.uint16) for size in sizes]
    path = tmp_path_factory.mktemp("documents") / "c"
    with IndexedWriter(path, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return path, documents


def chunks_of(cp: int, rank: int, size: int, split: str) -> list[int]:
    if cp == 1:
        return list(range(size))
    if split == "contiguous":
        return list(range(rank * size // cp, (rank + 1) * size // cp))
    part = size // (2 * cp)
    return [c * part + i for c in (rank, 2 * cp - 1 - rank) for i in range(part)]


def places_of(pack: Any, cp: int, rank: int, split: str) -> list[tuple[int, int]]:
    """(sequence, token) of every place that one rank holds of a pack, padding included."""
    padded = np.diff(pack).tolist()
    return [(s, t) for s, n in enumerate(padded) for t in chunks_of(cp, rank, n, split)]


@settings(max_examples=cases(40, 800), deadline=None)
@given(
    policy=st.sampled_from(["in_order", "balanced", "dynamic_cp"]),
    oversize=st.sampled_from(["split", "truncate", "drop"]),
    capacity=st.sampled_from([24, 48, 64, 200]),
    cp=st.integers(1, 3),
    dp=st.integers(1, 3),
    split=st.sampled_from(["zigzag", "contiguous"]),
    sequence=st.sampled_from([1, 2]),
    pack=st.sampled_from([1, 4]),
    max_len=st.sampled_from([None, 20]),
    step=st.integers(0, 8),
)
def test_every_field_of_every_rank(
    corpus: tuple[Path, list[np.ndarray]],
    policy: Any,
    oversize: Any,
    capacity: int,
    cp: int,
    dp: int,
    split: Any,
    sequence: int,
    pack: int,
    max_len: int | None,
    step: int,
) -> None:
    path, documents = corpus
    recipe = mf.Recipe(
        data=mf.open(path), sequence=mf.Documents(max_len), batch=mf.Batch(sequences=12), seed=3
    )
    packing = mf.Packing(
        capacity=capacity, policy=policy, oversize=oversize, align=mf.Align(sequence=sequence, pack=pack)
    )
    layout = mf.Layout(dp=dp, cp=cp)
    seen: set[tuple[int, int]] = set()
    valid = 0
    for got in mf.simulate(recipe, layout, [step], packing=packing, cp_split=split, no_loss="allow"):
        plan, draws = got.batch.plan, got.batch.draws
        assert len(got.microbatches) == plan.num_microbatches
        for m in got.microbatches:
            assert got.rank in m.cp_ranks
            assert m.cp_ranks[m.cp_rank] == got.rank
            padded = m["cu_seqlens_padded"].numpy()
            places = places_of(padded, m.cp_size, m.cp_rank, split)
            assert m["tokens"].shape == (1, len(places))
            assert len(places) <= capacity
            assert int(m["max_seqlen"]) == np.diff(padded).max()
            rows = rows_of(plan, got.coord.dp * cp + got.coord.cp, m)
            assert m["cu_seqlens"].tolist() == [
                0,
                *np.cumsum([plan.lengths[r] for r in rows] or [0]).tolist(),
            ]
            names = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
            expected: dict[str, list[Any]] = {name: [] for name in names}
            for s, t in places:
                real = s < len(rows) and t < plan.lengths[rows[s]]
                document = documents[draws.index[plan.sequence[rows[s]]]][:max_len] if rows else []
                at = int(plan.start[rows[s]]) + t if rows else 0
                last = at + 1 >= len(document)
                expected["tokens"].append(int(document[at]) if real else 0)
                expected["labels"].append(int(document[at + 1]) if real and not last else 0)
                expected["loss_mask"].append(float(real and not last))
                expected["position_ids"].append(t if real else 0)
                expected["padding_mask"].append(not real)
                if real:
                    token = (int(plan.sequence[rows[s]]), at)
                    assert token not in seen, "each token on one rank"
                    seen.add(token)
                    valid += not last
            for name, values in expected.items():
                assert m[name][0].tolist() == values, name
    assert valid == got.batch.valid_tokens
    assert len(seen) == got.batch.tokens


def rows_of(plan: Any, dp_cp_rank: int, m: mf.Microbatch) -> list[int]:
    """The plan's rows that a rank has in a microbatch, by the plan's arrays alone."""
    last = plan.first_rank + plan.cp_size
    inside = (plan.first_rank <= dp_cp_rank) & (dp_cp_rank < last) & (plan.microbatch == m.index)
    return np.flatnonzero(inside).tolist()


def test_each_document_of_a_source_is_a_sequence(
    corpus: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    path, documents = corpus
    with IndexedWriter(tmp_path / "other", np.uint16) as writer:
        for document in documents:
            writer.add_document(document[:1])
    data = mf.Mixture({"other": (mf.open(tmp_path / "other"), 1), "c": (mf.open(path), 1)})
    recipe, some = mf.Recipe(data, mf.Documents(), 4), np.array([5, 0, 3])
    for source, sizes in enumerate(([min(len(each), 1) for each in documents], list(map(len, documents)))):
        with entered(recipe):
            found = mf.Documents().sequences_with(recipe, source, 1, some)
        assert found.document.tolist() == [0, 1, 2] and found.sequence.tolist() == some.tolist()
        assert found.begin.tolist() == [0, 0, 0] and found.end.tolist() == [sizes[at] for at in some]


class Asked(IndexedStore):
    """Notes what is asked of its index."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.asked: list[int] = []

    def extents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(documents.size)
        return super().extents(documents)

    def offsets(self, documents: np.ndarray) -> np.ndarray:
        raise AssertionError("asked once more")


@pytest.mark.parametrize("max_len", [None, 20])
def test_a_step_looks_its_documents_up_once(
    corpus: tuple[Path, list[np.ndarray]], max_len: int | None
) -> None:
    store = Asked(str(corpus[0]))
    recipe = mf.Recipe(data=store, sequence=mf.Documents(max_len), batch=mf.Batch(sequences=12), steps=3)
    with mf.Feed(recipe, packing=mf.Packing(capacity=200), transport=mf.Transport(prefetch=0)) as feed:
        for step in feed:
            for microbatch in step.microbatches:
                assert microbatch["tokens"].shape == microbatch["labels"].shape
    assert store.asked == [12] * 3


def test_a_store_with_lengths_of_its_own_is_asked_for_them(corpus: tuple[Path, list[np.ndarray]]) -> None:
    class Cut(IndexedStore):
        def lengths(self, documents: np.ndarray) -> np.ndarray:
            return np.minimum(super().lengths(documents), 5)

    path, documents = corpus
    recipe = mf.Recipe(
        data=Cut(path), sequence=mf.Documents(), batch=len(documents), epochs=1, shuffle="none"
    )
    with mf.Feed(recipe, packing=mf.Packing(capacity=512)) as feed:
        plan = next(iter(feed)).plan
    got = plan.lengths[np.argsort(plan.sequence)]
    np.testing.assert_array_equal(got, [min(each.size, 5) for each in documents])


def test_fractions_are_no_tokens(tmp_path: Path) -> None:
    """They would be cut off to whole numbers without a word."""
    with mf.IndexedWriter(tmp_path / "c", "f4") as writer:
        writer.add_document(np.array([1.5, 2.5], np.float32))
    store = mf.open(tmp_path / "c")
    for rule in (mf.Documents(), mf.Windows(1), mf.Masked(4, vocab_size=9, mask_token=3)):
        with pytest.raises(RecipeError, match=r"needs integer tokens; .* holds float32"):
            rule.num_sequences(store)
