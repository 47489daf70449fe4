"""Amendments: what changes while a job trains, as pairs (step, change), and the ledger that keeps them.

The order of a job is a function of its recipe, its amendments and the step. An amendment changes nothing
before its step, and an amended recipe is a recipe like any other: every rank, under any layout, and every
tool computes the same stream from it. All ranks of a job make them in the same step: see `Feed.amend`.

A ledger is a file of lines of JSON, one for each amendment, in the order in which they were made. Each line
has a digest of itself and all lines before it. Reading a ledger compares digests first, and asks for nothing
that a line names: a store is opened, and a file read, when a recipe is amended with it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import MeshfeedError, RecipeError, StateError, StoreError
from meshfeed.files.local.durable import durable_file
from meshfeed.files.local.lock import LIMIT_S, locked
from meshfeed.intervals import distinct
from meshfeed.mixture import Mixture, Unit
from meshfeed.order import LeavesOut, cut_off
from meshfeed.recipe import Amendment, Change, Recipe
from meshfeed.store import StreamStore, open_store
from meshfeed.summary import digest_of
from meshfeed.whole import of_kind, path_text, real, settle

_HEAD = json.dumps({"ledger": "meshfeed", "version": 2})
_OF_LINE = ("step", "agreed", "digest")
_MOST_STEP = 2**62
_MOST_CHARACTERS = 16 << 20  # of a line; ranks pass on amendments of 4 MiB
_MOST_PACKED = 1 << 23  # documents of a source in a line
_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP  # errors of file systems without locks
_MOST_LISTED = 1000  # documents that a line of a ledger lists as numbers, for readers


@dataclass(frozen=True)
class _Kept(Change):
    """A change whose attributes are its JSON."""

    @property
    def as_json(self) -> dict[str, Any]:
        """The attributes as plain JSON, but for those that are None."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in told.items() if value is not None}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """The change that `told` describes. Raises RecipeError for anything else."""
        return cls(**told)

    @property
    def digest(self) -> str:
        """Of its kind and attributes."""
        return digest_of({"kind": type(self).__name__, **self.as_json})


@dataclass(frozen=True)
class Reweigh(_Kept):
    """Other amounts for the sources of a mixture, as `Mixture.then` takes them.

    A source that has grown shares its amount with the sources that it has grown by, as `Grow` says.

    Attributes:
        amounts: name -> amount, a real number of any library. A source that is not named is not drawn.
        by: their unit, or name -> unit; see `Mixture.then`.

    Raises RecipeError for an amount that is no number.
    """

    amounts: Mapping[str, float]
    by: Unit | Mapping[str, Unit] | None = None

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.amounts), Mapping):
            raise RecipeError(f"Reweigh({self.amounts!r}): give a mapping, such as {{'code': 2, 'web': 1}}")
        if isinstance(self.by, Mapping):
            object.__setattr__(self, "by", {**self.by})  # the caller may change it
        amounts = {name: real(amount) for name, amount in self.amounts.items()}
        for name, amount in amounts.items():
            if amount is None:
                raise RecipeError(f"Reweigh: {name!r} has amount {self.amounts[name]!r}: give a number")
        object.__setattr__(self, "amounts", amounts)

    def applied(self, recipe: Recipe, step: int) -> Recipe:
        """Each source goes on where it was."""
        if not isinstance(recipe.data, Mixture):
            raise RecipeError(
                "Reweigh: the recipe has one store; give it a Mixture, of one source if need be"
            )
        known = recipe.data.names
        if unknown := [name for name in self.amounts if name not in known]:
            raise RecipeError(f"Reweigh: no source is called {unknown[0]!r}; there are {', '.join(known)}")
        amounts, unit = dict[str, float](), recipe.data.unit_at(step) if self.by is None else self.by
        ends = unit not in ("proportion", "tokens")
        further = {name for _, name in recipe.amendments.grown}
        for name, amount in self.amounts.items():
            if name in further:
                raise RecipeError(f"Reweigh: {name!r} has a share of its source's amount; name the source")
            among = recipe.amendments.stores_of(name)
            if among[1:] and ends:
                raise RecipeError(f"Reweigh: {name!r} has grown: give shares, by='proportion' or 'tokens'")
            sizes = _sizes(recipe, among, str(unit)) if among[1:] else [1]
            for each, size in zip(among, sizes):
                amounts[each] = amount if ends else amount * size / sum(sizes)  # a count stays whole
        made = replace(recipe, data=recipe.data.amended(step, amounts, by=unit))
        cut_off(made)  # or they begin too late
        return made


@dataclass(frozen=True)
class BatchSize(_Kept):
    """Another number of sequences in each step, or of tokens, as `Batch.then` takes it.

    Raises RecipeError for anything but one whole number from 1.
    """

    sequences: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        settle(self)
        given = [size for size in (self.sequences, self.tokens) if size is not None]
        if not (len(given) == 1 and type(given[0]) is int and given[0] >= 1):
            raise RecipeError(f"{self!r}: one whole number from 1, of sequences or of tokens")

    def applied(self, recipe: Recipe, step: int) -> Recipe:
        """Steps from there on have this size, until the batch's next stage.

        Rows of one length take tokens too. Raises RecipeError for the other unit than the batch's, and unless
        rows fill the steps.
        """
        batch, length = recipe.batch, recipe.sequence.row_length
        if self.tokens is not None and length:
            batch = batch.in_tokens(length)  # the recipe makes it one of sequences again
        unit = "sequences" if batch.tokens is None else "tokens"
        if getattr(self, unit) is None:
            raise RecipeError(f"{self!r}: the batch is of {unit}; give mf.amendments.BatchSize({unit}=...)")
        made = replace(recipe, batch=batch.amended(step, self.sequences, tokens=self.tokens))
        if cut := cut_off(made) - cut_off(recipe):
            raise RecipeError(
                f"{self!r} at step {step}: the amounts from step {min(cut)} on would not all be drawn when "
                f"others begin; give a size at which they are"
            )
        return made


@dataclass(frozen=True)
class SkipSteps(_Kept):
    """Leave out the steps from `first` to before `stop`, and their data, as after a loss spike.

    The next step after them keeps its number and its data. Steps that were planned already are not left out.
    Raises RecipeError unless 0 <= first < stop.
    """

    first: int
    stop: int

    def __post_init__(self) -> None:
        settle(self)
        if not (type(self.first) is type(self.stop) is int and 0 <= self.first < self.stop):
            raise RecipeError(f"SkipSteps({self.first!r}, {self.stop!r}): whole numbers, 0 <= first < stop")

    def applied(self, recipe: Recipe, step: int) -> Recipe:
        """The steps from `step` on are left out, as far as they are among these.

        Raises RecipeError if none is.
        """
        if self.stop <= step:
            raise RecipeError(f"{self!r}: the steps before {step} are planned already; none is left to skip")
        skipped = (*recipe.amendments.skipped, (max(self.first, step), self.stop))
        return replace(recipe, amendments=replace(recipe.amendments, skipped=skipped))


@dataclass(frozen=True, eq=False)
class Exclude(_Kept):
    """Leave out documents: where they would be drawn there is an empty sequence, so nothing else moves.

    `Windows` and `MegatronGPT`, whose rows span documents, keep their tokens in place, without loss; with
    reset_attention_mask no other document attends to them. In `Samples`, documents are items; in rows of
    them, a microbatch has fewer rows.

    Attributes:
        documents: source -> numbers of its documents; int64, ascending. Numbers alone are of a recipe without
            a mixture, whose source is "". At most 2**23 of a source.
        files: source -> path of a file of such numbers, one in each line or as .npy. A ledger keeps the path
            and a digest, and every rank reads the file: for a million documents.

    Raises RecipeError for anything but whole numbers from 0, for none at all, and for a file that cannot be
    read or has changed.
    """

    documents: Mapping[str, Sequence[int] | Longs] | Sequence[int] | Longs = field(default_factory=dict)
    files: Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict[str, str], repr=False, kw_only=True)  # of the files
    _line: dict[str, Any] = field(default_factory=dict[str, Any], repr=False, kw_only=True)

    def __post_init__(self) -> None:
        listed = self.documents if isinstance(self.documents, Mapping) else {"": self.documents}
        given = cast(Any, self.files)
        paths = {"": given} if isinstance(given, (str, os.PathLike)) else dict(given)
        listed = {name: _numbers(numbers, f"source {name!r}") for name, numbers in listed.items()}
        object.__setattr__(self, "documents", {name: found for name, found in listed.items() if found.size})
        object.__setattr__(self, "files", {name: os.fspath(path) for name, path in paths.items()})
        new = {name: _numbers_in(path) for name, path in self._paths.items() if name not in self._digests}
        self._digests.update({name: _digest(numbers) for name, numbers in new.items()})
        if not self._listed and not any(new[name].size if name in new else True for name in self._paths):
            raise RecipeError("Exclude: it names no document; give some, such as {'web': [17, 203]}")

    @property
    def _paths(self) -> dict[str, str]:
        return cast("dict[str, str]", self.files)

    @property
    def _listed(self) -> dict[str, Longs]:
        return cast("dict[str, Longs]", self.documents)

    @property
    def as_json(self) -> dict[str, Any]:
        """Few documents as numbers, many packed; files with their digests."""
        if not self._line:
            listed = {name: _packed(numbers) for name, numbers in self._listed.items()}
            files = {name: [path, self._digests[name]] for name, path in self._paths.items()}
            told = {"documents": listed, "files": files}
            self._line.update({name: value for name, value in told.items() if value})
        return self._line

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """The change that `told` describes. Raises RecipeError for anything else."""
        listed = {name: _unpacked(packed) for name, packed in told.get("documents", {}).items()}
        files = {name: (path, digest) for name, (path, digest) in told.get("files", {}).items()}
        if not {*told} <= {"documents", "files"} or not all(map(_are_texts, files.values())):
            raise RecipeError("Exclude: it has something else than documents, and files with digests")
        paths, digests = ({name: each[at] for name, each in files.items()} for at in range(2))
        return cls(listed, paths, _digests=digests, _line=dict(told))  # packed as it was, by any zlib

    @property
    def digest(self) -> str:
        """Of the documents."""
        listed = {name: _digest(numbers) for name, numbers in self._listed.items()}
        return digest_of({"documents": listed, "files": self._digests})

    @property
    def sources(self) -> list[str]:
        """The sources that it names."""
        return sorted({*self._listed, *self._paths})

    @cached_property
    def all_documents(self) -> dict[str, Longs]:
        """Source -> numbers of its documents, of the list and of the files; int64, ascending."""
        none, read = np.zeros(0, np.int64), dict[str, Longs]()
        for name, path in self._paths.items():
            read[name] = _numbers_in(path)
            if _digest(read[name]) != self._digests[name]:
                raise RecipeError(
                    f"{path}: it has other documents than when they were excluded; restore the file"
                )
        return {name: np.union1d(self._listed.get(name, none), read.get(name, none)) for name in self.sources}

    def applied(self, recipe: Recipe, step: int) -> Recipe:
        """The documents are empty from `step` on."""
        amended, names = recipe.amendments, recipe.source_names
        for name, numbers in self.all_documents.items():
            if name not in names:
                there = ", ".join(map(repr, names))
                if not name:
                    raise RecipeError(
                        f"Exclude: numbers alone are of a recipe without a mixture, this one has {there}; "
                        f"give {{name: [numbers]}}, such as {{{names[0]!r}: [17, 203]}}"
                    )
                raise RecipeError(f"Exclude: no source is called {name!r}; the recipe has {there}")
            if not numbers.size:
                continue
            source = names.index(name)
            if not isinstance(recipe.sequence, LeavesOut):
                raise RecipeError(f"Exclude: {recipe.sequence.summary()} cannot leave documents out")
            count = recipe.sequence.num_documents(recipe.sources[source])
            if numbers[-1] >= count:
                raise RecipeError(
                    f"Exclude: document {numbers[-1]} of source {name!r}, which has {count}, counted from 0"
                )
            amended = amended.excluding(step, source, numbers)
        return replace(recipe, amendments=amended)

    def __repr__(self) -> str:
        told = [f"{numbers.size} of {name!r}" for name, numbers in self._listed.items()]
        told += [f"{name!r} by {path}" for name, path in self._paths.items()]
        return f"Exclude({', '.join(told)})"


@dataclass(frozen=True)
class Grow(_Kept):
    """More documents for a source of a mixture, in a store of their own.

    They are a source beside it, called source+F, F the first digits of the store's fingerprint. The amount of
    the source is shared among its stores by their sequences, or by their tokens under by="tokens". Each has
    epochs of its own, so nothing that was drawn moves. A store with columns beside its tokens is refused, and
    one that the source has.

    Attributes:
        source: name of the source.
        path, column, dtype, tokenizer, eod: as for `open`, with its default cache; every rank opens it.
        fingerprint: of the store; "" when the change is made, which fills it in.

    Raises StoreError if there is no such store. One of another fingerprint is a RecipeError when a recipe is
    amended.
    """

    source: str
    path: str
    column: str | None = None
    dtype: str | None = None
    tokenizer: str | None = None
    fingerprint: str = ""
    eod: str | bool | None = None

    def __post_init__(self) -> None:
        of_kind(RecipeError, str, source=self.source)
        object.__setattr__(self, "path", path_text(RecipeError, path=self.path))
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", self.store.fingerprint)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """The change that `told` describes. Raises RecipeError for anything else."""
        made = cls(**{"fingerprint": "none", **told})
        given = made.as_json.items()
        texts = {name: value for name, value in given if name != "eod" or not isinstance(value, bool)}
        if not _are_texts(texts.values()) or made.fingerprint == "none":
            raise RecipeError(f"Grow: source, path and fingerprint are texts: {told}")
        return made

    @cached_property
    def store(self) -> StreamStore:
        """What the source grows by. Raises StoreError, and RecipeError if it has another fingerprint."""
        how = {name: getattr(self, name) for name in ("column", "dtype", "tokenizer", "eod")}
        opened = open_store(self.path, **how)
        if self.fingerprint not in ("", opened.fingerprint):
            raise RecipeError(
                f"Grow: {self.path} has fingerprint {opened.fingerprint}, and had {self.fingerprint} when "
                f"{self.source!r} grew by it; restore the files"
            )
        return opened

    @property
    def digest(self) -> str:
        """Of the content, wherever it lies."""
        return digest_of({"source": self.source, "fingerprint": self.fingerprint})

    def applied(self, recipe: Recipe, step: int) -> Recipe:
        """The mixture has one more source, from `step` on."""
        known = recipe.source_names
        if not isinstance(recipe.data, Mixture) or self.source not in known:
            there = ", ".join(map(repr, known))
            raise RecipeError(f"Grow: the recipe is no mixture with a source {self.source!r}; it has {there}")
        if self.store.columns:
            raise RecipeError(
                f"Grow: {self.path} has columns beside the tokens, {', '.join(self.store.columns)}"
            )
        if self.source in {name for _, name in recipe.amendments.grown}:
            raise RecipeError(f"Grow: {self.source!r} is of a source that has grown; let that one grow")
        among = recipe.amendments.stores_of(self.source)
        held = {recipe.sources[known.index(each)].fingerprint[:8]: each for each in among}
        if (own := self.fingerprint[:8]) in held:
            raise RecipeError(f"Grow: {self.path} is {held[own]!r} already")
        name = f"{self.source}+{own}"
        grown = (*recipe.amendments.grown, (self.source, name))

        stores = [self.store if each == self.source else store for each, store in zip(known, recipe.sources)]

        def share(unit: str) -> float:
            (size,) = _sizes(recipe.with_stores(stores), [self.source], unit)
            return size / (size + sum(_sizes(recipe, among, unit)))

        data = recipe.data.grown(step, name, self.store, beside=among, share=share)
        return replace(recipe, data=data, amendments=replace(recipe.amendments, grown=grown))


def _sizes(recipe: Recipe, names: Sequence[str], unit: str) -> list[int]:
    """Tokens in an epoch of some sources under "tokens", else sequences."""
    rule, sources = recipe.sequence, [recipe.source_names.index(name) for name in names]
    if unit == "tokens":
        return [rule.epoch_tokens(recipe, source).total for source in sources]
    return [rule.num_sequences(recipe.sources[source]) for source in sources]


KINDS: Mapping[str, type[_Kept]] = {
    each.__name__: each for each in (Reweigh, BatchSize, SkipSteps, Exclude, Grow)
}
"""Kinds of changes by name."""


@dataclass(frozen=True)
class Ledger:
    """The amendments of a job, in the order in which they were made.

    `recipe.amended(ledger)` is what it trains on.
    """

    amendments: tuple[Amendment, ...] = ()

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Each as plain JSON, with a digest of it and all before it."""
        lines, before = list[dict[str, Any]](), ""
        for each in self.amendments:
            line = {**_when(each), type(each.change).__name__: cast(_Kept, each.change).as_json}
            before = digest_of({**line, "before": before})
            lines.append({**line, "digest": before})
        return lines

    @property
    def digests(self) -> tuple[str, ...]:
        """Of each amendment and all before it."""
        return tuple(line["digest"] for line in self.lines)

    @property
    def digest(self) -> str:
        """Of all amendments; "" without any."""
        return self.digests[-1] if self.amendments else ""

    def begins_with(self, other: Ledger) -> bool:
        """Whether another ledger is the beginning of this one, or all of it."""
        return self.digests[: len(other)] == other.digests

    def added(self, amendment: Amendment) -> Ledger:
        """With one more."""
        return Ledger((*self.amendments, amendment))

    @property
    def text(self) -> str:
        """As lines of JSON."""
        return "".join(f"{line}\n" for line in (_HEAD, *map(json.dumps, self.lines)))

    @classmethod
    def of_text(cls, text: str, where: str = "the ledger") -> Ledger:
        """The ledger that `text` gave. Raises StateError for anything else, and names the line."""
        head, *lines = text.split("\n")
        if head != _HEAD:
            raise StateError(f"{where}: not a ledger of this version of meshfeed; it begins {head[:80]!r}")
        told, before = list[tuple[dict[str, Any], str]](), ""
        for number, line in enumerate(lines[:-1], 2):
            at = f"{where}, line {number}"
            told.append((_json_of(line, before, at), at))
            before = told[-1][0]["digest"]
        if not lines or lines[-1]:
            raise StateError(f"{where} is cut off in line {len(lines) + 1}; restore the file")
        made = cls(tuple(amendment_of(line, at) for line, at in told))
        for (line, at), again in zip(told, made.lines):
            if line != again:
                raise StateError(f"{at}: not as meshfeed writes it; restore the file")
        return made

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, missing_ok: bool = False) -> Ledger:
        """The ledger in a file. Raises StateError if it is missing, cut off, altered, or something else.

        missing_ok: a file that does not exist is an empty ledger.
        """
        try:
            with _regular(path) as file:
                head = file.readline(len(_HEAD) + 1)
                text = head + (file.read() if head == f"{_HEAD}\n".encode() else b"")
            return cls.of_text(text.decode(), os.fspath(path))
        except FileNotFoundError as missing:
            if missing_ok:
                return cls()
            raise StateError(f"{os.fspath(path)}: no such ledger") from missing
        except (OSError, ValueError) as bad:
            raise StateError(f"{os.fspath(path)}: cannot read the ledger ({bad})") from bad

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which has the old content or the new one at any time. Raises StateError.

        A link stays, and what it points to is replaced. A file that is replaced keeps its group and mode.
        """
        target = Path(os.path.realpath(path))
        try:
            with durable_file(target) as file:
                with contextlib.suppress(FileNotFoundError):
                    before = target.stat()
                    if not stat.S_ISREG(before.st_mode):
                        raise StoreError("Not a regular file")
                    with contextlib.suppress(OSError):  # a container may not know the group
                        os.fchown(file.fileno(), -1, before.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                file.write(self.text.encode())
        except StoreError as bad:
            why = bad.__cause__ or bad  # not that the file, which is to be written, is missing
            raise StateError(f"{os.fspath(path)}: cannot write the ledger ({why})") from bad

    def keep(self, path: str | os.PathLike[str], *, timeout_s: float = LIMIT_S) -> None:
        """Write it to a file, unless that has it already, maybe with further lines.

        Processes write one after the other, by a lock on a file beside it, so a shorter ledger never replaces
        a longer one. Where the file system has no locks, the longer one is written again with the next state.

        timeout_s: how long another process may hold that lock; a minute at most.

        Raises StateError, also for the file of another job.
        """
        target = Path(os.path.realpath(path))
        if not self._is_kept(target):
            with _alone(target, min(timeout_s, LIMIT_S)):
                if not self._is_kept(target):
                    self.write(target)

    def _is_kept(self, target: Path) -> bool:
        kept = Ledger.read(target, missing_ok=True)
        if kept.begins_with(self):
            return target.exists()
        if not self.begins_with(kept):
            raise StateError(f"{target}: another job keeps its amendments there; give this one its own")
        return False

    def __len__(self) -> int:
        return len(self.amendments)

    def __iter__(self) -> Iterator[Amendment]:
        return iter(self.amendments)


@contextlib.contextmanager
def _alone(target: Path, limit_s: float) -> Generator[None]:
    """Alone among the processes that write a ledger. Raises StateError."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(target.with_name(f"{target.name}.lock"), 0o666, limit_s=limit_s))
        except OSError as bad:
            if bad.errno not in _NO_LOCKS:
                raise StateError(f"{target}: cannot write the ledger ({bad})") from bad
        yield


