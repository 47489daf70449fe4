"""Sequence rules by name, as installed packages register them; for commands and configuration files."""

from __future__ import annotations

import ast
from typing import Any

from meshfeed.errors import OptionError
from meshfeed.plugins import RULES, loaded, registered
from meshfeed.sequence.rule import SequenceRule


def rule_named(text: str) -> SequenceRule:
    """A rule from text such as "windows(4096, eod_mask_loss=True)" or "documents".

    Names are entry points of the group `meshfeed.rules`; arguments are Python literals. Raises OptionError
    for anything else, RecipeError for arguments that the rule refuses.
    """
    try:
        name, arguments, options = parsed_call(text)
    except ValueError as error:
        raise OptionError(
            f"rule {text!r}: write a name and literal arguments, such as windows(4096); {_known()}"
        ) from error
    points = {point.name: point for point in registered(RULES)}
    if name not in points:
        raise OptionError(f"rule {text!r}: there is no rule {name!r}; {_known()}")
    made = loaded(points[name])
    try:
        rule = made(*arguments, **options)
    except TypeError as error:
        raise OptionError(f"rule {text!r}: {error}") from error
    if not isinstance(rule, SequenceRule):
        raise OptionError(
            f"rule {text!r}: {points[name].value} made {type(rule).__name__}, not a SequenceRule"
        )
    return rule


def parsed_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """(name, arguments, options) of a name, or of a call with literals. Raises ValueError for other text."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(str(error)) from error
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise ValueError("not a call")
    arguments = [ast.literal_eval(each) for each in call.args]
    return call.func.id, arguments, {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def _known() -> str:
    return f"known rules: {', '.join(point.name for point in registered(RULES))}"
