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
from meshfeed.order import key_of
from meshfeed.store import IndexedWriter

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


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    options=st.sets(st.sampled_from(OPTIONS)),
    cp=st.integers(1, 5),
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
    for got in mf.simulate(recipe, layout, [step], micro_batch_size=rows, cp_split=split):
        assert got.batch.tokens == sequences * length
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
    with pytest.raises(mf.StoreError, match=r"300 tokens.*need 301"):
        next(iter(mf.Feed(recipe)))
    assert next(iter(mf.Feed(recipe_of(tmp_path / "c", length=299)))).tokens == 16 * 299


def test_a_store_without_a_stream_is_refused() -> None:
    class Pictures:
        fingerprint = "pictures"

        def lengths(self, documents: np.ndarray) -> np.ndarray:
            return np.ones_like(documents)

    with pytest.raises(mf.RecipeError, match="stream of tokens"):
        mf.Windows(8).num_sequences(Pictures())