def amendment_of(line: Mapping[str, Any], where: str) -> Amendment:
    """The amendment that a line of a ledger describes. Raises StateError for anything else."""
    try:
        ((kind, told),) = ((name, value) for name, value in line.items() if name not in _OF_LINE)
        made = Amendment(line["step"], KINDS[kind].from_json(told), line.get("agreed"))
        for step in _when(made).values():
            if type(step) is not int or not 0 <= step < _MOST_STEP:
                raise ValueError(f"step {step!r}")
        return made
    except (LookupError, ValueError, TypeError, AttributeError, zlib.error, MeshfeedError) as bad:
        raise StateError(f"{where}: not an amendment ({bad!r}); restore the file") from bad


def _when(amendment: Amendment) -> dict[str, int]:
    """The steps of an amendment, as a line has them."""
    of_all = {} if amendment.agreed is None else {"agreed": amendment.agreed}
    return {"step": amendment.step, **of_all}


def _json_of(line: str, before: str, where: str) -> dict[str, Any]:
    """A line that follows from what is before it. Raises StateError for any other."""
    try:
        if len(line) > _MOST_CHARACTERS:
            raise ValueError(f"{len(line):,} characters")
        found: dict[str, Any] = {**json.loads(line)}
        digest = digest_of(
            {**{name: each for name, each in found.items() if name != "digest"}, "before": before}
        )
    except (ValueError, TypeError, RecursionError) as bad:
        raise StateError(f"{where}: not JSON ({bad}); the file is cut off or altered, restore it") from bad
    if found.get("digest") != digest:
        raise StateError(f"{where}: it does not follow from the lines before it; restore the file")
    return found


