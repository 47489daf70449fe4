"""What a run's page shows of a log: nothing that was long is hidden, whatever shares a cell with it."""

from __future__ import annotations

import html
from dataclasses import replace

import made_up
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.report.history.grid import Grid
from meshfeed.report.history.loop import seconds_of
from meshfeed.report.history.summary import resumes, summary_of
from meshfeed.report.history.waits import longest_of, sentence, stragglers, waits_of, worst_of
from meshfeed.report.words import escape
from meshfeed.text import visible
from soak import cases

READ = made_up.STAGES.index("read")


@settings(max_examples=cases(15, 250), deadline=None)
@given(st.integers(1, 90), st.integers(1, 900), st.integers(1, 900), st.data())
def test_a_single_wait_is_seen_at_any_size(
    num_ranks: int, first: int, second: int, data: st.DataObject
) -> None:
    """In the map, and in the picture of its column's step; before and after a resume."""
    rank = data.draw(st.integers(0, num_ranks - 1))
    step = data.draw(st.integers(0, first + second - 1))
    history = made_up.history(num_ranks, ((0, first), (first, first + second)), spikes={(rank, step): 9.0})
    grid = Grid(history)
    num_rows, num_columns = len(grid.rows), len(grid.columns)
    assert num_rows <= 64 and num_columns * num_rows <= 20_480
    heat = grid.heat([READ])
    row, column = np.unravel_index(int(np.nanargmax(heat["total"])), heat["total"].shape)
    assert (heat["rank"][row, column], heat["step"][row, column]) == (rank, step)
    assert grid.first[column] <= step < grid.stop[column]
    assert rank in grid.ranks[grid.rows[row] : grid.row_stop[row]]
    assert grid.start[column] == (step >= first)
    assert heat["by_stage"][row, column, 0] == pytest.approx(9.0, abs=0.1)
    moments = grid.moments(heat, list(range(len(made_up.STAGES))))
    assert (moments["step"][column], moments["rank"][row, column]) == (step, rank)
    np.testing.assert_array_equal(moments["wait"][row, column], history.ranks[rank].wait[step])


def test_steps_that_nobody_was_given_do_not_count() -> None:
    history = made_up.history(2, ((0, 5), (8, 12)))  # an amendment has skipped three
    assert summary_of(history, waits_of(history))["steps"] == 9


def test_a_step_lasts_from_its_asking_to_the_next() -> None:
    """The waits for it are within it."""
    rank = made_up.history(1, ((0, 5), (5, 8)), spikes={(0, 2): 0.7}).ranks[0]
    seconds = seconds_of(rank)
    assert np.isnan(seconds[[4, 7]]).all(), "nobody asked again"
    assert (np.delete(seconds - rank.wait.sum(axis=1), [4, 7]) >= 0).all()


def test_who_waits_for_others_is_not_named() -> None:
    """Rank 3 is slow to read, and all others wait in deliver for what it sends."""
    history = made_up.history(4, slow={3: 0.3})
    for number in range(3):
        history.ranks[number].wait[:, made_up.STAGES.index("deliver")] += 0.31
    waits = waits_of(history)
    worst, longest = worst_of(waits), longest_of(waits)
    assert worst is not None and longest is not None
    assert (worst.rank, worst.stage, worst.stands_out, worst.others_follow) == (3, "read", True, True)
    assert (longest.rank, longest.stage) == (3, "read")
    assert stragglers(waits).tolist() == [False, False, False, True]
    assert "Look at rank 3" in sentence(waits) and "wait with it" in sentence(waits)
    even = waits_of(made_up.history(4))
    assert not stragglers(even).any() and "hardly kept anybody waiting" in sentence(even)


def test_the_slow_ones_are_named_with_their_host() -> None:
    """Where a run has several: eight ranks each. If all that stand out share one, it is the host that is slow."""
    one = waits_of(made_up.history(16, slow={11: 0.3}))
    worst = worst_of(one)
    assert worst is not None and worst.host == "node0001"
    assert "Look at rank 11 on node0001: it waits" in sentence(one)
    assert "All" not in sentence(one)
    host = sentence(waits_of(made_up.history(24, slow=dict.fromkeys(range(8, 16), 0.3))))
    assert " All 8 ranks that stand out are on node0001." in host
    both = sentence(waits_of(made_up.history(24, slow=dict.fromkeys((3, 9), 0.3))))
    assert "that stand out are" not in both
    assert "Look at rank 3: it waits" in sentence(waits_of(made_up.history(8, slow={3: 0.3})))


def test_ranks_without_a_log_are_told() -> None:
    whole = made_up.history(12, ((0, 4), (4, 8)))
    assert "log" not in resumes(whole)
    first, second = whole.starts
    half = replace(whole, starts=(replace(first, ranks=(0, 1)), replace(second, ranks=tuple(range(11)))))
    assert "ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more of start 1; rank 11 of start 2: their steps" in resumes(
        half
    )


def test_a_stall_of_the_loop_itself_is_told_apart_from_waiting() -> None:
    told = made_up.history(num_ranks=3, spans=((0, 20), (10, 30)), spikes={(1, 25): 50.0})
    for rank in told.ranks.values():
        rank.seconds[:] = np.where(np.isnan(rank.seconds), np.nan, 1.0) + rank.wait.sum(axis=1)
        rank.seconds[26] += 45.0  # the loop is busy with step 16 of the second start
        rank.seconds[0] += 300.0  # and with its first step: not to be told
    told.ranks[2].seconds[26] += 1.0
    outside = summary_of(told, waits_of(told))["outside"]
    assert (outside["rank"], outside["step"]) == (2, 16)
    assert outside["busy_s"] == pytest.approx(47, abs=1e-3)
    assert outside["median_s"] == pytest.approx(1, abs=1e-3)
    none = made_up.history(num_ranks=2, spans=((0, 1),))
    assert summary_of(none, waits_of(none))["outside"] is None


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b\u202e\u2028&<\"'")))
def test_text_on_pages_is_shown_as_in_a_terminal(text: str) -> None:
    assert html.unescape(escape(text)) == visible(text)
