"""The interface of a part rule: what parts of one kind cost the encoder, and the language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError
from meshfeed.parts.types import KINDS, Kind, Longs, Parts


class PartRule(ABC):
    """What a model family makes of parts of one kind. Implementations are frozen and keep no state.

    Attributes:
        kind: of the parts that it takes.
        alpha: matmul work of a patch over attention work of a pair of patches in the encoder, in patches, as
            `CostModel.alpha` is of the language model; from `meshfeed calibrate`.
    """

    kind: Kind
    alpha: float

    @abstractmethod
    def tokens(self, parts: Parts) -> Longs:
        """Tokens of the text that each part becomes: how often its placeholder is repeated; int64 [p].

        parts: all of this rule's kind.
        """

    @abstractmethod
    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        """What the encoder attends over: (sequences, patches in each), of each part; int64 [p] twice."""

    def grid(self, parts: Parts) -> tuple[Longs, Longs] | None:
        """(rows, columns) that the tokens of each part form, row after row; int64 [p] twice.

        The positions of a multimodal rope follow it. By default None: the tokens form no grid.
        """
        return None

    def work(self, parts: Parts) -> npt.NDArray[np.float64]:
        """Work of the encoder on each part, `sequences * patches * (patches + alpha)`; float64 [p]."""
        sequences, patches = self.patches(parts)
        return sequences * (patches.astype(np.float64) * (patches + self.alpha))

    def summary(self) -> str:
        """The rule and all its options in one line; part of the fingerprint."""
        return repr(self)


Rules = Mapping[Kind, PartRule]


def check_rules(rules: Rules) -> None:
    """Raises RecipeError for a rule under another kind than its own, or a kind that does not exist."""
    for kind, rule in rules.items():
        if kind not in KINDS:
            raise RecipeError(f"parts of kind {kind!r}: choose from {', '.join(KINDS)}")
        if rule.kind != kind:
            raise RecipeError(f"{rule!r} is for parts of kind {rule.kind!r}, not {kind!r}; name it so")


def check_counts(options: Any) -> None:
    """Raises RecipeError unless all options of a dataclass that are int are whole numbers from 1."""
    for each in fields(options):
        value = vars(options)[each.name]
        is_count = each.type == "int" or (each.type == "int | None" and value is not None)
        if is_count and (type(value) is not int or value < 1):
            raise RecipeError(f"{type(options).__name__}({each.name}={value!r}): a whole number from 1")


def check_options(rule: PartRule) -> None:
    """Raises RecipeError as `check_counts`, and for an alpha below 0. rule: a dataclass."""
    check_counts(rule)
    if not (np.isfinite(rule.alpha) and rule.alpha >= 0):
        raise RecipeError(f"{type(rule).__name__}(alpha={rule.alpha}): 0 or more")
