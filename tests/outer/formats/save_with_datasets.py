"""Writes saved_by_datasets/ with the real package: `python save_with_datasets.py`, with `pip install datasets`.

Written by datasets 5.2.0. The tests read what lies there, since `datasets` brings pandas; where it is installed, as
in `make frameworks`, they read what it saves.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("saved_by_datasets")
TOKENS = [[7, 8, 9], [], [65_536], list(range(20)), [1], [], [2, 3], [4] * 9]
TEXTS = ["", "plain words", "ünïcödé ☃", "", "a", "b", 'quote " and \n newline', "x" * 30]


def saved(folder: Path) -> Path:
    """A folder with what `datasets` saves; the one beside this file where it is not installed."""
    if importlib.util.find_spec("datasets") is None:
        return FOLDER
    save(folder)
    return folder


def save(folder: Path) -> None:
    import datasets

    rows: dict[str, Any] = {
        "meta": [{"url": f"https://example/{i}", "tags": ["a"] * (i % 3)} for i in range(len(TOKENS))],
        "nothing": [None] * len(TOKENS),
        "picture": [[[i, i], [i, i + 1]] for i in range(len(TOKENS))],
        "flag": [None if i % 3 else True for i in range(len(TOKENS))],
        "text": TEXTS,
        "input_ids": TOKENS,
        "labels": [[-100 if i % 2 else t for i, t in enumerate(row)] for row in TOKENS],
        "pairs": [[i, i + 1] for i in range(len(TOKENS))],
    }
    numbers = datasets.Value("int64")
    features = datasets.Features(
        {
            "meta": {"url": datasets.Value("string"), "tags": datasets.List(datasets.Value("string"))},
            "nothing": datasets.Value("null"),
            "picture": datasets.Array2D((2, 2), "uint8"),
            "flag": datasets.Value("bool"),
            "text": datasets.Value("large_string"),
            "input_ids": datasets.List(datasets.Value("int32")),
            "labels": datasets.LargeList(numbers),
            "pairs": datasets.List(datasets.Value("uint16"), length=2),
        }
    )
    whole = datasets.Dataset.from_dict(rows, features)
    split = datasets.DatasetDict(train=whole, test=whole.select([6, 1]))
    split.save_to_disk(str(folder), num_shards={"train": 2, "test": 1})


if __name__ == "__main__":
    save(FOLDER)
