"""What is known of a sample's parts before one byte of them is read, and what tokens a rule makes of them.

`Expansion` has the places of these tokens, once they have taken those of the placeholders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Floats, Ints, Longs
from meshfeed.errors import RecipeError
from meshfeed.intervals import numbered, numbers_in
from meshfeed.whole import is_whole, settle

V = TypeVar("V", bound=np.generic)

Kind = Literal["image", "audio", "video"]

KINDS: tuple[Kind, ...] = get_args(Kind)


def in_pixels(height: int, width: int) -> str:
    """The size of a picture in words: (255, 237) -> "237 pixels wide x 255 high"."""
    return f"{width} pixels wide x {height} high"


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of some samples, sample after sample, each sample's in the order of its text.

    Attributes:
        kind: index into KINDS; int64 [p].
        height, width: pixels as displayed, so after the turn that EXIF asks for; 0 for audio; int64 [p].
        length: frames of a video, PCM samples of one channel of audio, 1 for an image; int64 [p].
        rate: frames or PCM samples per second; 0 for an image; float64 [p].
        num_bytes: of the part as stored; 0 for the sound track of the video before it, which shares that
            one's bytes; int64 [p].
        at: which token of the sample's text is its placeholder, from 0; ascending in a sample, but that the
            sound track of a video may share that one's; int64 [p].
        starts: where each sample's parts begin, then their end; int64 [samples + 1].
        of_sample: parts of its kind that its sample has, also of a part that is taken alone; int64 [p]. Those
            that are here by default.
    """

    kind: Longs
    height: Longs
    width: Longs
    length: Longs
    rate: Floats
    num_bytes: Longs
    at: Longs
    starts: Longs
    of_sample: Longs = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        if cast(Longs | None, self.of_sample) is None:
            place = self.sample * len(KINDS) + self.kind
            object.__setattr__(self, "of_sample", np.bincount(place)[place])

    @property
    def num_samples(self) -> int:
        """Samples, those without parts too."""
        return self.starts.size - 1

    @cached_property
    def sample(self) -> Longs:
        """The sample of each part; int64 [p]."""
        return np.arange(self.num_samples).repeat(np.diff(self.starts))

    def __len__(self) -> int:
        return self.kind.size

    @cached_property
    def is_track(self) -> Bools:
        """Which parts are the sound track of the video before them, whose bytes are theirs; bool [p]."""
        track, video = self.num_bytes == 0, self.kind == KINDS.index("video")
        track[:1] = False
        track[1:] &= (self.kind[1:] == KINDS.index("audio")) & video[:-1]
        track[1:] &= self.sample[1:] == self.sample[:-1]
        return track

    @cached_property
    def is_within(self) -> Bools:
        """Which of these have no placeholder of their own: their tokens stand among the video's; bool [p]."""
        within = self.is_track.copy()
        within[1:] &= self.at[1:] == self.at[:-1]
        return within

    def of_kind(self, kind: Kind) -> Longs:
        """The places of all parts of a kind, ascending; int64 [k]."""
        return np.flatnonzero(self.kind == KINDS.index(kind))

    def take(self, places: Longs) -> Self:
        """Some parts, ascending, of the same samples; int64 [k]."""
        columns = {
            each.name: getattr(self, each.name)[places] for each in fields(self) if each.name != "starts"
        }
        return replace(self, **columns | {"starts": np.searchsorted(places, self.starts)})

    def of_samples(self, samples: npt.NDArray[np.integer]) -> tuple[Longs, Self]:
        """The parts of some samples, which may repeat: their places here, and the parts."""
        counts = np.diff(self.starts)[samples]
        places, starts = numbers_in(self.starts[samples], counts), np.append(0, counts.cumsum())
        return places, replace(self.take(places), starts=starts)

    def only(self, place: int) -> Self:
        """One part, as a sample of its own."""
        return replace(self.take(np.array([place])), starts=np.array([0, 1]))

    def per_sample(self, values: npt.NDArray[V]) -> npt.NDArray[V]:
        """The sum over the parts of each sample of a value of each part; [samples], the dtype of values."""
        sums = np.zeros(self.num_samples, values.dtype)
        np.add.at(sums, self.sample, values)
        return sums

    @classmethod
    def merged(cls, num_samples: int, several: Sequence[tuple[Longs, Parts]]) -> Self:
        """The parts of samples that come from several places. several: (which samples, their parts)."""
        sample = np.concatenate([which[parts.sample] for which, parts in several])
        order = np.argsort(sample, kind="stable")
        columns = {
            each.name: np.concatenate([getattr(parts, each.name) for _, parts in several])[order]
            for each in fields(cls)
            if each.name != "starts"
        }
        return cls(**columns, starts=np.searchsorted(sample[order], np.arange(num_samples + 1)))

    @classmethod
    def none(cls, num_samples: int) -> Self:
        """Samples without parts."""
        none = np.zeros(0, np.int64)
        starts = np.zeros(num_samples + 1, np.int64)
        return cls(none, none, none, none, np.zeros(0), none, none, starts)

    @classmethod
    def of_images(cls, sizes: Sequence[tuple[int, int]], of_sample: Longs | None = None) -> Self:
        """Samples of one image each, from (height, width): for trying a rule, and for tests."""
        height, width = np.array(sizes, np.int64).reshape(-1, 2).T
        n = height.size
        nothing, one = np.zeros(n, np.int64), np.ones(n, np.int64)
        of_sample = one if of_sample is None else of_sample
        return cls(nothing, height, width, one, np.zeros(n), nothing, nothing, np.arange(n + 1), of_sample)


