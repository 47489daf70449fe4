"""Samples -> tokens, with a placeholder for each part, and the parts' sizes."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshfeed.arrays import Array
from meshfeed.errors import PrepareError, StoreError
from meshfeed.files.url import without_secrets
from meshfeed.formats.tokens import Where
from meshfeed.parts import KINDS, Kind, Parts
from meshfeed.parts.store import rows_of
from meshfeed.prepare.encoding.chat import ChatEncoder, Chats
from meshfeed.prepare.encoding.part_headers import MOST_PIXELS, Size, size_of, track_of
from meshfeed.prepare.encoding.text import Text, TextColumn, TextEncoder, absolute
from meshfeed.prepare.inputs.conversation import Conversation
from meshfeed.prepare.inputs.samples import Sample, SampleColumns, SamplePart

SoundTrack = Literal["behind", "within"]

PART_DTYPES: Mapping[str, np.dtype[Any]] = {
    "num_parts": np.dtype(np.int64),
    "part_bytes": np.dtype(np.int64),
    "part_sizes": np.dtype(np.float64),
    "parts": np.dtype(np.uint8),
}
"""Further columns of documents with parts: parts of each, bytes of each part, their sizes as
`parts.store` has them, and all bytes back to back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """Text or chats with images, audio and video.

    Attributes:
        text: how the text becomes tokens; its tokenizer knows the placeholders.
        tokens: kind -> placeholder of a part, such as {"image": "<|image_pad|>"}. A PartRule later decides
            how often it is repeated.
        around: kind -> text for a part, with its placeholder in it, such as
            {"image": "<|vision_start|><|image_pad|><|vision_end|>"}; by default the placeholder alone. In
            chats, the template prints it.
        sound_track: makes the sound track of each video a part: "behind", whose placeholder follows the
            video's; "within", whose tokens stand among the video's, so that both share one. None leaves it
            out.
        silent: whether videos without a sound track are taken under `sound_track`, as they are.
        max_pixels: height times width of an image or frame, at most.
        part_columns: further columns that hold parts: name -> kind, such as {"jpg": "image"}.
        folder: base of the paths of parts in JSON lines and Parquet, or its URL; None for the file's own.
    """

    text: Text | Chats
    tokens: Mapping[Kind, str]
    around: Mapping[Kind, str] | None = None
    sound_track: SoundTrack | None = None
    silent: bool = False
    max_pixels: int = MOST_PIXELS
    folder: str | None = None
    part_columns: Mapping[str, Kind] = field(default_factory=dict[str, Kind])

    @property
    def train_bpe(self) -> int | None:
        return self.text.train_bpe

    @property
    def columns(self) -> SampleColumns:
        """How records are read."""
        ignore = tuple(self.text.ignore) if isinstance(self.text, Chats) else ()
        is_chat, more = isinstance(self.text, Chats), dict(self.part_columns)
        return SampleColumns(is_chat, self.text.column, ignore, self.folder, more)

    def request(self) -> dict[str, Any]:
        """Everything that decides the output, as JSON values. Raises StoreError, PrepareError."""
        return {
            "kind": "multimodal",
            "digest": self.encoder().digest,
            "text": self.text.request(),
            "tokens": dict(sorted(self.tokens.items())),
            "around": dict(sorted((self.around or {}).items())),
            "sound_track": self.sound_track,
            "silent": self.silent,
            "max_pixels": self.max_pixels,
            "folder": absolute(self.folder),
            "part_columns": dict(sorted(self.part_columns.items())),
        }

    def encoder(self, trained: Path | None = None) -> MultimodalEncoder:
        """The encoder. Raises PrepareError for a placeholder that the tokenizer does not know."""
        if self.text.tokenizer is None:
            raise PrepareError("--multimodal: give --tokenizer, one that knows the placeholders")
        if not self.tokens:
            raise PrepareError("--multimodal: name the token that stands for an image: --image-token TOKEN")
        if self.folder is not None and without_secrets(self.folder) != self.folder:
            raise PrepareError("--parts-folder: leave password and query out of it; set them by environment")
        if self.sound_track == "behind" and "audio" not in self.tokens:
            raise PrepareError("--sound-track: name the token that stands for sound: --audio-token TOKEN")
        if self.sound_track is not None and "video" not in self.tokens:
            raise PrepareError("--sound-track: name the token that stands for a video: --video-token TOKEN")
        if self.silent and self.sound_track is None:
            raise PrepareError("--silent: needs --sound-track")
        around = self.around or {}
        if around and isinstance(self.text, Chats):
            raise PrepareError(
                "--image-text: in chats, the template says what is around an image; leave it out"
            )
        for kind, text in around.items():
            if kind not in self.tokens or text.count(self.tokens[kind]) != 1:
                raise PrepareError(
                    f"--{kind}-text {text!r}: must have --{kind}-token in it once, with text around it"
                )
        made = self.text.encoder()
        column = TextColumn(self.text.column, self.text.tokenizer)
        ids: dict[Kind, int] = {}
        for kind, token in self.tokens.items():
            found = column.encoder.id_of(token)
            if found is None or found not in column.encoder.encode([token])[0]:
                raise PrepareError(
                    f"{self.text.tokenizer}: has no token {token!r} that it sees in a text (--{kind}-token); "
                    f"add it to the tokenizer, a JSON file of `tokenizers`"
                )
            ids[kind] = found
        if len({*ids.values()}) < len(ids):
            raise PrepareError(f"{self.tokens}: parts of two kinds have the same token; give each its own")
        return MultimodalEncoder(self, made, column, ids)


