"""`Feed.at` gives the step that it is asked for, whatever happened before, or an error."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.order import draws_of_step
from soak import cases


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> mf.Recipe:
    path = tmp_path_factory.mktemp("at") / "corpus"
    write_corpus(path)
    return recipe_of(path, sequences=4)


@settings(max_examples=cases(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["at", "at", "run", "loop", "close", "load"]),
            st.integers(-1, 3),
            st.integers(0, 4),
        ),
        max_size=12,
    ),
    st.integers(0, 2),
)
@example([("run", 0, 0), ("loop", 0, 3), ("at", 0, 0)], 0)
@example([("at", 0, 0), ("loop", 0, 2), ("at", 1, 0)], 2)
def test_the_step_that_was_asked_for(
    recipe: mf.Recipe, life: list[tuple[str, int, int]], prefetch: int
) -> None:
    """life: what is done, how far from the step before, and how many of its microbatches, or steps, are taken."""
    layout, step = mf.Layout(), 3
    with mf.Feed(recipe, layout, 0, transport=mf.Transport(prefetch=prefetch)) as feed:
        for what, further, taken in life:
            if what == "close":
                feed.close()
            elif what == "load":
                feed.load_state_dict(feed.state_dict(step))
            elif what == "run":
                run = feed.run(step, layout=layout, rank=0)
                assert [each.index for _, each in zip(range(taken), run)] == [*range(step, step + taken)]
            elif what == "loop":  # of the feed, whatever run it was given
                begins = feed.next_step
                assert [each.index for _, each in zip(range(taken), feed)] == [*range(begins, begins + taken)]
            else:
                step = max(step + further, 0)
                given = feed.at(step, layout, 0)
                assert given.index == step
                drawn = [i for _, m in zip(range(taken), given.microbatches) for i in m.draws.index.tolist()]
                assert drawn == draws_of_step(recipe, step).index.tolist()[: len(drawn)]


@pytest.mark.parametrize("steps", [["2"], [True], [-3], [1.5]])
def test_steps_that_are_none_are_not_left_out(recipe: mf.Recipe, steps: list[object]) -> None:
    with mf.Feed(recipe) as feed, pytest.raises(mf.errors.OptionError, match=r"leave_out=.*numbers of steps"):
        feed.run(0, leave_out=steps)


def test_a_run_that_was_given_goes_on_after_close(recipe: mf.Recipe) -> None:
    with mf.Feed(recipe) as feed:
        run = feed.run(3)
        feed.close()
        assert next(run).index == 3
        assert next(iter(feed)).index == 3  # another loop, which was not given all of step 3
        with pytest.raises(mf.errors.StateError, match="ended this iteration"):
            next(run)
        with pytest.raises(mf.errors.StateError, match="another run or loop of this feed has begun"):
            next(run)
