"""The running Python's standard library as a token store."""

from __future__ import annotations

import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from meshfeed.errors import MeshfeedError
from meshfeed.extras import install
from meshfeed.store import IndexedWriter, best_dtype

VOCAB = 2048
BLOCK_BYTES = 1 << 12
"""What is fetched at one time of a remote corpus, and so what each checksum covers."""
_MOST_BYTES = 3_000_000
_TRAINED_ON_BYTES = 500_000
_END = "<|eod|>"
_BATCH = 64
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """What was made.

    Attributes:
        prefix: path of the .bin/.idx pair.
        vocab: tokens known to the tokenizer.
    """

    prefix: str
    vocab: int
    num_files: int
    num_bytes: int
    num_tokens: int

    def facts(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def make_corpus(directory: Path, console: Console) -> Corpus:
    """Train a byte-level BPE on some of the sources, then tokenize a document per file.

    Raises MeshfeedError where the `tokenizers` package or the sources are missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as missing:
        raise MeshfeedError(f"the demo tokenizes text: {install('demo')}") from missing
    texts = _sources()
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with console.status("training a byte-level BPE"):
        tokenizer.train_from_iterator(_first(texts, _TRAINED_ON_BYTES), trainer)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id(_END)
    num_tokens = 0
    with IndexedWriter(directory / "stdlib", best_dtype(VOCAB), checksum_bytes=BLOCK_BYTES) as writer:
        batches = [texts[at : at + _BATCH] for at in range(0, len(texts), _BATCH)]
        for batch in track(batches, "tokenizing", console=console, transient=True):
            for encoding in tokenizer.encode_batch(batch):
                writer.add_document([*encoding.ids, end])
                num_tokens += len(encoding.ids) + 1
    num_bytes = sum(len(text.encode()) for text in texts)
    return Corpus(str(directory / "stdlib"), VOCAB, len(texts), num_bytes, num_tokens)


def _sources() -> list[str]:
    """Python files of the standard library, in the order of their names, up to a few megabytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _NOT_SOURCE & set(path.parts))
    texts = _first([path.read_text(errors="replace") for path in files], _MOST_BYTES)
    if not texts:
        raise MeshfeedError(f"{root}: no Python source of a standard library; is it zipped?")
    return texts


def _first(texts: list[str], num_bytes: int) -> list[str]:
    taken: list[str] = []
    for text in texts:
        if num_bytes <= 0:
            break
        if text:
            taken.append(text)
            num_bytes -= len(text)
    return taken
