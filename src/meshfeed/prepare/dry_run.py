"""What the first records of a job become, without a byte written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshfeed.arrays import Array
from meshfeed.errors import PrepareError, StoreError
from meshfeed.files.url import without_secrets
from meshfeed.prepare.encoding.encodings import Encoding, encoder_of, expanded
from meshfeed.prepare.encoding.multimodal import Multimodal
from meshfeed.prepare.inputs.files import KINDS, MULTIMODAL_KINDS, cut, find_inputs
from meshfeed.prepare.inputs.records import (
    HERE,
    RECORD_BYTES,
    Reading,
    encodings_of,
    reason_of,
    records,
    refuse_column,
)
from meshfeed.prepare.inputs.samples import SampleColumns


@dataclass(frozen=True, slots=True)
class Tried:
    """A document that a record becomes, or why it becomes none.

    Attributes:
        input: path or URL of the file.
        record: its number in that file, from 0.
        tokens: int [n].
        loss_mask: of each token; int [n]. None where all bear loss.
        reason: why the record is refused; None if it is not.
    """

    input: str
    record: int
    tokens: Array
    loss_mask: Array | None
    reason: str | None = None


def dry_run(
    inputs: Sequence[str | os.PathLike[str]],
    encoding: Encoding,
    count: int,
    *,
    pattern: str | Sequence[str] | None = None,
    kind: str | None = None,
    max_record_bytes: int = RECORD_BYTES,
    text_encoding: str = "utf-8",
) -> Iterator[Tried]:
    """The first `count` documents that `prepare` would make, and the records before them that it refuses.

    The arguments are those of `prepare`. Raises PrepareError, StoreError, as it does before it begins.
    """
    if encoding.train_bpe is not None:
        raise PrepareError("--dry-run: --train-bpe trains a tokenizer on all text; give --tokenizer instead")
    kinds = MULTIMODAL_KINDS if isinstance(encoding, Multimodal) else KINDS
    names = [os.fspath(each) for each in inputs]
    files, _ = find_inputs(names, pattern=pattern, kind=kind, kinds=kinds)
    refuse_column(encoding, files)
    encoder, columns = encoder_of(encoding.request(), Path()), encoding.columns
    reading = Reading(columns, encodings_of(text_encoding, files).split(","), max_record_bytes)
    is_whole = isinstance(columns, SampleColumns)
    none, left, seen = np.zeros(0, np.int64), count, [0] * len(files)
    for _, i, begin, end in cut(files, columns.names, 1 << 20, whole_rows=is_whole).tolist():
        where = without_secrets(files[i].url)
        for record in records(files[i], begin, end, reading):
            number, seen[i] = seen[i], seen[i] + 1
            if record is None:
                continue
            made, reason = list[Mapping[str, Array]](), record.reason
            if reason is None:
                try:
                    made = encoder.encode(expanded(encoder, record.value), lambda i: HERE)
                except StoreError as error:
                    reason = reason_of(error)
            if reason is not None:
                yield Tried(where, number, none, None, reason)
            for each in made[:left]:
                yield Tried(where, number, each["tokens"], each.get("loss_mask"))
            left -= len(made[:left])
            if not left:
                return
