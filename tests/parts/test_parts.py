"""What an index knows of parts, and rules for them under the kind that they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshfeed.errors import RecipeError
from meshfeed.multimodal.processor import template_of
from meshfeed.parts import PLACEHOLDER, Expansion, Parts, Repeat, Rope, Template, check_rules
from pictures import Pixels
from soak import SEED, cases


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


def test_templates_in_samples_token_by_token() -> None:
    """Ids, outputs and positions, against a loop over runs."""
    rng = np.random.default_rng(SEED)
    for _ in range(cases(40)):
        counts, texts = rng.integers(0, 4, 5), rng.integers(4, 9, 5)
        at = np.concatenate([np.sort(rng.choice(text, n, replace=False)) for text, n in zip(texts, counts)])
        parts = replace(
            Parts.of_images([(1, 1)] * int(counts.sum())), at=at, starts=np.append(0, np.cumsum(counts))
        )
        grids = [[tuple(rng.integers(1, 4, 2).tolist()) for _ in range(rng.integers(1, 4))] for _ in at]
        runs = [
            [
                run
                for rows, columns in each
                for run in (Repeat(50, int(rng.integers(1, 3))), Repeat(PLACEHOLDER, rows * columns, True))
            ]
            for each in grids
        ]
        template = Template.of(runs)
        whole = Expansion(parts, template.tokens, texts)
        tokens, index, positions = [], [], []
        output = part = 0
        for sample, text in enumerate(texts.tolist()):
            begin = 0
            for k in range(text):
                if k not in at[parts.sample == sample].tolist():
                    tokens, index = [*tokens, 7], [*index, -1]
                    positions, begin = [*positions, [begin] * 3], begin + 1
                    continue
                grid = iter(grids[part])
                for run in runs[part]:
                    tokens += [run.id if run.id >= 0 else 7] * run.size
                    if run.is_output:
                        rows, columns = next(grid)
                        positions += [
                            [begin, begin + i // columns, begin + i % columns] for i in range(run.size)
                        ]
                        index += range(output, output + run.size)
                        output, begin = output + run.size, begin + max(rows, columns)
                    else:
                        positions += [[begin + i] * 3 for i in range(run.size)]
                        index, begin = index + [-1] * run.size, begin + run.size
                part += 1
        every = np.arange(len(parts))
        mine = np.full(len(tokens), 7)
        whole.put_ids(mine, template, every)
        assert mine.tolist() == tokens and whole.outputs(template, every).tolist() == index
        rows, columns = np.array([each for some in grids for each in some], int).reshape(-1, 2).T
        still = np.ones(rows.size, np.float32)
        rope = Rope.of_grids(template, rows, columns, still)
        assert whole.mrope(template, rope).tolist() == positions
        some = every[rng.random(every.size) < 0.5]
        found = whole.outputs(Template.of([runs[i] for i in some]), some)
        assert (found >= 0).sum() == found.max(initial=-1) + 1 == sum(template.outputs[some])


class Framed(Pixels):
    def template(self, parts: Parts) -> Template | None:
        return self.made

    made: Any = None


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([[Repeat(PLACEHOLDER, 3, True)], []], "runs of the template: .* whole number from 1"),
        ([[Repeat(PLACEHOLDER, 3, True)]], "runs of the template: .* for 2 parts"),
        ([[Repeat(-2, 3, True)], [Repeat(5, 2, True)]], "ids of the template: .* whole number from -1"),
        (
            [[Repeat(5, 0), Repeat(5, 3, True)], [Repeat(5, 2, True)]],
            "sizes of the template: .* whole number from 1",
        ),
        ([[Repeat(5, 3, True)], [Repeat(5, 2)]], "no output for part 1"),
        ([[Repeat(5, 3, True)], [Repeat(5, 3, True)]], "template: 3 tokens, and `tokens` says 2"),
    ],
)
def test_other_templates_are_refused(runs: Any, said: str) -> None:
    rule = Framed()
    object.__setattr__(rule, "made", Template.of(runs))
    with pytest.raises(RecipeError, match=said):
        template_of(rule, Parts.of_images([(3, 1), (2, 1)]))
