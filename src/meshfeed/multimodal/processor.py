"""The interface of a processor, which turns the stored bytes of a part into what an encoder takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Allocate, Array, Floats, Longs
from meshfeed.errors import MeshfeedError, RecipeError, StoreError
from meshfeed.parts import KINDS, PLACEHOLDER, PartRule, Parts, Rope, Template
from meshfeed.roles import StageKind


class PartSize(NamedTuple):
    """What the index knows of one part; see `Parts`."""

    height: int
    width: int
    length: int
    rate: float
    of_sample: int = 1

    @classmethod
    def of(cls, parts: Parts, place: int) -> Self:
        """The size of one of some parts."""
        height, width, length = int(parts.height[place]), int(parts.width[place]), int(parts.length[place])
        return cls(height, width, length, float(parts.rate[place]), int(parts.of_sample[place]))

    def as_image(self) -> Parts:
        """The part alone, for what a rule says of an image of its height and width."""
        return Parts.of_images([(self.height, self.width)], np.array([self.of_sample]))

    def as_video(self) -> Parts:
        """The part alone, for what a rule says of a video of its size."""
        image, kind = self.as_image(), np.array([KINDS.index("video")])
        length, rate = np.array([self.length]), np.array([self.rate], np.float64)
        return replace(image, kind=kind, length=length, rate=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartField:
    """What a processor makes of each part: an array [rows, *shape].

    Attributes:
        name: its key in the microbatch, where the rows of all parts of a pack follow each other.
        dtype: NumPy name of its element type.
        shape: of a row.
        stages: kinds of pipeline stage that need it; see `Field`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    stages: tuple[StageKind, ...] = ("first",)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def blank(self, rows: int) -> Array:
        """Rows of zeros."""
        return np.zeros((rows, *self.shape), self.dtype)

    def joined(self, values: Sequence[Array], allocate: Allocate) -> Array:
        """The rows of several parts, one part after the other. values: see `write`."""
        ends = list(accumulate(map(len, values), initial=0))
        out = allocate((ends[-1], *self.shape), self.dtype)
        for begin, end, value in zip(ends, ends[1:], values):
            self.write(value, out[begin:end])
        return out

    def write(self, value: Array, out: Array) -> None:
        """Write the rows of one part. value: the field or, where `Processor.columns` differ, the column."""
        out[...] = value


