"""The positions of parts in the tokens, after each placeholder has become the tokens of its part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Ints, Longs
from meshfeed.intervals import numbers_in
from meshfeed.parts.types import Parts, Rope, Template


@dataclass(frozen=True, eq=False)
class Expansion:
    """Some samples, each placeholder of their text as often as its part has tokens.

    Attributes:
        parts: of the samples.
        tokens: that each part becomes; of one within another's, that one's; int64 [p], from 1.
        text: tokens of each sample as stored, with one placeholder for each part; int64 [samples].
    """

    parts: Parts
    tokens: Longs
    text: Longs

    @cached_property
    def lengths(self) -> Longs:
        """Tokens of each sample, all placeholders repeated; int64 [samples]."""
        return self.text + self.parts.per_sample(self._more)

    @cached_property
    def begins(self) -> Longs:
        """Which token of its sample each part begins at; int64 [p]."""
        before = np.append(0, np.cumsum(self._more))
        first = before[self.parts.starts[:-1]]
        return self.parts.at + before[self.leaders] - first[self.parts.sample]

    @cached_property
    def leaders(self) -> Longs:
        """The part whose placeholder each part has: itself, or the one before it; int64 [p]."""
        return np.arange(len(self.parts)) - self.parts.is_within

    @cached_property
    def _more(self) -> Longs:
        """Tokens that each part adds to the text; int64 [p]."""
        return (self.tokens - 1) * ~self.parts.is_within

    def inside(self, starts: Longs, stops: Longs) -> Longs:
        """Tokens of each part in start..stop of its sample; int64 [samples] twice -> int64 [p]."""
        of = self.parts.sample
        stop = np.minimum(self.begins + self.tokens, stops[of])
        return (stop - np.maximum(self.begins, starts[of])).clip(0)

    def in_text(self, tokens: Longs) -> Longs:
        """Which stored token one token of each sample comes from; int64 [samples] -> int64 [samples].

        The end of a sample is the end of its text.
        """
        of = self.parts.sample
        passed = (tokens[of] - self.begins).clip(0, self._more)
        return tokens - self.parts.per_sample(passed)

    def runs(self, template: Template, places: Longs) -> Longs:
        """Which token of its sample each run begins at; int64 [r]. template: of some parts, at places."""
        before = np.append(0, np.cumsum(template.sizes))
        first = np.append(0, np.cumsum(template.runs))[:-1]
        return before[:-1] + (self.begins[places] - before[first]).repeat(template.runs)

    def put_ids(self, tokens: npt.NDArray[np.integer], template: Template, places: Longs) -> None:
        """Write the ids of some parts, at places, over their placeholders. tokens: [sum(lengths)]."""
        names, sizes = template.names, template.sizes[template.names]
        at = numbers_in(self._all_runs(template, places)[names], sizes)
        tokens[at] = template.ids[names].repeat(sizes)

    def outputs(self, template: Template, places: Longs, kind: int = -1) -> Ints:
        """Which output of an encoder of some parts each token is; -1 for none; int32 [sum(lengths)].

        template: of the parts at places, which ascend; int64 [k]. kind: of its runs that are counted.
        """
        counted = template.is_output & (template.kinds == kind)
        sizes = template.sizes[counted]
        index = np.full(int(self.lengths.sum()), -1, np.int32)
        begins = self._all_runs(template, places)[counted]
        index[numbers_in(begins, sizes)] = np.arange(sizes.sum())
        return index

    def mrope(self, template: Template, rope: Rope) -> Longs:
        """Positions in time, height and width of each token, from 0 in each sample; int64 [sum(lengths), 3].

        Text counts on in all three. template, rope: of all parts.
        """
        lengths, begins = self.lengths, self._all_runs(template, np.arange(len(self.parts)))
        inside = numbers_in(begins, template.sizes)
        steps = np.ones(int(lengths.sum()), np.int64)
        steps[inside] = 0
        steps[begins + template.sizes - 1] = rope.steps
        before = np.append(0, np.cumsum(steps))
        positions = before[:-1] - before[np.cumsum(lengths) - lengths].repeat(lengths)
        positions = positions[:, None].repeat(3, axis=1)
        positions[inside] += rope.offsets
        return positions

    def _all_runs(self, template: Template, places: Longs) -> Longs:
        """As `runs`, among the tokens of all samples."""
        first = np.cumsum(self.lengths) - self.lengths
        return self.runs(template, places) + first[self.parts.sample[places]].repeat(template.runs)

    @cached_property
    def repeats(self) -> Longs:
        """How often each stored token stands there, sample after sample; int64 [sum(text)]."""
        repeats = np.ones(int(self.text.sum()), np.int64)
        repeats[self.placeholders] = self.tokens
        return repeats

    @cached_property
    def placeholders(self) -> Longs:
        """The place of each part's placeholder in the text of all samples; int64 [p], ascending."""
        return (np.cumsum(self.text) - self.text)[self.parts.sample] + self.parts.at
