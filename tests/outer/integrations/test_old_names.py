"""Old names of arguments, which warn for one version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import meshfeed.parts
import meshfeed.plan
from meshfeed.integrations import loader, megatron
from meshfeed.report import loads

RECIPE = mf.Recipe(data=mf.Lengths(np.ones(8, int)), sequence=mf.Documents(), batch=1)
SAYS = "loading= is called readers= now"


@pytest.mark.parametrize(
    "made",
    [megatron.SequencePacking, lambda **given: megatron.DatasetsProvider(train=RECIPE, **given)],
)
def test_loading_is_called_readers(made: Callable[..., Any]) -> None:
    with pytest.warns(DeprecationWarning, match=SAYS) as warned:
        assert made(loading="replicated")._readers == made(readers="replicated")._readers == "replicated"
    assert [each.filename for each in warned] == [__file__], "the line that has the old name"


@pytest.mark.parametrize("function", [megatron.feed, megatron.is_reader, megatron.readers])
def test_so_it_is_of_functions(function: Any) -> None:
    assert "readers" in inspect.signature(function).parameters
    with pytest.warns(DeprecationWarning, match=SAYS), pytest.raises(TypeError):
        function(loading="shared", no_such_option=1)


def test_reads_reaches_a_feed_through_an_adapter() -> None:
    loader.check_feed_options("DataModule()", {"reads": [0]})
    with (
        pytest.warns(DeprecationWarning, match="reads= is called readers= now"),
        pytest.raises(mf.LayoutError, match="no process groups"),
    ):
        megatron.feed(RECIPE, reads=[0], no_such_option=1)


def test_the_layout_of_megatron_is_found_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "layout", lambda groups, ranks_per_node: (groups, ranks_per_node))
    with pytest.warns(DeprecationWarning, match=r"from_megatron is .*\.megatron\.layout now") as warned:
        assert mf.Layout.from_megatron("groups", ranks_per_node=2) == ("groups", 2)
    assert [each.filename for each in warned] == [__file__], "the line that has the old name"


def test_processors_are_found_where_they_were() -> None:
    with pytest.warns(DeprecationWarning, match="is meshfeed.processors.NativePatches now") as warned:
        from meshfeed.sequence import NativePatches  # pyright: ignore[reportAttributeAccessIssue]
    assert NativePatches is mf.processors.NativePatches
    with pytest.warns(DeprecationWarning, match="is meshfeed.processors.NativeImages now"):
        assert meshfeed.parts.NativeImages is mf.processors.NativeImages
    assert {each.filename for each in warned} == {__file__}, "the line that has the old name"
    with pytest.raises(AttributeError, match="has no attribute 'Patches'"):
        _ = mf.sequence.Patches


def test_so_are_the_loads_of_a_plan() -> None:
    with pytest.warns(DeprecationWarning, match=r"plan\.loads_of is meshfeed\.report\.loads\.loads_of now"):
        assert meshfeed.plan.loads_of is loads.loads_of
    with pytest.warns(DeprecationWarning, match=r"plan\.Load is meshfeed\.report\.loads\.Load now"):
        from meshfeed.plan import Load  # pyright: ignore[reportAttributeAccessIssue]
    assert Load is loads.Load


def test_the_type_of_readers_has_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"megatron\.Loading is \S+\.megatron\.Readers now") as warned:
        assert megatron.Loading is megatron.Readers
    assert [each.filename for each in warned] == [__file__], "the line that has the old name"
    with pytest.raises(AttributeError, match="has no attribute 'Reads'"):
        _ = megatron.Reads


@pytest.mark.parametrize(
    ("name", "package"), [("WandB", mf.sinks), ("Telemetry", mf.sinks), ("read_run", mf.report)]
)
def test_so_are_sinks_and_readers(name: str, package: Any) -> None:
    with pytest.warns(DeprecationWarning, match=rf"metrics\.{name} is {package.__name__}\.{name} now"):
        assert getattr(mf.metrics, name) is getattr(package, name)
