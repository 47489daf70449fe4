"""The positions of parts in the tokens, after each placeholder is repeated for each token of its part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshfeed.intervals import numbered, numbers_in
from meshfeed.parts.types import Longs, Parts


@dataclass(frozen=True, eq=False)
class Expansion:
    """Some samples, each placeholder of their text repeated.

    Attributes:
        parts: of the samples.
        tokens: that each part becomes; int64 [p], from 1.
        text: tokens of each sample as stored, with one placeholder for each part; int64 [samples].
    """

    parts: Parts
    tokens: Longs
    text: Longs

    @cached_property
    def lengths(self) -> Longs:
        """Tokens of each sample, all placeholders repeated; int64 [samples]."""
        return self.text + self.parts.per_sample(self.tokens - 1)

    @cached_property
    def begins(self) -> Longs:
        """Which token of its sample each part begins at; int64 [p]."""
        before = np.append(0, np.cumsum(self.tokens - 1))
        first = before[self.parts.starts[:-1]]
        return self.parts.at + before[:-1] - first[self.parts.sample]

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
        passed = (tokens[of] - self.begins).clip(0, self.tokens - 1)
        return tokens - self.parts.per_sample(passed)

    def outputs(self, places: Longs) -> npt.NDArray[np.int32]:
        """Which output of an encoder of some parts each token is; -1 for none; int32 [sum(lengths)].

        places: of the parts, ascending; int64 [k].
        """
        tokens, first = self.tokens[places], np.cumsum(self.lengths) - self.lengths
        begins = first[self.parts.sample[places]] + self.begins[places]
        index = np.full(int(self.lengths.sum()), -1, np.int32)
        index[numbers_in(begins, tokens)] = np.arange(tokens.sum())
        return index

    def mrope(self, rows: Longs, columns: Longs) -> Longs:
        """Positions in time, height and width of each token, from 0 in each sample; int64 [sum(lengths), 3].

        Those of Qwen2-VL (Wang et al. 2024, arXiv 2409.12191) for images: text counts on in all three; an
        image stands still in time, and what follows it comes after the longer side of its grid.
        rows, columns: of each part's tokens; int64 [p] twice.
        """
        steps = np.ones(int(self.text.sum()), np.int64)
        steps[self.placeholders] = np.maximum(rows, columns)
        ends = np.append(0, np.cumsum(steps))
        before = ends[np.cumsum(self.text) - self.text]
        positions = (ends[:-1] - before.repeat(self.text)).repeat(self.repeats)[:, None].repeat(3, axis=1)
        of_part = np.flatnonzero(self.outputs(np.arange(len(self.parts))) >= 0)
        _, number = numbered(self.tokens)
        wide = columns.repeat(self.tokens)
        positions[of_part, 1] += number // wide
        positions[of_part, 2] += number % wide
        return positions

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