TokenId = int
"""An option of a rule that names a token; from 0."""
PLACEHOLDER = -1
"""In place of the id of a token: the one that stands for the part in the stored text."""


class Repeat(NamedTuple):
    """A token of a part, repeated.

    Attributes:
        id: of the token, or PLACEHOLDER.
        size: how often it stands there, from 1.
        is_output: whether an encoder makes an output for each.
        kind: of that encoder, as index into KINDS; -1 for the part's own.
    """

    id: int
    size: int = 1
    is_output: bool = False
    kind: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The tokens that parts become, as runs of one token, part after part.

    Attributes:
        runs: of each part; int64 [p].
        ids, sizes: of each run; see `Repeat`; int64 [r] each.
        is_output: of each run, which are in the order of the encoder's outputs; bool [r].
        kinds: of each run of outputs, as index into KINDS; -1 for the part's own; int64 [r].
    """

    runs: Longs
    ids: Longs
    sizes: Longs
    is_output: Bools
    kinds: Longs

    @classmethod
    def of(cls, parts: Iterable[Sequence[Repeat]]) -> Self:
        """Of the runs of each part."""
        made = [np.array(runs, np.int64).reshape(-1, 4) for runs in parts]
        ids, sizes, is_output, kinds = np.concatenate([np.zeros((0, 4), np.int64), *made]).T
        return cls(np.array([len(runs) for runs in made], np.int64), ids, sizes, is_output > 0, kinds)

    @classmethod
    def repeated(cls, tokens: Longs) -> Self:
        """The placeholder of each part, repeated so often, each an output; int64 [p]."""
        one = np.ones_like(tokens)
        return cls(one, one * PLACEHOLDER, tokens, one > 0, -one)

    def __getitem__(self, places: Longs | slice) -> Self:
        """Of some parts, ascending."""
        of = np.isin(self.part, np.arange(self.runs.size)[places])
        return type(self)(self.runs[places], self.ids[of], self.sizes[of], self.is_output[of], self.kinds[of])

    @property
    def names(self) -> Longs:
        """The runs that have an id; int64 [k], ascending."""
        return np.flatnonzero(self.ids != PLACEHOLDER)

    @property
    def part(self) -> Longs:
        """The part of each run; int64 [r]."""
        return np.arange(self.runs.size).repeat(self.runs)

    @property
    def tokens(self) -> Longs:
        """Tokens of each part; int64 [p]."""
        return self._sums(self.sizes)

    @property
    def outputs(self) -> Longs:
        """Outputs of the part's own encoder for each part; int64 [p]."""
        return self.outputs_of(-1)

    def outputs_of(self, kind: int) -> Longs:
        """Outputs of one kind for each part, as index into KINDS, -1 for the part's own; int64 [p]."""
        return self._sums(self.sizes * (self.is_output & (self.kinds == kind)))

    def _sums(self, values: Longs) -> Longs:
        return np.bincount(self.part, values, self.runs.size).astype(np.int64)


