"""The keyword arguments of a Feed and an Exchange: one signature, one object of options, one description."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import fields
from typing import Any

import pytest

import meshfeed as mf
from meshfeed.feed.options import FeedOptions, Options

KINDS: dict[type, type[Options]] = {mf.Feed: FeedOptions, mf.Exchange: Options}
PACKING = mf.Packing(capacity=16)
RECIPE = mf.Recipe(data=mf.Lengths([8]), sequence=mf.Documents(), batch=1)
FIELDS, LAYOUT = RECIPE.sequence.fields, mf.Layout(tp=2)
OWN_OF_EXCHANGE = {"keys", "pulls", "uneven"}


def keywords_of(kind: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(kind).parameters
    return {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}


def described(kind: type) -> list[str]:
    """The names under `Args:`, in their order."""
    args = re.search(r"\n    Args:\n(.*?)\n\n", kind.__doc__ or "", re.S)
    assert args
    return re.findall(r"^ {8}(\w+): ", args[1], re.M)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signature_names_each_option_with_its_type_and_default(kind: type) -> None:
    keywords, hints = keywords_of(kind), typing.get_type_hints(kind.__init__)
    options: Any = typing.get_type_hints(KINDS[kind])
    names = {each.name for each in fields(KINDS[kind])}
    assert keywords.keys() - OWN_OF_EXCHANGE == names
    required = {name for name, each in keywords.items() if each.default is each.empty}
    assert required == ({"packing"} if kind is mf.Exchange else set())
    assert {name: hints[name] for name in names - required} == {
        name: options[name] for name in names - required
    }


def test_each_option_is_described_once() -> None:
    of_feed, of_exchange = described(mf.Feed), described(mf.Exchange)
    assert of_feed == [*inspect.signature(mf.Feed).parameters], "in the order of the signature"
    there = inspect.signature(mf.Exchange).parameters
    assert of_exchange == [name for name in there if name in of_exchange]
    assert "The other arguments are those of a `Feed`." in (mf.Exchange.__doc__ or "")
    assert there.keys() - set(of_exchange) <= set(of_feed)


@pytest.mark.parametrize(("kind", "given"), [(mf.Feed, [None]), (mf.Exchange, [[]])])
def test_an_unknown_option_is_refused_as_python_does(kind: Any, given: list[Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'prefetches'"):
        kind(*given, packing=PACKING, prefetches=2)


@pytest.mark.parametrize("kind", KINDS)
def test_options_hold_what_was_given(kind: Any) -> None:
    transport = mf.Transport(timeout_s=7, name="second")
    made = kind(RECIPE if kind is mf.Feed else [], packing=PACKING, transport=transport)
    options = made._options
    assert (options.packing, options.transport) == (PACKING, transport)
    others = {name: each.default for name, each in keywords_of(kind).items() if name not in OWN_OF_EXCHANGE}
    kept = {name: getattr(options, name) for name in others.keys() - {"packing", "transport"}}
    assert kept == {name: others[name] for name in kept}