class Processor(ABC):
    """What a model takes of parts of one kind. Implementations are frozen, keep no state and can be pickled.

    Attributes:
        rule: how many tokens a part becomes, and what it costs the encoder.
    """

    rule: PartRule

    @property
    @abstractmethod
    def fields(self) -> tuple[PartField, ...]:
        """All that it makes of a part."""

    @abstractmethod
    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """Rows of each field for each part, known before it is decoded; name -> int64 [p]."""

    @abstractmethod
    def __call__(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """Decode a part: field -> array. Pure: nothing but its arguments decides.

        data: as stored. rng: keyed by (seed, epoch, index, part) and the source's name, so
        `mf.order.rng(seed, epoch, index, part, recipe.source_keys[source])`; draw from it
        whatever is random. Raise PartError if the part's bytes are at fault: `on_bad` then says what
        becomes of it. The same mean EOFError, an OSError that is not of the system, and of what Pillow
        raises while it reads a file: DecompressionBombError, SyntaxError, ValueError, IndexError,
        OverflowError, struct.error and zlib.error. Any other stops the job, whatever `on_bad` says, such
        as Pillow's TypeError, or its ValueError for a filter that it does not know.
        """

    @property
    def columns(self) -> tuple[PartField, ...]:
        """What travels of a part to the ranks that take it: by default its fields.

        One in another form has the name and rows of its field, whose `write` makes the field of it.
        """
        return self.fields

    def decoded(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """Decode a part: column -> array; see `__call__`."""
        return self(data, size, rng)

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        """What stands for a part that cannot be decoded, by default zeros: field -> array.

        Override it where an array tells sizes that the encoder goes by. rows: of each field.
        """
        return {each.name: each.blank(rows[each.name]) for each in self.fields}

    @abstractmethod
    def num_tokens(self, made: Mapping[str, Array]) -> int:
        """Outputs that the encoder makes of a part, from its columns alone; compared with the rule."""

    def summary(self) -> str:
        """The processor and all its options in one line; part of the fingerprint."""
        return repr(self)


# -- what rules and processors say, checked --------------------------------------------------------------


def check_processor(where: str, given: Any) -> None:
    """Raises RecipeError, with the cure, unless given a processor."""
    if isinstance(given, Processor):
        return
    name = (given if isinstance(given, type) else type(given)).__name__
    what = f"{name}, which is not a meshfeed.multimodal.Processor"
    if isinstance(given, PartRule):
        what = f"{name}, a rule, which counts tokens and decodes nothing"
        cure = f"give the processor that takes it, such as {_OF_RULE.get(name, 'YourProcessor')}({given!r})"
    elif isinstance(given, type) and issubclass(given, Processor):
        what, cure = f"the class {name}", f"give one: {name}()"
    else:
        cure = "give one that ships, such as NativePatches(), or write one: it also declares fields and rows"
    raise RecipeError(f"{where}: {what}; {cure}")


_OF_RULE = {
    "NativeImages": "NativePatches",
    "NativeVideo": "VideoPatches",
    "OmniVideo": "VideoPatches",
    "TimedVideo": "VideoPatches",
    "SecondsVideo": "VideoPatches",
    "FixedVideo": "FixedFrames",
    "NumberedVideo": "FixedFrames",
    "BudgetVideo": "BudgetFrames",
    "RowImages": "RowPatches",
    "BudgetImages": "BudgetPatches",
    "PlacedTiles": "PlacedPixels",
    "FixedImages": "FixedPixels",
    "CroppedImages": "CroppedPixels",
    "TiledImages": "TiledPixels",
    "AnyResImages": "AnyResPixels",
    "WhisperAudio": "WhisperFeatures",
}


def check_rule(processor: Processor) -> None:
    """Raises RecipeError for a processor over a rule that another one takes; a user's rule may fit."""
    processors = [each.__name__ for each in type(processor).__mro__]
    own, rule = next((name for name in processors if name in _OF_RULE.values()), ""), processor.rule
    taken_by = next((_OF_RULE[each.__name__] for each in type(rule).__mro__ if each.__name__ in _OF_RULE), "")
    if own and (taken_by != own if taken_by else not isinstance(rule, PartRule)):
        fit = " or ".join(name for name, of_rule in _OF_RULE.items() if of_rule == own)
        raise RecipeError(
            f"{type(processor).__name__}(rule={rule!r}): give {fit}, or a subclass"
            + (f"; {taken_by} takes the one given" if taken_by else "")
        )


def tokens_of(rule: PartRule, parts: Parts) -> Longs:
    """`rule.tokens`; int64 [p]. Raises RecipeError unless it gives a whole number from 1 for each part."""
    return _counts("tokens", rule.tokens(parts), len(parts), least=1)


def template_of(rule: PartRule, parts: Parts) -> Template:
    """`rule.template`, or what stands for None. Raises RecipeError unless its tokens are the rule's."""
    tokens = tokens_of(rule, parts)
    if (made := rule.template(parts)) is None:
        return Template.repeated(tokens)
    checked = _checked(made, parts)
    if wrong := np.flatnonzero(checked.tokens != tokens).tolist():
        at = wrong[0]
        raise RecipeError(f"template: {checked.tokens[at]} tokens, and `tokens` says {tokens[at]}")
    return checked


def sounding_template_of(rule: PartRule, parts: Parts, sounds: Longs) -> Template:
    """`rule.with_sound`. Raises RecipeError without it, and unless it has the outputs of both."""
    if (made := rule.with_sound(parts, sounds)) is None:
        raise RecipeError(
            "a video with its sound among its tokens, which this rule does not place; give OmniVideo with "
            "the ids of its sound, or prepare the data by --sound-track behind"
        )
    checked, own = _checked(made, parts), outputs_of(rule, parts)
    found = checked.outputs, checked.outputs_of(KINDS.index("audio"))
    if wrong := np.flatnonzero((found[0] != own) | (found[1] != sounds)).tolist():
        at = wrong[0]
        raise RecipeError(
            f"with_sound: {found[0][at]} outputs of video and {found[1][at]} of sound, and their rules say "
            f"{own[at]} and {sounds[at]}"
        )
    return checked


def _checked(made: Template, parts: Parts) -> Template:
    runs, num = _counts("runs of the template", made.runs, len(parts), least=1), int(made.runs.sum())
    sizes = _counts("sizes of the template", made.sizes, num, least=1)
    ids = _counts("ids of the template", made.ids, num, least=PLACEHOLDER)
    kinds = _counts("kinds of the template", made.kinds, num, least=-1)
    checked = Template(runs, ids, sizes, np.array(made.is_output, np.bool_), kinds)
    if checked.is_output.shape != (num,):
        raise RecipeError(f"template: is_output {list(checked.is_output.shape)} for {num} runs; one for each")
    if (checked.outputs < 1).any():
        raise RecipeError(f"template: no output for part {checked.outputs.argmin()}; give each one or more")
    return checked


def outputs_of(rule: PartRule, parts: Parts) -> Longs:
    """Outputs of the encoder for each part; int64 [p]. Raises as `template_of`."""
    return template_of(rule, parts).outputs


def patches_of(rule: PartRule, parts: Parts) -> tuple[Longs, Longs]:
    """`rule.patches`; int64 [p] twice. Raises RecipeError unless it gives whole numbers from 0."""
    sequences, patches = (_counts("patches", each, len(parts), least=0) for each in rule.patches(parts))
    return sequences, patches


def work_of(rule: PartRule, parts: Parts) -> Floats:
    """`rule.work`; float64 [p]. Raises RecipeError unless it gives a number from 0 for each part."""
    work = np.asarray(rule.work(parts), np.float64)
    if work.shape != (len(parts),) or not (np.isfinite(work) & (work >= 0)).all():
        raise RecipeError(_wrong("work", work, len(parts), "number from 0"))
    return work


def grid_of(rule: PartRule, parts: Parts, made: Template) -> tuple[Longs, Longs]:
    """`rule.grid`; int64 [runs] twice. Raises RecipeError unless each run of outputs fills whole grids."""
    if (grid := rule.grid(parts)) is None:
        raise RecipeError("grid: None; a multimodal rope needs the rows and columns of tokens of every part")
    if (made.kinds != KINDS.index(rule.kind)).any():
        raise RecipeError("no rope, which positions='mrope' needs of a video with its sound")
    tokens = made.sizes[made.is_output]
    rows, columns = (_counts("grid", each, tokens.size, least=1) for each in grid)
    cells = rows * columns
    if wrong := np.flatnonzero(tokens % cells if rule.kind == "video" else tokens != cells).tolist():
        at = wrong[0]
        raise RecipeError(f"grid: {rows[at]} x {columns[at]} for {tokens[at]} tokens")
    return rows, columns


def interval_of(rule: PartRule, parts: Parts) -> npt.NDArray[np.float32]:
    """`rule.interval`; float32 [p]. Raises RecipeError unless it gives a number from 0 for each part."""
    interval = np.asarray(rule.interval(parts), np.float32)
    if interval.shape != (len(parts),) or not (np.isfinite(interval) & (interval >= 0)).all():
        raise RecipeError(_wrong("interval", interval, len(parts), "number from 0"))
    return interval


def last_patches_of(rule: PartRule, parts: Parts) -> Longs:
    """`rule.last_patches`; int64 [p]. Raises RecipeError unless it gives whole numbers from 0."""
    return _counts("last_patches", rule.last_patches(parts), len(parts), least=0)


def has_rope(rule: PartRule) -> bool:
    """Whether a rule gives positions of a multimodal rope."""
    none = Parts.none(0)
    return rule.grid(none) is not None or rule.rope(none, Template.of([])) is not None


def rope_of(rule: PartRule, parts: Parts, made: Template) -> Rope:
    """`rule.rope`, or that of its `grid`. Raises RecipeError as `grid_of`, and for other shapes.

    made: their tokens, with the kinds of all outputs.
    """
    if (rope := rule.rope(parts, made)) is None:
        rows, columns = grid_of(rule, parts, made)
        return Rope.of_grids(made, rows, columns, interval_of(rule, parts)[made.part[made.is_output]])
    shapes, wanted = (rope.offsets.shape, rope.steps.shape), ((made.sizes.sum(), 3), made.sizes.shape)
    if shapes != wanted:
        raise RecipeError(f"rope: offsets and steps {shapes}, where {wanted} belong")
    return rope


def rows_of(processor: Processor, parts: Parts) -> dict[str, Longs]:
    """`processor.rows` of each field; name -> int64 [p]. Raises RecipeError unless whole numbers from 0."""
    rows, names = processor.rows(parts), [each.name for each in processor.fields]
    if lacking := [name for name in names if name not in rows]:
        raise RecipeError(f"rows lacks {', '.join(lacking)}; give those of all fields")
    return {name: _counts(f"rows of {name}", rows[name], len(parts), least=0) for name in names}


def named(error: Exception, who: PartRule | Processor, where: str) -> MeshfeedError:
    """What a rule or processor raises for a part, with both names."""
    text = str(error)
    if isinstance(error, StoreError):  # a rule calls a part that it was given alone "part 0"
        return StoreError(where + (text.removeprefix("part 0") if text.startswith("part 0") else f": {text}"))
    why = text if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {text}"
    return RecipeError(f"{where}: {who!r}: {why}")


def _counts(name: str, given: Any, size: int, *, least: int) -> Longs:
    counts = np.asarray(given)
    if counts.shape != (size,) or counts.dtype.kind not in "iu" or (counts < least).any():
        raise RecipeError(_wrong(name, counts, size, f"whole number from {least}"))
    return counts.astype(np.int64)  # a copy: who gives it may write into it


def _wrong(name: str, given: Array, size: int, wanted: str) -> str:
    values = ", ".join(map(str, given.ravel()[:4].tolist()))
    return (
        f"{name}: {given.dtype} {list(given.shape)} ({values}{', ...' * (given.size > 4)}) for {size} parts; "
        f"give each a {wanted}"
    )
