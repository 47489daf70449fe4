"""The sequences in the elements of a trainer's iterator: samples, lists, collated rows or packs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from meshfeed.errors import RecipeError
from meshfeed.exchange import Keys

# every pack has these
OVERWRITTEN = ("padding_mask", "local_cp_size")
# how a sample was padded or packed before
_LENGTHS = (
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "original_seq_len",
    "padded_seq_len",
    "batch_idx",
)
_PER_TOKEN = frozenset({"tokens", "labels", "loss_mask", "position_ids", "padding_mask"})


def per_token_of(keys: Keys) -> frozenset[str]:
    """The keys with one entry per token: Megatron's own, and those that `keys` splits."""
    return _PER_TOKEN - {f.name for f in keys.declared} | {f.name for f in keys.declared if f.split}


def sequences_of(element: Any, keys: Keys | None = None) -> list[dict[str, Any]]:
    """The sequences in an element of a trainer's iterator: a sample, a list of samples, or packed samples.

    Tokens of shape [b, T] are b sequences; any other key then has one entry for each. A sample with
    original_seq_len is cut to it, and one with cu_seqlens is split. An attention_mask of the shape of the
    tokens has one entry per token; any other, such as [1, T, T], has no meaning in a pack and is dropped.
    keys: further keys with one entry per token. Raises RecipeError for anything else.
    """
    samples = [element] if isinstance(element, Mapping) else element
    if not isinstance(samples, Sequence) or not all(isinstance(each, Mapping) for each in samples):
        raise RecipeError(f"the data iterator gave {type(element).__name__}; give dicts, or lists of dicts")
    keys = keys or Keys()
    return [sequence for sample in samples for sequence in _apart(sample, keys.length, per_token_of(keys))]


def _apart(sample: Mapping[str, Any], length: str, per_token: Set[str]) -> Iterator[dict[str, Any]]:
    values = {name: value for name, value in sample.items() if name not in _LENGTHS and value is not None}
    if "attention_mask" in values and "attention_mask" not in per_token:
        if np.shape(values["attention_mask"]) == np.shape(values.get(length, ())):
            per_token = per_token | {"attention_mask"}
        else:
            del values["attention_mask"]
    rows = _rows(values, length, per_token)
    if sample.get("cu_seqlens") is not None:
        if len(rows) != 1:
            raise RecipeError(
                f"a sample with cu_seqlens has {len(rows)} rows of {length!r}; give a dict for each"
            )
        starts = torch.as_tensor(sample["cu_seqlens"]).reshape(-1).tolist()
        padded = torch.as_tensor(sample.get("cu_seqlens_padded", sample["cu_seqlens"])).reshape(-1).tolist()
        sizes = [stop - start for start, stop in pairwise(starts)]
        yield from (_cut(rows[0], per_token, start, size) for start, size in zip(padded, sizes) if size > 0)
    elif sample.get("original_seq_len") is not None:
        sizes = torch.as_tensor(sample["original_seq_len"]).reshape(-1).tolist()
        if len(sizes) != len(rows):
            raise RecipeError(
                f"original_seq_len has {len(sizes)} entries, {length!r} {len(rows)} rows; one each"
            )
        yield from (_cut(row, per_token, 0, size) for row, size in zip(rows, sizes) if size > 0)
    else:
        yield from rows


def _rows(values: Mapping[str, Any], length: str, per_token: Set[str]) -> list[dict[str, Any]]:
    """One dict per row of tokens; those of shape [T] are one row."""
    shape = tuple(np.shape(values[length])) if length in values else ()
    if not shape:
        return [dict(values)]  # `encode` refuses it by name
    rows, size = shape if length in _PER_TOKEN and len(shape) == 2 else (1, shape[0])
    beside = values.keys() - per_token - {*OVERWRITTEN} if rows > 1 else set[str]()
    if unlike := sorted(name for name in beside if _num_entries(values[name]) != rows):
        raise RecipeError(
            f"{unlike} beside {rows} rows of {length!r} cannot be assigned to rows; give one entry per row, "
            f"as collating does, or a dict for each sequence; declare keys with one entry per token in "
            f"Keys, split"
        )
    made: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, value in values.items():
        own = tuple(np.shape(value)) if name in per_token else ()
        # [1, 1] of one token [1] is a row for Megatron's keys, and an entry of a key with further dimensions
        entries = own[:1] == (size,) and (len(own) == 1 or (len(shape) == 1 and name not in _PER_TOKEN))
        by_row = own[:2] == (rows, size) and not entries
        if name in per_token and not by_row and not (rows == 1 and own[:1] == (size,)):
            raise RecipeError(
                f"key {name!r} has shape {own}, {length!r} {shape}; give one entry per token, or declare it "
                f"in Keys, not split"
            )
        for at, row in enumerate(made):
            row[name] = value[at] if by_row or name in beside else value
    return made


def _num_entries(value: Any) -> int:
    """Entries of a collated value; 0 for text and plain numbers."""
    shape = (len(value),) if isinstance(value, list | tuple) else np.shape(value)
    return shape[0] if shape else 0


def _cut(values: Mapping[str, Any], per_token: Set[str], start: int, size: int) -> dict[str, Any]:
    """Some tokens of a sequence; keys without an entry per token stay as they are."""
    return {n: value[start : start + size] if n in per_token else value for n, value in values.items()}