@dataclass(frozen=True)
class MultimodalEncoder:
    """Makes tokens and part sizes of samples.

    Attributes:
        how: that it was made of.
        inner: makes tokens of the text.
        column: its tokenizer.
        ids: placeholder of each kind.
    """

    how: Multimodal
    inner: TextEncoder | ChatEncoder
    column: TextColumn
    ids: Mapping[Kind, int]

    @property
    def columns(self) -> Mapping[str, np.dtype[Any]]:
        """Of the tokens, and of a chat's loss mask: name -> dtype."""
        return self.inner.columns

    @property
    def beside(self) -> Mapping[str, np.dtype[Any]]:
        return PART_DTYPES

    @property
    def digest(self) -> str:
        text = json.dumps([self.inner.digest, sorted(self.ids.items())])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self, values: Sequence[Sample], where: Where) -> list[Mapping[str, Array]]:
        """Each sample's columns and parts. Raises StoreError, naming `where`, for a sample that is none."""
        return self._encoded(values, lambda i: ": ".join(each for each in (where(i), values[i].name) if each))

    def _encoded(self, values: Sequence[Sample], where: Where) -> list[Mapping[str, Array]]:
        sizes = [self._sizes(sample, where(i)) for i, sample in enumerate(values)]
        if self.how.sound_track is not None:
            both = [self._with_tracks(*each, where(i)) for i, each in enumerate(zip(values, sizes))]
            values, sizes = [sample for sample, _ in both], [some for _, some in both]
        encode = self._chats if isinstance(self.inner, ChatEncoder) else self._texts
        found: list[Mapping[str, Array]] = []
        for i, (sample, some, columns) in enumerate(zip(values, sizes, encode(values, where))):
            at = np.flatnonzero(np.isin(columns["tokens"], list(self.ids.values())))
            there = columns["tokens"][at].tolist()
            is_placed = [self._is_placed(part) for part in sample.parts]
            placed = [each for each, is_one in zip(some, is_placed) if is_one]
            if there != [self.ids[each.kind] for each in placed]:
                cure = "its text spells a placeholder: remove it"
                if isinstance(self.inner, ChatEncoder):
                    cure = "give a chat template that prints one for each image"
                raise StoreError(
                    f"{where(i)}: {len(there)} placeholders in its tokens, and {len(placed)} parts; {cure}"
                )
            at = at[np.cumsum(is_placed, dtype=np.int64) - 1]
            found.append(columns | _columns_of(sample.parts, some, at))
        return found

    def _sizes(self, sample: Sample, where: str) -> list[Size]:
        found: list[Size] = []
        for k, part in enumerate(sample.parts):
            try:
                size = size_of(part.data, self.how.max_pixels)
            except StoreError as error:
                raise StoreError(f"{where}: part {k} ({part.kind}): {error}") from error
            if size.kind != part.kind:
                raise StoreError(f"{where}: part {k}: {size.kind}, but the record says {part.kind}")
            if size.kind not in self.ids:
                raise StoreError(
                    f"{where}: part {k}: {size.kind}; say which token stands for it: --{size.kind}-token"
                )
            found.append(size)
        return found

    def _with_tracks(self, sample: Sample, sizes: Sequence[Size], where: str) -> tuple[Sample, list[Size]]:
        """The sample with the sound track of each video as a part behind it, and its place in the text."""
        parts, found, tracks = list[SamplePart](), list[Size](), list[bool]()
        for k, (part, size) in enumerate(zip(sample.parts, sizes)):
            parts, found = [*parts, part], [*found, size]
            try:
                track = track_of(part.data) if size.kind == "video" else None
            except StoreError as error:
                raise StoreError(f"{where}: part {k} (video): {error}") from error
            if size.kind == "video" and track is None and not self.how.silent:
                raise StoreError(
                    f"{where}: part {k}: a video without a sound track; leave it out, or take such videos as "
                    f"they are by --silent"
                )
            tracks.append(track is not None)
            if track is not None:
                parts, found = [*parts, SamplePart("audio", b"")], [*found, track]
        if self.how.sound_track == "within":
            text = sample.text
        elif isinstance(sample.text, Conversation):
            text = sample.text.with_behind({"type": "audio"} if each else None for each in tracks)
        else:
            has_track = iter(tracks)
            pieces = ([each, *[None] * (each is None and next(has_track))] for each in sample.text)
            text = tuple(itertools.chain.from_iterable(pieces))
        return replace(sample, text=text, parts=tuple(parts)), found

    def _is_placed(self, part: SamplePart) -> bool:
        """Whether a part has a placeholder of its own."""
        return len(part.data) > 0 or self.how.sound_track == "behind"

    def _chats(self, values: Sequence[Sample], where: Where) -> list[dict[str, Array]]:
        found: list[dict[str, Array]] = []
        for columns in self.inner.encode([sample.text for sample in values], where):
            tokens, mask = columns["tokens"], columns["loss_mask"]
            # A model never predicts a placeholder, even in a message of the assistant.
            found.append({"tokens": tokens, "loss_mask": mask * ~np.isin(tokens, list(self.ids.values()))})
        return found

    def _texts(self, values: Sequence[Sample], where: Where) -> list[dict[str, Array]]:
        """Each text with its placeholders in it as a whole, as the models' processors encode it."""
        end, dtype = getattr(self.inner, "end", None), self.columns["tokens"]
        found = self.column.encoded([*map(self._spelled, values)], where)
        last = [] if end is None else [end]
        return [{"tokens": np.concatenate((each, last), dtype=dtype, casting="unsafe")} for each in found]

    def _spelled(self, sample: Sample) -> str:
        parts, around = filter(self._is_placed, sample.parts), {**self.how.tokens, **(self.how.around or {})}
        return "".join(around[next(parts).kind] if each is None else each for each in sample.text)


def _columns_of(parts: Sequence[SamplePart], sizes: Sequence[Size], at: Array) -> dict[str, Array]:
    """The columns of PART_DTYPES of one document."""
    num_bytes = np.array([len(each.data) for each in parts], np.int64)
    found = Parts(
        kind=np.array([KINDS.index(each.kind) for each in sizes], np.int64),
        height=np.array([each.height for each in sizes], np.int64),
        width=np.array([each.width for each in sizes], np.int64),
        length=np.array([each.length for each in sizes], np.int64),
        rate=np.array([each.rate for each in sizes], np.float64),
        num_bytes=num_bytes,
        at=at,
        starts=np.array([0, len(parts)]),
    )
    return {
        "num_parts": np.array([len(parts)]),
        "part_bytes": num_bytes,
        "part_sizes": rows_of(found).ravel(),
        "parts": np.frombuffer(b"".join(each.data for each in parts), np.uint8),
    }
