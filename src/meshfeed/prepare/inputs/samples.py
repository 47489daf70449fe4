"""Records of images, audio, video and text -> samples: text with its parts, in order.

The conventions of the field, by the keys that a record has:

    text, caption          text; <image>, <audio> and <video> mark the parts, else they come first
    texts with images      interleaved documents, as in OBELICS: at each position, one of both is null
    messages, conversations   chats: role and content, or from and value; content is text with <image>, or a
                           list of {"type": "text", "text": ...} and {"type": "image", "image": ...};
                           without either, parts come first in the first question
    image, images, audio, audios, video, videos   the parts: paths, bytes, or objects with bytes, path or url
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from meshfeed.errors import StoreError
from meshfeed.formats.images import brands_of
from meshfeed.formats.sound import audio_format
from meshfeed.prepare.inputs.chat_columns import CHAT_KEYS, ChatColumns
from meshfeed.prepare.inputs.conversation import Conversation, conversation, parsed, parts_in, with_role
from meshfeed.prepare.inputs.named import Fetch

PART_KEYS = {f"{kind}{plural}": kind for kind in ("image", "audio", "video") for plural in ("", "s")}
"""Key of a record -> kind of the parts under it."""
TEXT_KEYS = ("text", "caption")

_IMAGES = "jpg jpeg jpe jfif png apng webp gif bmp tif tiff ppm pgm pbm pnm avif"
_OTHER_IMAGES = "heic heif jxl jp2 j2k jpx ico svg psd tga exr dng"
_AUDIO = "wav flac mp3 ogg oga opus m4a aac aif aiff wma"
_VIDEO = "mp4 m4v webm mkv avi mov mpg mpeg wmv flv"
SUFFIXES = {
    **dict.fromkeys((*_IMAGES.split(), *_OTHER_IMAGES.split()), "image"),
    **dict.fromkeys(_AUDIO.split(), "audio"),
    **dict.fromkeys(_VIDEO.split(), "video"),
}
"""Suffix -> kind. Formats that prepare refuses are here, too, so that no part is skipped silently."""

_MARK = re.compile("<(image|audio|video)>")
_NUMBER = re.compile("0*([0-9]+)")

_BEGINS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"II*\0": "tif", b"MM\0*": "tif"}


def suffix_by_content(data: bytes) -> str | None:
    """The usual suffix of pictures or sound that begin like this; None for anything else."""
    if data[:2] == b"BM" and data[6:10] == bytes(4):
        return "bmp"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if brands := brands_of(data):
        return "avif" if brands & {b"avif", b"avis"} else "mp4"
    sound = audio_format(data)
    if sound is not None and (sound != "MP3" or data[:3] == b"ID3"):  # one in 4,096 digests is like a frame
        return sound.lower()
    return next((suffix for begin, suffix in _BEGINS.items() if data.startswith(begin)), None)


def by_number(names: Mapping[str, str]) -> list[str]:
    """Names in their order, but 2.png before 10.png, as nothing is that was sorted by name.

    names: name -> what of it has its numbers; those that are alike but for these are in their order.
    """
    alike = {name: _NUMBER.sub("0", numbered) for name, numbered in names.items()}
    numbers = {name: [(len(n), n) for n in _NUMBER.findall(each)] for name, each in names.items()}
    found = defaultdict[str, list[str]](list)
    for name in sorted(names, key=numbers.__getitem__):
        found[alike[name]].append(name)
    ordered = {kind: iter(some) for kind, some in found.items()}
    return [next(ordered[kind]) for kind in alike.values()]


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A part of a sample. kind: as in the record. data: its bytes."""

    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """Text with parts.

    Attributes:
        text: pieces of text, None for each part; or a Conversation, with {"type": "image"} for a part.
        parts: in order.
        name: for messages; "" if its line or row is enough.
    """

    text: Any
    parts: tuple[SamplePart, ...]
    name: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(len(each.data) for each in self.parts)

    def key(self) -> str:
        """Identifies it among all samples."""
        digests = [hashlib.blake2b(each.data, digest_size=16).hexdigest() for each in self.parts]
        text = self.text.key() if isinstance(self.text, Conversation) else self.text
        return json.dumps([text, digests], sort_keys=True)

    def each_answer(self) -> list[Sample]:
        """Of a chat: one for each answer, with the parts until then; see `Conversation.each_answer`."""
        return [
            replace(self, text=talk, parts=self.parts[: sum(len(parts_in(each)) for each in talk.messages)])
            for talk in cast(Conversation, self.text).each_answer()
        ]


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """How records are read as samples.

    Attributes:
        chat: whether they are conversations.
        column: of the text or the messages; None for the usual names.
        ignore: columns of chats that are not read.
        more: further keys that parts are under: key -> kind.
        folder: base of the paths of parts, or its URL; None for the folder of the file that names them.
    """

    chat: bool
    column: str | None = None
    ignore: Sequence[str] = ()
    folder: str | None = None
    more: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def parts(self) -> Mapping[str, str]:
        return {**PART_KEYS, **self.more}

    def with_declared(self, kinds: Mapping[str, str]) -> SampleColumns:
        """Itself for a file that declares kinds of columns; those under their usual names keep theirs."""
        found = {name: kind for name, kind in kinds.items() if name not in (*self.parts, *self.ignore)}
        ordered = {name: found[name] for name in by_number({name: name for name in found})}
        return replace(self, more={**self.more, **ordered}) if found else self

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of the text; the first that exists counts."""
        if self.chat:
            return self._chats.names
        return (*TEXT_KEYS, "texts") if self.column is None else (self.column,)

    @property
    def _chats(self) -> ChatColumns:
        return ChatColumns(self.column, self.ignore)

    def wanted(self, there: Sequence[str], suspected: Sequence[str] = ()) -> list[str]:
        """Those of a table's columns that are read. suspected: that may hold parts under another name."""
        if self.chat:
            return self._chats.wanted(there)
        return [name for name in there if name in {*self.names, *self.parts, *suspected}]

    def holds_text(self, record: Mapping[str, Any]) -> bool:
        return any(record.get(name) is not None for name in self.names)

    def sample(self, record: Mapping[str, Any], fetch: Fetch) -> Sample:
        """The sample of a record. Raises StoreError that names what is wrong with it."""
        name = next((name for name in self.names if record.get(name) is not None), None)
        if name is None:
            there = ", ".join(map(repr, record)) or "nothing"
            raise StoreError(
                f"no {' or '.join(map(repr, self.names))}, found {there}; name the text by --column"
                f"{'' if self.chat else ', or give --chat for conversations'}"
            )
        value = record[name]
        if not self.chat:
            self._refuse_lost(record)
        if isinstance(value, list) and not self.chat:
            return _of_places(cast(list[Any], value), *self._images(record), fetch)
        given = [
            SamplePart(kind, _bytes(each, f"{key}[{k}]", fetch))
            for key, kind in self.parts.items()
            for k, each in enumerate(_list(record.get(key)))
        ]
        if self.chat:
            messages, beside = self._chats.parted(
                {name: each for name, each in record.items() if name not in self.parts}
            )
            return _of_chat(messages, given, beside, fetch)
        if not isinstance(value, str):
            raise StoreError(f"{name!r} is {type(value).__name__} where text belongs")
        return _of_text(value, given)

    def _images(self, record: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The key of an interleaved document's images, and its list. Raises StoreError for further parts."""
        lists = {key: _list(record.get(key)) for key in self.parts}
        found = {key: some for key, some in lists.items() if any(each is not None for each in some)}
        key = next((key for key in found if self.parts[key] == "image"), "images")
        if lost := [each for each in found if each != key]:
            raise StoreError(
                f"{lost[0]!r} would be lost: an interleaved document has one list of images; leave it out, "
                f"or give text with marks, such as <{self.parts[lost[0]]}>"
            )
        return key, found.get(key, [])

    def _refuse_lost(self, record: Mapping[str, Any]) -> None:
        """Raises StoreError for pictures and sound under keys that are not read.

        A name of a file is taken for one where the record has no other part: beside parts, it can be their
        address on the web.
        """
        has_parts = any(_list(record.get(key)) for key in self.parts)
        for key, value in record.items():
            if key in self.parts or key in self.names:
                continue
            for each in _list(value):
                found = _plain(each)
                if isinstance(found, bytes):
                    suffix = suffix_by_content(found)
                else:
                    last = found.rpartition(".")[2].lower() if isinstance(found, str) else ""
                    suffix = last if last in SUFFIXES and not has_parts else None
                if suffix is not None:
                    raise StoreError(
                        f"{key!r} holds a {suffix} that is not read, and would be lost; read it by "
                        f"--{SUFFIXES[suffix]}-column {key}, or leave it out of the records"
                    )


# -- text -------------------------------------------------------------------------------------------------


def _of_text(text: str, given: Sequence[SamplePart]) -> Sample:
    """Text with marks; without marks, the parts come first."""
    pieces, kinds = _split(text)
    if not kinds:
        return Sample((*(None for _ in given), text), tuple(given))
    return Sample(tuple(pieces), _matched(kinds, given))


def _of_places(texts: list[Any], key: str, images: list[Any], fetch: Fetch) -> Sample:
    """Interleaved texts and images, an image wherever the text is null. The images may have nulls, too."""
    there = [k for k, each in enumerate(images) if each is not None]
    places = [k for k, each in enumerate(texts) if each is None]
    if len(there) != len(places) or (len(images) == len(texts) and there != places):
        raise StoreError(
            f"{len(there)} images, and {len(places)} of {len(texts)} texts are null; an image belongs where "
            f"the text is null"
        )
    if not all(isinstance(each, str | None) for each in texts):
        raise StoreError("a list of texts holds text and null alone")
    parts = [SamplePart("image", _bytes(images[k], f"{key}[{k}]", fetch)) for k in there]
    return Sample(tuple(texts), tuple(parts))


def _split(text: str) -> tuple[list[str | None], list[str]]:
    """Pieces of a text, None for each mark in it, and the marks' kinds."""
    found = _MARK.split(text)
    return [None if i % 2 else each for i, each in enumerate(found) if i % 2 or each], found[1::2]


def _matched(kinds: Sequence[str], given: Sequence[SamplePart]) -> tuple[SamplePart, ...]:
    """The parts in the order of marks, those of a kind in their own. Raises StoreError if counts differ."""
    rest = {kind: [each for each in given if each.kind == kind] for kind in PART_KEYS.values()}
    for kind, some in rest.items():
        if len(some) != kinds.count(kind):
            raise StoreError(
                f"{kinds.count(kind)} of <{kind}> in the text, but {len(some)} of {kind} in the record"
            )
    queues = {kind: iter(some) for kind, some in rest.items()}
    return tuple(next(queues[kind]) for kind in kinds)


# -- chats ------------------------------------------------------------------------------------------------


def _of_chat(value: Any, given: Sequence[SamplePart], beside: Mapping[str, Any], fetch: Fetch) -> Sample:
    value = parsed(value, "the messages")
    if not isinstance(value, list):
        raise StoreError(f"{type(value).__name__} where a list of messages belongs")
    kinds: list[str] = []
    inside: list[SamplePart] = []
    messages: list[Any] = []
    for k, each in enumerate(cast(list[Any], value)):
        if not isinstance(each, Mapping):
            raise StoreError(
                f"message {k}: {type(each).__name__} where an object with role and content belongs"
            )
        messages.append(_message(k, cast(Mapping[str, Any], each), kinds, inside, fetch))
    if inside and given:
        raise StoreError("parts both inside and outside the messages; leave one of them out")
    if not kinds and given and messages:  # they belong to the first question
        first = next((k for k, each in enumerate(messages) if each.get("role") == "user"), 0)
        content: Any = messages[first].get("content") or []
        if not isinstance(content, str | list):
            raise StoreError(f"message {first}: content is {type(content).__name__} where text belongs")
        text = [{"type": "text", "text": content}] if isinstance(content, str) else cast(list[Any], content)
        messages[first]["content"] = [*({"type": each.kind} for each in given), *text]
        kinds = [each.kind for each in given]
    return Sample(conversation(messages, beside), _matched(kinds, inside or given))


def _message(
    k: int, given: Mapping[str, Any], kinds: list[str], inside: list[SamplePart], fetch: Fetch
) -> dict[str, Any]:
    """A message with marks as objects; their kinds, and the parts that it brings, are appended."""
    message = with_role(k, given)
    content = message.get("content")
    if isinstance(content, str):
        items, marks = _marked(content)
        if marks:
            message["content"] = items
            kinds += marks
    elif isinstance(content, list):
        message["content"] = [
            item
            for i, each in enumerate(cast(list[Any], content))
            for item in _items(f"message {k}, item {i}", each, kinds, inside, fetch)
        ]
    return message


def _marked(text: str) -> tuple[list[dict[str, str]], list[str]]:
    """The items of a text with marks, and the marks' kinds."""
    pieces, marks = _split(text)
    kind = iter(marks)
    items = [{"type": next(kind)} if each is None else {"type": "text", "text": each} for each in pieces]
    return items, marks


def _items(where: str, given: Any, kinds: list[str], inside: list[SamplePart], fetch: Fetch) -> list[Any]:
    """An item of a message's content; several where its text has marks."""
    if not isinstance(given, Mapping) or not isinstance(cast(Mapping[str, Any], given).get("type"), str):
        raise StoreError(f"{where}: an object with a type belongs there")
    item = cast(Mapping[str, Any], given)
    kind = item["type"].removesuffix("_url")
    if kind not in PART_KEYS.values():
        text = item.get("text")
        items, marks = _marked(text) if kind == "text" and isinstance(text, str) else ([], [])
        kinds += marks
        return items if marks else [{name: value for name, value in item.items() if value is not None}]
    kinds.append(kind)
    ref = _ref(item)
    if ref is not None:
        inside.append(SamplePart(kind, _bytes(ref, where, fetch)))
    return [{"type": kind}]


def _ref(item: Mapping[str, Any]) -> Any:
    """A message's reference to a part: a path, a URL, bytes, or an object with these; None without one."""
    return next((item[n] for n in (item["type"], "path", "url", "bytes") if item.get(n) is not None), None)


# -- parts ------------------------------------------------------------------------------------------------


def refs_in(record: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """The paths and URLs of parts that a record names, inside its messages or under keys outside of them."""
    found = [each for key in keys for each in _list(record.get(key))]
    for key in CHAT_KEYS:
        for message in _list(record.get(key)):
            content = cast(Any, message).get("content") if isinstance(message, Mapping) else None
            for item in _list(content):
                if isinstance(item, Mapping) and isinstance(cast(Any, item).get("type"), str):
                    kind = cast(Mapping[str, Any], item)["type"]
                    found += [_ref(cast(Any, item))] if kind.removesuffix("_url") in PART_KEYS else []
    return [ref for each in found if isinstance(ref := _plain(each), str) and ref]


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return cast(list[Any], value) if isinstance(value, list) else [value]


def _bytes(ref: Any, where: str, fetch: Fetch) -> bytes:
    """The bytes of a part: as they are, or fetched by path or URL. Raises StoreError."""
    ref = _plain(ref)
    if isinstance(ref, bytes):
        return ref
    if not isinstance(ref, str) or not ref:
        found = "null" if ref is None else "an empty name" if ref == "" else type(ref).__name__
        hint = "; leave the list empty if there is none" if ref is None else ""
        raise StoreError(f"{where}: {found} where a path, a URL or bytes belong{hint}")
    try:
        return fetch(ref)
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from error


def _plain(ref: Any) -> Any:
    """The content of an object with bytes, a path or a URL; bytes first, as in the columns of datasets."""
    if not isinstance(ref, Mapping):
        return ref
    named = cast(Mapping[str, Any], ref)
    return next((named[n] for n in ("bytes", "path", "url") if named.get(n) is not None), None)
