"""The lengths of Megatron's mock datasets for packing, from its options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshfeed.errors import StoreError
from meshfeed.store import Lengths

_COUNT = 1_000_000  # the number that Megatron draws


def mock_lengths(config: str | os.PathLike[str] | Mapping[str, Any]) -> Lengths:
    """A store of random tokens with the lengths of Megatron's mock dataset.

    config: the value of --sft-mock-dataset-config-json or --varlen-mock-dataset-config-json: JSON text, a
    JSON file, or the dict itself, with mode "file" (a CSV of lengths) or "distribution" (lognormal, the same
    numbers as Megatron draws). Raises StoreError for another mode or an invalid config.
    """
    try:
        told = dict(config) if isinstance(config, Mapping) else json.loads(_text_of(config))
        if told["mode"] == "file":
            return Lengths.from_file(told["path"])
        if (told["mode"], told["type"]) != ("distribution", "lognormal"):
            raise ValueError("only 'file' and 'distribution' of 'lognormal' have made-up tokens")
        mean, sigma = told["mean_seq_len"], told["lognormal_sigma"]
        rng = np.random.RandomState(0)  # the generator, and the seed, of Megatron's dataset
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, _COUNT)
        return Lengths(drawn.clip(told["min_seq_len"], told["max_seq_len"]).astype(np.int64))
    except (OSError, ValueError, KeyError, TypeError) as bad:
        raise StoreError(f"mock dataset config {config!r}: {type(bad).__name__} {bad}") from bad


def _text_of(config: str | os.PathLike[str]) -> str:
    text = os.fspath(config)
    return text if text.lstrip().startswith("{") else Path(text).read_text()
