"""Megatron's --step-batch-size-schedule as a Batch, against what its calculator does sample by sample."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.integrations.megatron import batch_of_schedule
from soak import cases


@settings(max_examples=cases(100), deadline=None)
@given(
    st.integers(1, 30),
    st.lists(
        st.tuples(st.integers(1, 5_000), st.integers(1, 30)), max_size=4, unique_by=lambda each: each[0] // 10
    ),
    st.sampled_from([None, 10]),
)
def test_a_step_has_the_size_of_the_last_threshold_consumed(
    first: int, later: list[tuple[int, int]], seq_length: int | None
) -> None:
    text = ", ".join(f"{at}:{size}" for at, size in [*later, (0, first)])
    if any(at // (seq_length or 1) == 0 for at, _ in later):
        return  # refused, as in Megatron
    batch, consumed = batch_of_schedule(text, seq_length), 0
    for step in range(300):
        reached = [each for each in sorted([(0, first), *later]) if each[0] // (seq_length or 1) <= consumed]
        assert batch.position(step) == consumed and batch.size(step) == reached[-1][1]
        consumed += reached[-1][1]


def test_numbers_are_written_as_for_megatron() -> None:
    batch = batch_of_schedule("0:768 250B:1.5k 500e9:3072", seq_length=4096)
    expected = mf.Batch(768)
    for tokens, size in ((250e9, 1500), (5e11, 3072)):
        data = mf.Lengths([5000])
        rows = mf.Recipe(data=data, sequence=mf.Windows(4096), batch=expected)
        expected = expected.then(mf.step_at(rows, tokens), size)
    recipe = mf.Recipe(data=mf.Lengths([100_000]), sequence=mf.Windows(4096), batch=expected)
    assert batch.stages == recipe.batch.stages
    assert [size for _, size in batch.stages] == [768, 1500, 3072]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("", "thresholds are 0"),
        ("5:8", "thresholds are 0"),
        ("0:8 9:16 9:32", "each once"),
        ("0:8 9", "'9' is not THRESHOLD:SIZE"),
        ("0:8 3x:9", "'3x' is no number"),
        ("0:8 inf:9", "'inf' is no number"),
        ("0:-8", "Batch.*-8"),
        ("0:0", r"Batch\(sequences=0\)"),
    ],
)
def test_what_megatron_refuses_is_refused(schedule: str, message: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=message):
        batch_of_schedule(schedule)
