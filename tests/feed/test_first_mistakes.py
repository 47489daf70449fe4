"""What goes wrong on the first day is refused by an error that says what to write instead."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
from corpus import recipe_of, write_corpus
from user_datasets import Fatal, never, samples_recipe

STORE = mf.Lengths(np.full(64, 8))
ROWS = mf.Recipe(data=mf.Mapped(Fatal(8, -1, never)), sequence=mf.Samples("x"), batch=mf.Batch(sequences=4))
PACKED = mf.Recipe(data=STORE, sequence=mf.Documents(), batch=mf.Batch(sequences=4))
PACKING = mf.Packing(capacity=16)


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index**2


def recipe_with(**wrong: Any) -> mf.Recipe:
    given: Any = {"data": STORE, "sequence": mf.Documents(), "batch": mf.Batch(sequences=4), **wrong}
    return mf.Recipe(**given)


def in_first_step(use: Callable[[mf.Step], Any]) -> Any:
    with mf.Feed(ROWS, micro_batch_size=2) as feed:
        return use(next(iter(feed)))


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (
            lambda: mf.Feed(Squares()),
            mf.errors.OptionError,
            r"takes a mf\.Recipe, not a Squares; .*mf\.Mapped\(mf\.Same",
        ),
        (lambda: mf.Feed([1, 2]), mf.errors.OptionError, r"not a list; .*mf\.Samples"),
        (lambda: mf.Feed(STORE), mf.errors.OptionError, r"not a \w+; for a store: mf\.Recipe\(data=store"),
        (lambda: mf.Feed("corpus"), mf.errors.OptionError, r"not a str; .*mf\.open\('corpus'\)"),
        (
            lambda: recipe_with(data="corpus"),
            mf.errors.RecipeError,
            r"data='corpus': .*; here mf\.open\('corpus'\)",
        ),
        (
            lambda: recipe_with(data=Squares()),
            mf.errors.RecipeError,
            r"data=.*mf\.Mapped\(mf\.SameEveryEpoch",
        ),
        (lambda: recipe_with(data=[{"x": 1}] * 999), mf.errors.RecipeError, r"^.{0,300}$"),
        (lambda: recipe_with(batch="16"), mf.errors.RecipeError, r"batch='16': give a mf\.Batch"),
        (lambda: recipe_with(batch=True), mf.errors.RecipeError, r"batch=True: give a mf\.Batch"),
        (lambda: recipe_with(batch=0), mf.errors.RecipeError, r"Batch\(sequences=0\): a whole number from 1"),
        (lambda: mf.Batch(True), mf.errors.RecipeError, r"Batch\(sequences=True\): a whole number from 1"),
        (lambda: len(mf.Feed(ROWS)), TypeError, "feed.num_steps has the number of its steps"),
        (lambda: mf.Feed(ROWS)[0], TypeError, "it gives steps in order.*load_state_dict"),
        (lambda: len(mf.Exchange([], packing=PACKING)), TypeError, "when its iterators have ended"),
        (
            lambda: next(iter(torch.utils.data.DataLoader(mf.Feed(ROWS), batch_size=None))),
            TypeError,
            "It is its own loader: iterate it in the process that trains, without a DataLoader",
        ),
        (lambda: torch.utils.data.DataLoader(mf.Feed(ROWS), shuffle=True), TypeError, "without a DataLoader"),
        (
            lambda: mf.Feed(ROWS).load_state_dict("{}"),
            mf.errors.StateError,
            r"is text; .*json\.loads\(text\)",
        ),
        (
            lambda: mf.Feed(ROWS).load_state_dict({}),
            mf.errors.StateError,
            "not 'meshfeed' alone",
        ),
        (lambda: mf.Feed(ROWS).load_state_dict(None), mf.errors.StateError, "the state is a NoneType"),
        (
            lambda: mf.Exchange([], packing=PACKING).load_state_dict({}),
            mf.errors.StateError,
            "not 'meshfeed' alone",
        ),
        (
            lambda: mf.Feed(PACKED, packing=PACKING, micro_batch_size=2),
            mf.errors.OptionError,
            "^micro_batch_size=2 with a packing",
        ),
        (
            lambda: mf.Feed(PACKED, packing=PACKING, pad_rows=True),
            mf.errors.OptionError,
            "^pad_rows=True with a packing",
        ),
        (
            lambda: recipe_with(sequence=64),
            mf.errors.RecipeError,
            r"sequence=64: give a rule, such as mf\.Windows",
        ),
        (lambda: mf.Feed(PACKED, packing=16), mf.errors.OptionError, "packing is an int, 16; give a Packing"),
        (lambda: mf.Feed(ROWS, verify="no"), mf.errors.OptionError, "verify is a str, 'no'; give a bool"),
        (lambda: mf.Feed(ROWS, pad_rows=1), mf.errors.OptionError, "pad_rows is an int, 1; give a bool"),
        (
            lambda: mf.Exchange([], packing=PACKING, verify="no"),
            mf.errors.OptionError,
            "verify is a str, 'no'; give a bool",
        ),
        (
            lambda: mf.Feed(ROWS, metrics="runs/7"),
            mf.errors.MetricsError,
            r"metrics='runs/7' is not a sink; .*RunLog",
        ),
        (
            lambda: mf.Mapped(iter([1])),
            mf.errors.StoreError,
            "no length or no items; .*not its loader or iterator",
        ),
        (
            lambda: mf.Mixture({"a": "corpus"}),
            mf.errors.RecipeError,
            "'a' is new: give .store, amount.*mf.open.*, not a str",
        ),
        (lambda: mf.open("corpus", vocab_size=7), TypeError, r"^open\(\) got an unexpected .*'vocab_size'"),
        (
            lambda: next(mf.simulate(ROWS, "dp2", 1)),
            mf.errors.LayoutError,
            r"layout='dp2' .*mf\.Layout\.parse\('dp2'\)",
        ),
        (
            lambda: next(mf.simulate(STORE, mf.Layout(), 1)),
            mf.errors.OptionError,
            r"simulate takes a mf\.Recipe, not a L",
        ),
        (lambda: mf.Documents("64"), mf.errors.RecipeError, r"Documents\(max_len='64'\): at least one token"),
        (
            lambda: mf.StageMap(pp="2"),
            mf.errors.LayoutError,
            r"StageMap\(pp='2', vpp=1\): each is a whole number from 1",
        ),
        (
            lambda: in_first_step(lambda step: step["x"]),
            TypeError,
            r"a Step has no items.*: microbatch\['x'\]",
        ),
        (
            lambda: in_first_step(lambda step: next(step.microbatches).tokens),
            AttributeError,
            "a Microbatch has no attribute 'tokens'$",
        ),
        (
            lambda: in_first_step(lambda step: next(step.microbatches).x),
            AttributeError,
            r"it is a mapping: microbatch\['x'\]",
        ),
        (lambda: mf.open(None), mf.errors.OptionError, r"mf.open\(None\): give a path"),
        (lambda: mf.Feed(None), mf.errors.OptionError, r"not a NoneType"),
        (
            lambda: mf.Machine(workers=-1),
            mf.errors.OptionError,
            r"workers=-1\): give a whole number, 0 or more",
        ),
        (
            lambda: mf.Machine(item_timeout_s=0),
            mf.errors.OptionError,
            r"item_timeout_s=0\): give seconds, more than 0",
        ),
        (lambda: mf.Feed(ROWS, machine=8), mf.errors.OptionError, r"machine=8: give a mf\.Machine"),
        (
            lambda: mf.Feed(ROWS, transport="share"),
            mf.errors.OptionError,
            "transport is a str, 'share'; give a Transport",
        ),
        (lambda: mf.Transport(readers="shared"), mf.errors.OptionError, "readers='shared': give ranks"),
        (lambda: mf.Mixture([STORE]), mf.errors.RecipeError, r"takes a dict, not a list: .*\(store, 0\.7\)"),
        (
            lambda: mf.Feed(ROWS, micro_batch_size=0),
            mf.errors.OptionError,
            "micro_batch_size=0: give a whole number, 1",
        ),
        (lambda: mf.Feed(ROWS, micro_batch_size=2.5), mf.errors.OptionError, r"micro_batch_size=2\.5"),
        (lambda: mf.Feed(ROWS, micro_batch_size="2"), mf.errors.OptionError, "micro_batch_size='2'"),
        (lambda: mf.Feed(ROWS, micro_batch_size=True), mf.errors.OptionError, "micro_batch_size=True"),
        (
            lambda: mf.Feed(ROWS, transport=mf.Transport(timeout_s=float("nan"))),
            mf.errors.OptionError,
            "timeout_s=nan: give seconds",
        ),
        (
            lambda: mf.Feed(ROWS, transport=mf.Transport(timeout_s=float("inf"))),
            mf.errors.OptionError,
            "timeout_s=inf",
        ),
        (
            lambda: mf.Feed(ROWS, transport=mf.Transport(timeout_s="9")),
            mf.errors.OptionError,
            "timeout_s='9'",
        ),
        (
            lambda: mf.Feed(PACKED, packing=PACKING, micro_batch_size=2),
            mf.errors.OptionError,
            "micro_batch_size=2 with a packing, which makes the microbatches itself",
        ),
        (
            lambda: mf.Feed(PACKED, packing=PACKING, pad_rows=True),
            mf.errors.OptionError,
            "pad_rows=True with a packing",
        ),
        (
            lambda: pickle.dumps(mf.Feed(ROWS)),
            mf.errors.StateError,
            "a Feed cannot be pickled or copied: .*state_dict",
        ),
        (lambda: copy.deepcopy(mf.Feed(ROWS)), mf.errors.StateError, "make one in each process"),
    ],
)
def test_a_first_mistake_is_told_what_to_write(
    make: Callable[[], Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        make()


def test_an_open_feed_is_not_pickled() -> None:
    with mf.Feed(PACKED, packing=PACKING) as feed:
        next(iter(feed))
        with pytest.raises(mf.errors.StateError, match="cannot be pickled"):
            pickle.dumps(feed)


def test_a_batch_that_changes_at_a_resume_is_told_of_then(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    state = mf.State(recipe=recipe_of(tmp_path / "c", sequences=16).summary(until=5), step=5).to_json()
    with pytest.raises(
        mf.errors.StateError, match=r"(?s)saved 'sequences=16', now 'sequences=32'.*Batch.*\.then\(step"
    ):
        mf.Feed(recipe_of(tmp_path / "c", sequences=32)).load_state_dict(state)


def test_an_option_error_is_one_class_for_all() -> None:
    """Those who caught what was raised before still catch it."""
    assert issubclass(mf.errors.OptionError, mf.errors.RecipeError) and issubclass(
        mf.errors.OptionError, mf.errors.StoreError
    )


GO_ON = threading.Event()


def waiting() -> Any:
    GO_ON.wait(60)


def test_a_dataset_that_hangs_is_not_called_storage() -> None:
    """The run waits as long as it is to; then it names who is late."""
    recipe = samples_recipe(Fatal(8, 0, never), "x")
    machine = mf.Machine(workers=1, item_timeout_s=60)
    with (
        mf.Feed(recipe, machine=machine, transport=mf.Transport(timeout_s=0.2)) as feed,
        pytest.raises(mf.errors.DeliveryError) as late,
    ):
        for step in feed:
            list(step.microbatches)
    assert "Mapped(Fatal, 8 items) has not returned it; check what the dataset does" in str(late.value)
    given = (each for each in iter(waiting, None))
    with mf.Exchange(given, packing=PACKING, transport=mf.Transport(prefetch=1, timeout_s=0.2)) as exchange:
        with pytest.raises(mf.errors.DeliveryError, match="its own iterator has not returned it"):
            next(iter(exchange))
        GO_ON.set()


# -- what they look like ---------------------------------------------------------------------------


def test_recipes_feeds_and_steps_say_what_they_are(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    recipe = recipe_of(tmp_path / "c", epochs=1)
    assert "Windows(length=64" in repr(recipe) and "batch=Batch(sequences=16), seed=5, epochs=1" in repr(
        recipe
    )
    ramp = mf.Batch(sequences=4, last="drop").then(9, 8)
    assert repr(ramp) == "Batch(sequences=4, last='drop').then(9, 8)"
    with mf.Feed(recipe) as feed:
        assert repr(feed) == f"Feed({recipe!r}, None, at step 0)"
        step = next(iter(feed))
        assert repr(step) == "Step(0, 16 microbatches, 1024 tokens of the global batch, 1024 bear loss)"


def test_equal_recipes_are_equal(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    one, same, seeded = (recipe_of(tmp_path / "c", seed=seed, steps=9) for seed in (5, 5, 6))
    assert one == same and hash(one) == hash(same) and one != seeded
    more, fewer = (recipe_of(tmp_path / "c", seed=5, steps=steps) for steps in (10, 8))
    assert one not in (more, fewer, "a recipe") and more != one != fewer
    assert len({one, same, seeded}) == 2
    assert [step.index for step in mf.Feed(same)] == [step.index for step in mf.Feed(one)] == list(range(9))


def test_a_batch_is_a_number_too() -> None:
    assert mf.Batch(8) == mf.Batch(sequences=8)
    given, whole = recipe_with(batch=8), recipe_with(batch=mf.Batch(sequences=8))
    assert given == whole and given.fingerprint == whole.fingerprint and given.batch == mf.Batch(8)


def test_a_feed_is_true_and_a_list_of_its_steps_is_one() -> None:
    with mf.Feed(recipe_with(epochs=1, steps=2), packing=PACKING) as feed:
        assert feed and len(list(feed)) == feed.num_steps == 2


def test_a_state_of_another_mixture_or_batch_says_how_to_change_it() -> None:
    def recipe_of_shares(share: float, batch: int = 4) -> mf.Recipe:
        return recipe_with(data=mf.Mixture({"a": (STORE, share), "b": (STORE, 0.5)}), batch=batch)

    state = mf.State(recipe=recipe_of_shares(0.5).summary(until=3), step=3).to_json()
    feed = mf.Feed(recipe_of_shares(0.25, 8), packing=PACKING)
    with pytest.raises(
        mf.errors.StateError, match=r"Batch\(\.\.\.\)\.then\(step.*Mixture\(\.\.\.\)\.then\(step"
    ):
        feed.load_state_dict(state)


def test_the_package_tells_its_version() -> None:
    from importlib.metadata import version

    assert mf.__version__ == version("meshfeed")


def test_microbatches_are_counted_before_and_after_they_are_taken() -> None:
    assert in_first_step(lambda step: (len(step.microbatches), len([*step.microbatches]))) == (2, 2)
    assert in_first_step(lambda step: ([*step.microbatches], len(step.microbatches))[1]) == 2


@pytest.mark.parametrize(
    ("batch", "epochs"), [(mf.Batch(65, last="drop"), 1), (mf.Batch(tokens=1_000, last="drop"), 1)]
)
def test_a_stream_without_a_step_is_refused(batch: mf.Batch, epochs: int) -> None:
    """Before, the loop trained nothing, and ended well."""
    with pytest.raises(mf.errors.RecipeError, match=r"no step: .* which last='drop' drops"):
        next(iter(mf.Feed(recipe_with(batch=batch, epochs=epochs), packing=PACKING)))


def test_a_step_that_is_left_out_has_no_microbatches() -> None:
    """Nor is it refused where its rows would not fill a microbatch."""
    recipe = recipe_with(sequence=mf.Windows(8), batch=mf.Batch(10), epochs=1)
    amended = recipe.amended([(0, mf.amendments.SkipSteps(6, 7)), (0, mf.amendments.SkipSteps(1, 2))])
    with mf.Feed(amended, micro_batch_size=5) as feed:
        assert [feed.num_microbatches(step) for step in range(8)] == [2, 0, 2, 2, 2, 2, 0, 0]
        assert [step.index for step in feed] == [0, 2, 3, 4, 5]
    with pytest.raises(mf.errors.OptionError, match="step 6, the last"):
        next(iter(mf.Feed(recipe, micro_batch_size=5)))


def test_amounts_of_any_library() -> None:
    """The same mixture as of Python's numbers."""

    def made(kind: Callable[[Any], Any], by: Any) -> str:
        given = {"a": (STORE, kind(2)), "b": (STORE, kind(1))}
        return mf.Mixture(given, by=by).then(9, {"a": kind(3)}, by=by).summary()

    for by in ("proportion", "repeat", "count"):
        assert made(np.int64, by) == made(torch.tensor, by) == made(int, by)
        assert by == "count" or made(np.float32, by) == made(float, by)
    for wrong in (True, np.bool_(1), "1", np.array([1, 2]), float("nan"), -1):
        with pytest.raises(mf.errors.RecipeError):
            mf.Mixture({"a": (STORE, wrong)})


def test_stages_are_added_by_then() -> None:
    with pytest.raises(mf.errors.RecipeError, match="by `then`"):
        mf.Batch(8, stages=((5, 3),))