def _regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file to read. Raises OSError for anything else, and waits for no pipe."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return file


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(each, str) for each in values)


def _numbers(given: Any, where: str) -> Longs:
    """Numbers of documents, ascending, each once."""
    found = np.asarray(given)
    if found.size and (found.dtype.kind not in "iu" or found.ndim != 1 or found.min() < 0):
        raise RecipeError(f"Exclude: {where}: give the numbers of documents, whole numbers from 0, in a list")
    if found.size and int(found.max()) >= 2**62:
        raise RecipeError(f"Exclude: {where}: no store has a document {found.max()}")
    return distinct(found.astype(np.int64))


def _numbers_in(path: str) -> Longs:
    wanted = "give a file with one document number in each line"
    try:
        with _regular(path) as file:
            given = (
                np.load(file) if path.endswith(".npy") else np.array(file.read().decode().split(), np.int64)
            )
        return _numbers(given, path)
    except OSError as bad:
        raise RecipeError(f"Exclude: {path}: {bad}; {wanted}") from bad
    except (ValueError, OverflowError, EOFError, MemoryError):  # they quote it, and it may be any file
        raise RecipeError(f"Exclude: {path}: it has something else; {wanted}") from None


def _digest(numbers: Longs) -> str:
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()[:32]


def _packed(numbers: Longs) -> list[int] | str:
    if numbers.size <= _MOST_LISTED:
        return numbers.tolist()
    if numbers.size > _MOST_PACKED:
        raise RecipeError(
            f"Exclude: {numbers.size:,} documents; put more than {_MOST_PACKED:,} in a file, files="
        )
    steps = np.diff(numbers, prepend=0).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes())).decode()


def _unpacked(packed: list[int] | str) -> list[int] | Longs:
    if isinstance(packed, list):
        return packed
    stream = zlib.decompressobj()
    steps = stream.decompress(base64.b64decode(packed, validate=True), 8 * _MOST_PACKED)
    if not stream.eof:
        raise ValueError("too many documents, or some are missing")
    return np.cumsum(np.frombuffer(steps, "<i8"))