class Rope(NamedTuple):
    """Positions of a multimodal rope in the templates of parts.

    Attributes:
        offsets: time, height and width of each token, from where its run begins; int64 [t, 3].
        steps: from where each run begins to where the next one, or what follows the part, does; int64 [r].
    """

    offsets: Longs
    steps: Longs

    @classmethod
    def of_text(cls, template: Template) -> Self:
        """All tokens count on in all three."""
        sizes = template.sizes
        return cls(numbered(sizes)[1][:, None].repeat(3, axis=1), sizes.copy())

    @classmethod
    def of_grids(
        cls, template: Template, rows: Longs, columns: Longs, interval: npt.NDArray[np.float32]
    ) -> Self:
        """Outputs in grids, and what follows them after the longer side; other tokens as text.

        Those of Qwen2-VL (Wang et al. 2024, arXiv 2409.12191): text counts on in all three; an image stands
        still in time, and the grids of a video are an interval apart, rounded down (Bai et al. 2025, arXiv
        2502.13923). rows, columns: of each run of outputs, which is one grid, or several of that size; int64
        twice. interval: see `PartRule`; float32, of each of these runs.
        """
        made, sizes = cls.of_text(template), template.sizes[template.is_output]
        number, wide, tall = numbered(sizes)[1], columns.repeat(sizes), rows.repeat(sizes)
        passed = (number // (wide * tall)).astype(np.float32) * interval.repeat(sizes)
        made.offsets[template.is_output.repeat(template.sizes)] = np.stack(
            (passed.astype(np.int64), number // wide % tall, number % wide), axis=1
        )
        made.steps[template.is_output] = np.maximum(rows, columns)
        return made


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


class PartRule(ABC):
    """What a model family makes of parts of one kind. Implementations are frozen and keep no state.

    Attributes:
        kind: of the parts that it takes.
        alpha: matmul work of a patch over attention work of a pair of patches in the encoder, in patches, as
            `CostModel.alpha` is of the language model; `CostModel.fit` finds it from times.
    """

    kind: Kind
    alpha: float

    @abstractmethod
    def tokens(self, parts: Parts) -> Longs:
        """Tokens of the text that each part becomes, all of its template; int64 [p].

        parts: all of this rule's kind.
        """

    @abstractmethod
    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        """What the encoder attends over: (sequences, patches in each), of each part; int64 [p] twice."""

    def last_patches(self, parts: Parts) -> Longs:
        """Patches in the last sequence of each part; int64 [p]. By default as many as in the others."""
        return self.patches(parts)[1]

    def template(self, parts: Parts) -> Template | None:
        """Which tokens each part becomes. By default None: its placeholder repeated, each an output."""
        return None

    def grid(self, parts: Parts) -> tuple[Longs, Longs] | None:
        """(rows, columns) that the tokens of each run of outputs form, row after row; int64 twice.

        Without a template, each part is such a run; one of a video may be several grids, one after the other
        in time. The positions of a multimodal rope follow it. By default None: the tokens form no grid.
        """
        return None

    def interval(self, parts: Parts) -> npt.NDArray[np.float32]:
        """Positions of a multimodal rope from one grid of a part to its next; float32 [p]. 1 by default."""
        return np.ones(len(parts), np.float32)

    def rope(self, parts: Parts, template: Template) -> Rope | None:
        """Positions of a multimodal rope in the tokens of each part. By default None: those of `grid`.

        template: the tokens, that of `with_sound` or of `template`; `kinds` are those of all outputs.
        """
        return None

    def with_sound(self, parts: Parts, sounds: Longs) -> Template | None:
        """Tokens of videos whose sound stands among theirs; None by default, for a family that has no such.

        sounds: outputs of the sound of each, by its own rule; int64 [p]. They are outputs of kind "audio".
        """
        return None

    def work(self, parts: Parts) -> Floats:
        """Work of the encoder on each part, patches * (patches + alpha) of each sequence; float64 [p]."""
        sequences, patches = self.patches(parts)
        each, last = (
            size.astype(np.float64) * (size + self.alpha) for size in (patches, self.last_patches(parts))
        )
        return sequences * each + (last - each)

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
    """Raises RecipeError for an option of a dataclass that has not its type; numbers are from 1."""
    settle(options)
    for each in fields(options):
        value, kind, wanted = vars(options)[each.name], str(each.type), ""
        if value is None and "None" in kind:
            continue
        if "TokenId" in kind and not _are_ids(value, "tuple" in kind):
            wanted = "ids of tokens, in a tuple" if "tuple" in kind else "the id of a token"
        elif kind == "bool" and type(value) is not bool:
            wanted = "True or False"
        elif kind in ("int", "int | None") and not is_whole(value):
            wanted = "a whole number from 1"
        if wanted:
            raise RecipeError(f"{type(options).__name__}({each.name}={value!r}): {wanted}")


def _are_ids(given: Any, in_tuple: bool) -> bool:
    """Whether it is an id or PLACEHOLDER, or a tuple of such, or of tuples."""
    if in_tuple and isinstance(given, tuple):
        each = cast(tuple[Any, ...], given)
        return all(_are_ids(one, isinstance(one, tuple)) for one in each)
    return not in_tuple and is_whole(given, PLACEHOLDER)


def check_options(rule: PartRule) -> None:
    """Raises RecipeError as `check_counts`, and for an alpha below 0. rule: a dataclass."""
    check_counts(rule)
    if not (np.isfinite(rule.alpha) and rule.alpha >= 0):
        raise RecipeError(f"{type(rule).__name__}(alpha={rule.alpha}): 0 or more")
