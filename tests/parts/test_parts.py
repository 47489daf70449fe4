"""What an index knows of parts, and rules for them under the kind that they take."""

from __future__ import annotations

import numpy as np
import pytest

from meshfeed.errors import RecipeError
from meshfeed.parts import Parts, check_rules
from pictures import Pixels


def test_parts_of_samples() -> None:
    parts = Parts.of_images([(10, 20), (30, 40), (50, 60)])
    some = parts.take(np.array([0, 2]))
    assert len(some) == 2 and some.num_samples == 3 and some.sample.tolist() == [0, 2]
    assert some.per_sample(some.width).tolist() == [20, 0, 60]
    assert parts.of_kind("image").tolist() == [0, 1, 2] and parts.of_kind("audio").size == 0


def test_a_rule_stands_under_its_own_kind() -> None:
    check_rules({"image": Pixels()})
    with pytest.raises(RecipeError, match="for parts of kind 'image', not 'audio'"):
        check_rules({"audio": Pixels()})
