"""meshfeed inspect: what a token store holds, and whether it is whole."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

import meshfeed.processors
from meshfeed.amendments import Exclude, Grow, Ledger, Reweigh
from meshfeed.cli.command import OK, WRONG, Console, Table, print_json, say, show_progress, shown, write_text
from meshfeed.cli.options import Command, argument, option, refuse_given
from meshfeed.cli.recipes import AmendmentOptions, StoreOptions
from meshfeed.cli.rule_names import parsed_call
from meshfeed.errors import (
    AccessError,
    CacheError,
    ChecksumError,
    MeshfeedError,
    MissingError,
    OptionError,
    StoreError,
    UnavailableError,
)
from meshfeed.files import Cache
from meshfeed.files.sums import BLOCK_BYTES, SUFFIX
from meshfeed.files.url import is_remote, without_secrets
from meshfeed.formats.documents import DocumentFiles
from meshfeed.formats.tokens import TOKEN_COLUMNS
from meshfeed.multimodal import MultimodalStore
from meshfeed.parts import KINDS, PartRule, Rules
from meshfeed.recipe import Change
from meshfeed.report.content import add_content
from meshfeed.report.lengths import DocumentLengths
from meshfeed.report.samples import Bearing, bearing, loss_of, page, shown_documents, shown_ranges, texts_of
from meshfeed.report.words import counted
from meshfeed.store import IndexedStore, StreamStore
from meshfeed.store.checksums import checksums_beside, is_of, write_checksums
from meshfeed.store.tokenizer import BYTES, tokenizer_file

_LOOKED_AT_WHOLE = 1 << 20
_NUM_BLOCKS = 64
_BLOCK_DOCUMENTS = 1 << 12
_PARTS_OF = 1 << 16  # documents
_BAR_WIDTH = 40
_SHOWN_TOKENS = 256
_ON_PAGE = 20
_PART_RULES = ("NativeImages", "NativeVideo", "WhisperAudio")

_UNCOMPARED = (
    "; tokens were not compared: there are no checksums of all bytes (--write-checksums makes those of a "
    ".bin/.idx)"
)

Decode = Callable[[Sequence[int]], str]

_NOT_ITS = (OptionError, AccessError, UnavailableError, CacheError)  # errors that say nothing of the store


@dataclass(frozen=True, kw_only=True)
class Inspect(Command, StoreOptions, AmendmentOptions):
    """Show format, counts, fingerprint, document lengths and texts of a token store: .bin/.idx, a folder
    with dataset.json, MDS, litdata, JSONL, Parquet or Arrow, local or remote.
    """

    examples = """
        meshfeed inspect corpus --show 3 --tokenizer tokenizer.json
        meshfeed inspect s3://bucket/corpus --storage region=eu-west-1 --cache /local/cache --json
        meshfeed inspect corpus --verify && sbatch train.sh
        meshfeed inspect web --amendments ledger.jsonl --source web
    """
    wrong = "the store is broken; stderr, or the key 'broken', says where"
    keys = {
        "path, format, fingerprint": "where it is, what it is, digest of its content",
        "dtype, num_tokens, num_documents": "what the whole store holds",
        "num_shards, shard_documents": "where it has shards; documents per shard: min, median, max",
        "columns, ...": "what else its format says of it",
        "image, audio, video": "of a multimodal store: parts of its first 65,536 documents, and their sizes",
        "document_lengths": "looked_at, of, min, p1 ... max, mean, empty, histogram of first..last",
        "texts": "with --show: document; text, or tokens without --tokenizer; which of it bears loss",
        "loss": "with --show or --html: tokens that bear loss, of all; documents in which none does",
        "page": "with --html: file, documents, and the parts that are wrong: document, part, why",
        "amendments": "with --amendments: step, and documents and tokens excluded, or the store it grows by",
        "checksums_file": "with --write-checksums: file, blocks, block_bytes",
        "verified, broken": "with --verify: true, or what is broken and where",
        "compared": "with --verify: whether all bytes were compared with checksums or hashes",
        "digest": "with --verify: of all tokens, lengths, columns and parts, whatever the format",
    }

    path: str = argument("PATH", "path or URL (s3://, gs://, az://, https://) of the store")
    show: int | None = option("show how N documents begin, decoded by --tokenizer")
    documents: tuple[int, ...] | None = option("show these documents, instead of some", least=0)
    html: Path | None = option(
        f"write a page of --show N ({_ON_PAGE}) or --documents into this file: texts, pictures and sizes"
    )
    part_rule: list[str] | None = option(
        "how --html counts the tokens of parts, such as 'NativeImages(max_pixels=200_000)'; one per kind "
        "(NativeImages, NativeVideo, WhisperAudio)",
        metavar="RULE",
    )
    source: str | None = option("the store's name in the mixture of --amendments", metavar="NAME")
    verify: bool = option(
        "check every entry, checksum, hash and length that the format has, and name what is broken",
        default=False,
    )
    digest: str | None = option("another digest than this is broken, of a --verify elsewhere")
    write_checksums: bool = option(
        "write PATH.sums, checksums that reads of a .bin/.idx pair are compared with; refused if there is "
        "one that the files contradict",
        default=False,
    )

    def run(self) -> int:
        if not (self.verify and is_remote(self.path)):
            return self._run(self.cache)
        with Cache(self.cache).anew() as cache:  # what is stored now, whatever the node has cached
            return self._run(cache)

    def _run(self, cache: Cache | str | None) -> int:
        try:
            store = self._opened(cache)
        except (*_NOT_ITS, MissingError):
            raise
        except StoreError as error:
            return self._ended({"path": without_secrets(self.path)}, str(error))
        try:
            written_sums = self._write_checksums(store) if self.write_checksums else {}
        except ChecksumError as error:
            return self._ended({"path": without_secrets(self.path)}, str(error))
        if self.html is None:
            refuse_given(self, ("part_rule",), "has no effect without --html")
        if self.documents is not None and self.html is None:
            refuse_given(self, ("show",), "has no effect beside --documents, which says which ones")
        if not self.verify:
            refuse_given(self, ("digest",), "has no effect without --verify")
        if self.amendments is None:
            refuse_given(self, ("source",), "has no effect without --amendments")
        decode = decoder_of(self.tokenizer) if self.tokenizer and self._shows else None
        facts: dict[str, Any] = {"path": without_secrets(self.path)}
        texts: list[tuple[int, list[str]]] = []
        written: dict[str, Any] = {}
        amended = list[dict[str, Any]]()
        lengths, looked, broken = DocumentLengths(tokens=np.zeros(0, np.int64), num_documents=0), False, None
        try:
            facts = facts_of(store)
            lengths = look_at_lengths(store)
            texts = _beginnings(store, self._chosen, decode) if self._prints else []
            if self._shows:
                with store:
                    facts |= {} if (loss := loss_of(store)) is None else {"loss": loss}
            written = self._write(self.html, store, decode) if self.html else {}
            if self.amendments is not None:
                amended = amendments_of(store, Ledger.read(self.amendments), self.source or "")
            looked = True
            if self.verify:
                show_progress("checking", store.verify(), quiet=self.json)
                facts["compared"], digest = store.is_summed, hashlib.blake2b(digest_size=16)
                show_progress("reading", add_content(digest, store), quiet=self.json)
                facts["digest"] = digest.hexdigest()
                if self.digest not in (None, facts["digest"]):
                    broken = f"the digest of its content is {facts['digest']}, not {self.digest}"
        except _NOT_ITS:
            raise
        except StoreError as error:
            broken = str(error)
        if looked and not self.json:
            _print(facts, lengths, texts, "" if decode else " ")
            for each in amended:
                print("; ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in each.items()))
            if self.amendments is not None and not amended:
                print("no amendment of its documents")
            for each in written.get("wrong", ()):
                print(f"document {each['document']}, part {each['part']}: {each['why']}")
        facts["document_lengths"] = lengths.facts()
        facts |= {} if self.amendments is None else {"amendments": amended}
        facts |= {"page": written} if written else {}
        facts |= {"checksums_file": written_sums} if written_sums else {}
        if self._prints:
            facts["texts"] = [_text_of(each, cut, "" if decode else " ") for each, cut in texts]
        return self._ended(facts, broken)

    @property
    def _shows(self) -> bool:
        """Whether documents are shown, anywhere."""
        return bool(self.show or self.documents or self.html)

    @property
    def _prints(self) -> bool:
        """Whether they are shown on the terminal: those of a page are not, unless --show asks for it."""
        return bool(self.show or (self.documents and not self.html))

    def _chosen(self, num_documents: int) -> list[int]:
        """The documents to show; if none are named, some from all over the store. Raises MeshfeedError."""
        if self.documents is None:
            count = min(self.show or _ON_PAGE, num_documents)
            return np.unique(np.linspace(0, num_documents - 1, count).astype(np.int64)).tolist()
        if max(self.documents) >= num_documents:
            raise MeshfeedError(f"--documents {max(self.documents)}: the store has {num_documents:,}, from 0")
        return list(self.documents)

    def _write(self, file: Path, store: StreamStore, decode: Decode | None) -> dict[str, Any]:
        """Write the page; returns what it has. Raises StoreError, MeshfeedError."""
        given = map(_part_rule, [*_PART_RULES, *(self.part_rule or ())])
        rules: Rules = {rule.kind: rule for rule in given}
        with store:
            num = store.num_documents
            documents = [*shown_documents(store, self._chosen(num), decode or as_ids, rules)]
            loss = loss_of(store)
        there = {part.kind for one in documents for part in one.parts}
        told = "; ".join(rule.summary() for kind, rule in rules.items() if kind in there)
        note = f"Text by {self.tokenizer}." if decode else "Token ids: give --tokenizer to see text."
        note += f" Tokens of parts by {told}." if told else ""
        if loss is not None:
            note += f" Underlined: what bears loss, {told_loss(loss)}."
        write_text(file, page(without_secrets(self.path), documents, num, note))
        wrong = [
            {"document": one.number, "part": k, "why": why}
            for one in documents
            for k, part in enumerate(one.parts)
            for why in part.wrong
        ]
        return {"file": str(file), "documents": len(documents), "wrong": wrong}

    def _write_checksums(self, store: StreamStore) -> dict[str, Any]:
        """Write the .sums; returns what it has. Raises MeshfeedError; ChecksumError for damaged files."""
        if not isinstance(store, IndexedStore):
            raise MeshfeedError(
                f"{store.path}: only .bin/.idx pairs have such checksums; MDS has hashes, where its writer "
                f"was told to"
            )
        show_progress("summing", write_checksums(store.pair), quiet=self.json)
        file = f"{store.path}{SUFFIX}"
        num_blocks = sum(-(-each.size_bytes // BLOCK_BYTES) for each in store.files)
        say(f"wrote {file}: checksums of {counted(num_blocks, 'block')} of {BLOCK_BYTES:,} bytes", sys.stderr)
        return {"file": file, "blocks": num_blocks, "block_bytes": BLOCK_BYTES}

    def _ended(self, facts: dict[str, Any], broken: str | None) -> int:
        if self.verify and not broken:
            facts["verified"] = True
        if broken:
            facts["broken"] = broken
        if self.json:
            print_json(facts)
        elif broken:
            sys.stdout.flush()
            say(f"broken: {broken}", sys.stderr)
        elif self.verify:
            print(f"digest of all tokens: {facts['digest']}")
            print("verified: every entry is sound" + ("" if facts["compared"] else _UNCOMPARED))
        return WRONG if broken else OK

    def _opened(self, cache: Cache | str | None) -> StreamStore:
        """The store. Its text is read with --tokenizer; of tokens, that only decodes what is shown."""
        if self.tokenizer is None:
            return self.open(self.path, cache=cache)
        try:
            store = self.open(self.path, cache=cache, tokenizer=None, eod=None)
        except (MissingError, OptionError):  # raw text is a store with a tokenizer only
            store = None
        if store is None:
            return self.open(self.path, cache=cache)
        if isinstance(store, DocumentFiles) and self.column not in TOKEN_COLUMNS:
            try:
                return self.open(self.path, cache=cache)
            except StoreError as error:
                try:
                    with store:
                        _ = store.num_documents
                except StoreError:
                    raise error from None
        if not self._shows:
            raise MeshfeedError(
                f"--tokenizer {self.tokenizer}: {store.path} holds tokens; add --show N to decode some"
            )
        refuse_given(self, ("eod", "eod_token"), f"is of text, and {store.path} holds tokens")
        return store


def told_loss(loss: Mapping[str, int]) -> str:
    """What `loss_of` found, in words."""
    share = loss["tokens"] / max(loss["of"], 1)
    none = f"; {counted(loss['documents_without'], 'document')} without any" * bool(loss["documents_without"])
    return f"{loss['tokens']:,} of all {loss['of']:,} tokens ({share:.1%}){none}"


def facts_of(store: StreamStore) -> dict[str, Any]:
    """Facts about the store, as JSON-able values."""
    with store:
        counts = {
            "dtype": store.dtype.name,
            "num_tokens": store.num_tokens,
            "num_documents": store.num_documents,
        }
        facts: dict[str, Any] = {"path": store.path} | counts | store.facts()
        ends = store.shard_ends
        if ends is not None and ends.size:
            sizes = np.diff(ends, prepend=0)
            low, median, high = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
            facts["shard_documents"] = {"min": low, "median": median, "max": high}
        if isinstance(store, MultimodalStore):
            facts |= _parts_of(store)
        if isinstance(store, IndexedStore):
            facts["checksums"] = _checksums(store)
        return facts | {"fingerprint": store.fingerprint}


def amendments_of(store: StreamStore, ledger: Ledger, source: str) -> list[dict[str, Any]]:
    """What a ledger does to the store of a source, in its order.

    source: "" for the store of a recipe without a mixture. MeshfeedError if the ledger names others alone.
    """
    named = sorted({name for _, change in ledger for name in _sources_of(change)})
    if named and source not in named:
        told = ", ".join(map(repr, named))
        given = f"--source {source}: " if source else ""
        raise MeshfeedError(f"{given}the ledger names {told}; give the store's name there, --source NAME")
    found = list[dict[str, Any]]()
    with store:
        for step, change in ledger:
            if isinstance(change, Exclude) and source in change.sources:
                documents = change.all_documents[source]
                if documents.size and documents[-1] >= store.num_documents:
                    raise MeshfeedError(
                        f"the ledger excludes document {documents[-1]:,} of {source!r}, and this store has "
                        f"{store.num_documents:,}; it is another one"
                    )
                tokens = int(store.lengths(documents).sum())
                found.append({"step": step, "excluded": int(documents.size), "tokens": tokens})
            elif isinstance(change, Grow) and change.source == source:
                found.append({"step": step, "grows_by": change.path, "fingerprint": change.fingerprint})
    return found


def _sources_of(change: Change) -> Iterable[str]:
    match change:
        case Exclude():
            return change.sources
        case Grow():
            return [change.source]
        case Reweigh():
            return change.amounts
        case _:
            return []


def _parts_of(store: MultimodalStore) -> dict[str, Any]:
    """Kind -> how many parts the first documents have, and how large they are."""
    parts, found = store.parts(np.arange(min(store.num_documents, _PARTS_OF))), dict[str, Any]()
    for kind in KINDS:
        mine = parts.take(parts.of_kind(kind))
        if not len(mine):
            continue
        sizes = {"pixels": mine.height * mine.width} if kind != "audio" else {}
        sizes |= {"seconds": mine.length / mine.rate} if kind != "image" else {}
        found[kind] = {"parts": len(mine), "bytes": int(mine.num_bytes.sum())} | {
            f"{which}_{name}": round(float(of(values)), 3)
            for name, values in sizes.items()
            for which, of in (("median", np.median), ("most", np.max))
        }
    return found


def look_at_lengths(store: StreamStore) -> DocumentLengths:
    """The lengths of all documents up to 2**20, of 64 blocks of 4,096 in longer stores."""
    size = store.num_documents
    documents = np.arange(min(size, _LOOKED_AT_WHOLE))
    if size > _LOOKED_AT_WHOLE:
        # Whole blocks: neighbours share pages of the index, lone documents would cost a read each.
        starts = [(size - _BLOCK_DOCUMENTS) * i // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS)]
        documents = (np.array(starts)[:, None] + np.arange(_BLOCK_DOCUMENTS)).ravel()
    with store:
        return DocumentLengths(tokens=store.lengths(documents), num_documents=size)


def _beginnings(
    store: StreamStore, chosen: Callable[[int], list[int]], decode: Decode | None
) -> list[tuple[int, list[str]]]:
    """(document, how it begins, cut as `texts_of` cuts it); token ids without a decoder.

    chosen: number of documents -> those.
    Raises StoreError, or MeshfeedError for tokens that the tokenizer does not know.
    """
    found: list[tuple[int, list[str]]] = []
    with store:
        for document in chosen(store.num_documents):
            length = int(store.lengths(np.array([document]))[0])
            bears, texts, end = bearing(store, document, length), list[str](), 0
            for begin, end in shown_ranges(bears, _SHOWN_TOKENS):
                texts += [" … "] if begin else []
                texts += texts_of(store.read(document, begin, end), bears[begin:end], decode or as_ids)
            found.append((document, [*texts, *([" …"] if length > end else [])]))
    return found


def as_ids(tokens: Sequence[int]) -> str:
    """Tokens as numbers."""
    return " ".join(map(str, tokens))


def _part_rule(text: str) -> PartRule:
    """A rule of meshfeed.processors. Raises MeshfeedError."""
    rules = (each for each in vars(meshfeed.processors).values() if isinstance(each, type))
    known = {each.__name__: each for each in rules if issubclass(each, PartRule) and each is not PartRule}
    try:
        name, arguments, options = parsed_call(text)
        return known[name](*arguments, **options)
    except MeshfeedError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        raise MeshfeedError(
            f"--part-rule {text!r}: write a name and options, such as NativeImages(max_pixels=200_000); "
            f"known rules: {', '.join(known)}"
        ) from error


def decoder_of(tokenizer: str) -> Decode:
    """How tokens are read as text. tokenizer: `store.tokenizer.KNOWN`. Raises StoreError for another."""
    made = tokenizer_file(tokenizer).load()
    size = made.vocab_size + (tokenizer == BYTES)  # what ends a document there is no byte

    def decode(tokens: Sequence[int]) -> str:
        strange = next((token for token in tokens if not 0 <= token < size), None)
        if strange is not None:
            raise MeshfeedError(
                f"--tokenizer {tokenizer}: knows tokens below {size:,}, the store has {strange:,}; it is "
                f"another's"
            )
        return made.decode(tokens)

    return decode


def _checksums(store: IndexedStore) -> str:
    if store.wants_ahead:
        return "none" if store.files[0].guarded_by is None else "yes"
    sums = checksums_beside(store.path)
    if sums is None:
        return "none"
    return "yes" if is_of(sums, store.path, store.fingerprint) else "of another store"


def _text_of(document: int, texts: Sequence[str], between: str) -> dict[str, Any]:
    """How a document begins, as JSON-able values; `bears_loss` only where a column says so."""
    bear = [str(each) for each in texts if isinstance(each, Bearing)]
    told = {"document": document, "text": between.join(texts)}
    return told | ({"bears_loss": bear} if bear else {})


def marked(texts: Sequence[str], between: str) -> Text:
    """Texts as the terminal shows them: what bears loss stands in brackets, and is bold."""
    shown = Text()
    for number, each in enumerate(texts):
        bears = isinstance(each, Bearing)
        shown.append(between * bool(number)).append(f"⟦{each}⟧" if bears else each, "bold" if bears else "")
    return shown


def _print(
    facts: dict[str, Any], lengths: DocumentLengths, texts: list[tuple[int, list[str]]], between: str
) -> None:
    console = Console()
    table = Table("", "", show_header=False)
    for name, value in facts.items():
        if name != "loss":
            table.add_row(name.replace("_", " "), shown(value))
    console.print(table, markup=False)
    console.print(f"\n{lengths.title}")
    statistics = Table()
    figures = lengths.statistics()
    for name in figures:
        statistics.add_column(name, justify="right")
    statistics.add_row(*map(shown, figures.values()))
    console.print(statistics)
    console.print()
    console.print(_histogram(lengths))
    if any(isinstance(each, Bearing) for _, cut in texts for each in cut):
        told = f": {told_loss(facts['loss'])}" if "loss" in facts else ""
        console.print(f"\nwhat bears loss stands in ⟦ ⟧{told}", markup=False)
    for document, cut in texts:
        console.print(f"\n[bold]document {document:,}[/bold]")
        console.print(marked(cut, between), soft_wrap=True)


def _histogram(lengths: DocumentLengths) -> Table:
    table = Table("tokens", "documents", "", "of all tokens")
    for column, justify in zip(table.columns, ("right", "right", "left", "right")):
        column.justify = justify
    bins = lengths.bins()
    most = max((each.documents for each in bins), default=0)
    tokens = max(sum(each.tokens for each in bins), 1)
    for each in bins:
        # Rounded up: a bin with any document at all shows.
        bar = "█" * -(-each.documents * _BAR_WIDTH // most)
        table.add_row(each.span, f"{each.documents:,}", f"{bar:{_BAR_WIDTH}}", f"{each.tokens / tokens:.1%}")
    return table
