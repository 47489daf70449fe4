"""The laws of a sequence rule, on every rule of ours, and on rules that break each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed.datasets.mapped import NUMBERS
from meshfeed.errors import PlanError
from meshfeed.testing import assert_rule
from user_datasets import Rich


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rules") / "text"
    write_corpus(path, num_tokens=8_000)
    return str(path)


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rules") / "chat"
    random = np.random.default_rng(5)
    with mf.DatasetWriter(str(path), {"tokens": "uint16", "loss_mask": "uint8"}) as writer:
        for size in random.integers(1, 60, 64).tolist():
            ids, mask = random.integers(0, 999, size), random.integers(0, 2, size)
            writer.add_document(tokens=ids, loss_mask=mask)
    return str(path)


OF_TOKENS: list[Any] = [
    mf.Windows(33),
    mf.Windows(32, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True),
    mf.Documents(),
    mf.Documents(max_len=9),
    mf.Masked(24, vocab_size=999, mask_token=7, first_token=1, last_token=2, crop="random"),
]


@pytest.mark.parametrize("rule", OF_TOKENS, ids=repr)
def test_our_rules_of_tokens(rule: Any, tokens: str) -> None:
    assert_rule(rule, mf.open(tokens))


@pytest.mark.parametrize("rule", [mf.Documents(), mf.Chat(), mf.Windows(16)], ids=repr)
def test_our_rules_of_columns(rule: Any, columns: str) -> None:
    assert_rule(rule, mf.open(columns))


IDS = mf.Field(name="ids", dtype="int32", split=True)


@pytest.mark.parametrize("packed", [False, True])
def test_our_rule_of_samples(packed: bool) -> None:
    rule = mf.Samples(IDS if packed else "ids", "image", "caption", "score", packed=packed)
    assert_rule(rule, mf.Mapped(Rich(), lengths=Rich().lengths()))


class OfOneType:
    """Items of numbers of a type, from all over it."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, np.ndarray]:
        rng, size = mf.order.rng(1, at.epoch, at.index), 3 + at.index
        if self.dtype.kind in "iu":
            most = np.iinfo(self.dtype)
            return {"x": rng.integers(most.min, most.max, size, self.dtype, endpoint=True)}
        values = rng.standard_normal(size) * (1j if self.dtype.kind == "c" else 1) + 0.25
        return {"x": (values > 0 if self.dtype.kind == "b" else values).astype(self.dtype)}


def test_samples_of_each_type_of_numbers() -> None:
    for dtype in sorted(NUMBERS):
        rule = mf.Samples(mf.Field(name="x", dtype=dtype, split=True, pad=1), packed=True)
        assert_rule(rule, mf.Mapped(OfOneType(dtype), lengths=3 + np.arange(16)), steps=1)


class LongerElsewhere(mf.Documents):
    """Says something else in another process."""

    def __reduce__(self) -> Any:
        return mf.Documents, (3,)


class Miscounting(mf.Windows):
    def valid_tokens(self, *args: Any) -> Any:
        return super().valid_tokens(*args) + 1


class MiscountsPieces(mf.Documents):
    """Each sequence lacks a label, and so its last piece alone."""

    def valid_tokens(self, recipe: Any, draws: Any, starts: Any, lengths: Any) -> Any:
        return np.maximum(lengths - 1, 0)


class RefusesPieces(mf.Documents):
    def valid_tokens(self, recipe: Any, draws: Any, starts: Any, lengths: Any) -> Any:
        if starts.any():
            raise PlanError("whole documents only")
        return super().valid_tokens(recipe, draws, starts, lengths)


class OtherTypes(mf.Windows):
    def build(self, *args: Any) -> Any:
        made = super().build(*args)
        return [{name: np.asarray(value, np.float64) for name, value in each.items()} for each in made]


class KeepsMemory(mf.Documents):
    def build(self, recipe: Any, portion: Any, columns: Any, names: Any, allocate: Any) -> Any:
        made = super().build(recipe, portion, columns, names, allocate)
        if columns is not None:
            whole = columns["tokens"].astype(np.int64, copy=columns["tokens"].dtype != np.int64)
            made[0]["max_seqlen"] = columns["tokens"][:1].view(np.uint16)[0:1] if whole.size else whole
        return made


class OnlyItsOwn(mf.Documents):
    """Takes what was read for its own, as is right with one reader per rank."""

    def build(self, recipe: Any, portion: Any, columns: Any, names: Any, allocate: Any) -> Any:
        made = super().build(recipe, portion, columns, names, allocate)
        if columns is not None:
            size = made[0]["tokens"].size
            made[0]["tokens"] = np.resize(columns["tokens"], (1, size)).astype(np.int64)
        return made


class NeedsColumns(mf.Windows):
    def build(self, recipe: Any, portion: Any, columns: Any, names: Any, allocate: Any) -> Any:
        made = super().build(recipe, portion, columns, names, allocate)
        if columns is None:
            made[0]["position_ids"] = made[0]["position_ids"] + 1
        return made


class LacksLabels(mf.Windows):
    def build(self, *args: Any) -> Any:
        made = super().build(*args)
        made[0].pop("labels", None)
        return made


class KeepsExcluded(mf.Documents):
    def without(self, recipe: Any, draws: Any, excluded: Any) -> Any:
        return self.look_up(recipe, draws)


def test_a_rule_that_refuses_pieces(tokens: str) -> None:
    assert_rule(RefusesPieces(), mf.open(tokens))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (LongerElsewhere(), "pickled copy"),
        (KeepsExcluded(), "tokens that bear loss, all documents left out"),
        (Miscounting(32), "valid_tokens, and nonzero loss_mask"),
        (MiscountsPieces(), "valid_tokens, and nonzero loss_mask"),
        (OtherTypes(32), "dtype of tokens: .*int64.*float64"),
        (KeepsMemory(), "columns were overwritten"),
        (OnlyItsOwn(), "one reader holds"),
        (NeedsColumns(32), "built without columns"),
        (LacksLabels(32), "fields that are declared"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_that_breaks_a_law_is_named(rule: Any, message: str, tokens: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_rule(rule, mf.open(tokens))
