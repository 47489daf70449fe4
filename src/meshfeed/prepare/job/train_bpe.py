"""Trains a byte-level BPE on the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshfeed.errors import PrepareError
from meshfeed.extras import install
from meshfeed.files.local.durable import durable_file
from meshfeed.prepare.inputs.records import records
from meshfeed.prepare.job.job import Job
from meshfeed.store.tokenizer import END

TRAINED_ON_BYTES = 256 << 20
"""At most: more text hardly changes which pairs are frequent, and costs memory."""
_LEAST_VOCABULARY = 257  # all bytes, and the end


def train_bpe(path: Path, vocab_size: int, job: Job) -> None:
    """Train on the text of a job's inputs, and write a `tokenizers` JSON file to `path`.

    If there is more text than TRAINED_ON_BYTES, uses parts spread evenly over the inputs. The same
    inputs, cut the same way, give the same file. Raises PrepareError, StoreError.
    """
    if vocab_size < _LEAST_VOCABULARY:
        raise PrepareError(f"--train-bpe {vocab_size}: {_LEAST_VOCABULARY} at least, bytes and an end")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as missing:
        raise PrepareError(f"--train-bpe needs tokenizers: {install('prepare')}") from missing
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(job), trainer)
    with durable_file(path) as stream:
        stream.write(tokenizer.to_str(pretty=True).encode())


def _texts(job: Job) -> Iterator[str]:
    """Text of evenly spread spans; malformed records are left to the encoder."""
    total = sum(each.size_bytes for each in job.request.inputs)
    stride = max(-(-total // TRAINED_ON_BYTES), 1)
    for _, i, begin, end in job.spans[::stride].tolist():
        for record in records(job.request.inputs[i], begin, end, job.reading):
            if record is not None and record.reason is None and isinstance(record.value, str):
                yield record.value
