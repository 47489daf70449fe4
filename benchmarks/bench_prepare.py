"""Text to tokens: `meshfeed prepare` against Megatron-core's preprocessing and datatrove's tokenizer.

One JSONL of the running Python's own standard library, several times over with the lines of each file in
another order, and one byte-level BPE trained on it; all with the same number of processes. Megatron's tool is
not in its package: its way is re-enacted here with the IndexedDatasetBuilder that is (a pool encodes line by
line, `imap` in chunks of 32; the parent writes each document). datatrove is its LocalPipelineExecutor with
JsonlReader and DocumentTokenizer, without its shuffle. The limit is the tokenizer's own rate: a process per
core that encodes lists of texts and keeps nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
from measure import Row, in_turn, ratio

VOCAB, BATCH = 16_000, 512
END = "<|endoftext|>"
_MEGATRON = """
import json, multiprocessing, sys
corpus, vocab, out, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
class Encoder:
    def start(self):
        from tokenizers import Tokenizer
        Encoder.tokenizer = Tokenizer.from_file(vocab)
        Encoder.end = Encoder.tokenizer.token_to_id("<|endoftext|>")
    def encode(self, line):
        ids = Encoder.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        return ids + [Encoder.end], len(line)
if __name__ == "__main__":
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    encoder = Encoder()
    with multiprocessing.Pool(workers, initializer=encoder.start) as pool, open(corpus) as lines:
        builder = IndexedDatasetBuilder(out + ".bin", dtype=DType.optimal_dtype(16000))
        for ids, size in pool.imap(encoder.encode, lines, 32):
            builder.add_document(ids, [len(ids)])
        builder.finalize(out + ".idx")
"""
_DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    corpus, vocab, out, workers = sys.argv[1:]
    options = dict(tokenizer_name_or_path=vocab, eos_token="<|endoftext|>", shuffle_documents=False)
    steps = [JsonlReader(corpus), DocumentTokenizer(out, **options)]
    tasks = 2 * int(workers)
    LocalPipelineExecutor(steps, tasks=tasks, workers=int(workers), logging_dir=out + "-logs").run()
"""


def measured(short: bool) -> Iterator[Row]:
    """Rates of text."""
    megabytes, rounds, count = (1, 1, 1) if short else (32, 3, len(os.sched_getaffinity(0)))
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        corpus, vocab = make_corpus(folder, megabytes * 1_000_000, vocab=1_000 if short else VOCAB)
        ours = ("-m", "meshfeed", "prepare", corpus, "--out", folder / "ours", "--tokenizer", vocab)
        mega = (script(folder, "mega.py", _MEGATRON), corpus, vocab, folder / "mega", count)
        trove = (script(folder, "trove.py", _DATATROVE), corpus.parent, vocab, folder / "trove", count)
        contestants = {
            "the tokenizer alone": lambda: tokenizer_alone(corpus, vocab, count),
            "meshfeed prepare": lambda: run(folder, "ours", *ours, "--eod-token", END, "--workers", count),
            "Megatron's preprocessing": lambda: run(folder, "mega", *mega),
            "datatrove": lambda: run(folder, "trove", *trove),
        }
        seconds = in_turn(contestants, rounds)
        check_equal(folder, vocab)
    for peer in contestants:
        if peer != "meshfeed prepare":
            yield Row(
                name="rate of text, meshfeed prepare",
                against=peer,
                value=ratio(seconds[peer], seconds["meshfeed prepare"]),
                aim=None if peer == "the tokenizer alone" else 1.0,
                at_least=True,
            )


def make_corpus(folder: Path, num_bytes: int, vocab: int) -> tuple[Path, Path]:
    """(JSONL, tokenizer file)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [each.read_text(errors="replace") for each in sources if "site-packages" not in each.parts]
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(texts[:: 8 * VOCAB // vocab], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    rng, written = random.Random(0), 0
    (folder / "text").mkdir()
    path = folder / "text" / "corpus.jsonl"
    with path.open("w") as stream:
        while written < num_bytes:
            text = "\n".join(rng.sample(lines := rng.choice(texts).splitlines(), len(lines)))
            if text:
                stream.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
    return path, folder / "tokenizer.json"


def script(folder: Path, name: str, text: str) -> Path:
    """A script in a file: what it starts finds it there."""
    (folder / name).write_text(text)
    return folder / name


def run(folder: Path, name: str, *command: object) -> None:
    """A contestant in a process of its own, its old output removed first."""
    for old in folder.glob(f"{name}*"):
        if old.suffix != ".py":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")


def tokenizer_alone(corpus: Path, vocab: Path, workers: int) -> None:
    """Encode all of the text in lists, keeping nothing."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(_encode_share, [(corpus, vocab, each, workers) for each in range(workers)])


def _encode_share(corpus: Path, vocab: Path, worker: int, workers: int) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(vocab))
    with corpus.open() as stream:
        texts = [json.loads(line)["text"] for i, line in enumerate(stream) if i // BATCH % workers == worker]
    for at in range(0, len(texts), BATCH):
        tokenizer.encode_batch_fast(texts[at : at + BATCH], add_special_tokens=False)


def check_equal(folder: Path, vocab: Path) -> None:
    """All ended with the same tokens."""
    ours, theirs = (folder / "ours" / "tokens.bin").read_bytes(), (folder / "mega.bin").read_bytes()
    pieces = sum(each.stat().st_size for each in (folder / "trove").glob("*.ds"))
    if ours != theirs or pieces != len(ours):
        raise SystemExit(f"the ways ended with other tokens: {len(ours)}, {len(theirs)}, {pieces} bytes")


if __name__ == "__main__":
    measure.main(__doc__, measured)
