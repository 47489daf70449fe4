"""The sequences in the elements of a trainer's iterator: samples, lists, collated rows or packs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from meshfeed.errors import RecipeError
from meshfeed.exchange import Keys
from meshfeed.feed.nested import children_of

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

AXES_FIRST = "(position_ids, axes first)"
"""The name under which position ids [axes, T] are sent, as [T, axes]."""


def per_token_of(keys: Keys) -> frozenset[str]:
    """The keys with one entry per token: Megatron's own, and those that `keys` splits."""
    return _PER_TOKEN - {f.name for f in keys.declared} | {f.name for f in keys.declared if f.split}


def sequences_of(element: Any, keys: Keys | None = None) -> list[dict[str, Any]]:
    """The sequences in an element of a trainer's iterator: a sample, a list of samples, or packed samples.

    Tokens of shape [b, T] are b sequences, [T] are one; any other key then has one entry for each. A sample
    with original_seq_len is cut to it, and one with cu_seqlens is split. position_ids may be [axes, T], or
    beside rows [axes, b, T] or [b, axes, T]; a sequence then has them under `AXES_FIRST`, see `with_axes`. An
    attention_mask of the shape of the tokens has one entry per token; a causal one, [..., T, T], says what
    packs imply and is left out.
    keys: further keys with one entry per token; position_ids and attention_mask are taken as declared.
    Raises RecipeError for anything else, naming the key.
    """
    samples = [element] if isinstance(element, Mapping) else element
    if not isinstance(samples, Sequence) or not all(isinstance(each, Mapping) for each in samples):
        raise RecipeError(f"the data iterator gave {type(element).__name__}; give dicts, or lists of dicts")
    keys = keys or Keys()
    return [sequence for sample in samples for sequence in _apart(sample, keys)]


def with_axes(sequence: Mapping[str, Any]) -> dict[str, Any]:
    """A sequence of `sequences_of` with its position_ids [axes, T] under their own name."""
    made = dict(sequence)
    if (ids := made.pop(AXES_FIRST, None)) is not None:
        made["position_ids"] = ids.movedim(-1, 0)
    return made


def with_axes_last(sample: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """A sample whose position ids have tokens as the first dimension. keys: of the user.

    Raises RecipeError if it is unclear which dimension is which.
    """
    made, ids = dict(sample), sample.get("position_ids")
    shape = tuple(np.shape(sample.get(keys.length, ())))
    if ids is None or len(shape) not in (1, 2) or "position_ids" in keys.by_name():
        return made
    if (moved := _axes_last(ids, shape)) is not None:
        del made["position_ids"]
        made[AXES_FIRST] = moved
    return made


def _apart(sample: Mapping[str, Any], keys: Keys) -> Iterator[dict[str, Any]]:
    length, per_token, declared = keys.length, per_token_of(keys), keys.by_name()
    values = {name: value for name, value in sample.items() if name not in _LENGTHS and value is not None}
    shape = tuple(np.shape(values.get(length, ())))
    if "attention_mask" in values and "attention_mask" not in declared and shape:
        mask = _mask_of(values.pop("attention_mask"), shape)
        if mask is not None:
            values["attention_mask"], per_token = mask, per_token | {"attention_mask"}
    values, per_token = with_axes_last(values, keys), per_token | {AXES_FIRST}
    rows = _rows(values, length, per_token)
    if sample.get("cu_seqlens") is not None:
        if len(rows) != 1:
            raise RecipeError(
                f"a sample with cu_seqlens has {len(rows)} rows of {length!r}; give a dict for each"
            )
        ends = torch.as_tensor(sample["cu_seqlens"]).reshape(-1).tolist()
        padded = sample.get("cu_seqlens_padded")
        starts = ends if padded is None else torch.as_tensor(padded).reshape(-1).tolist()
        sizes = [stop - start for start, stop in pairwise(ends)]
        cuts = [(start, size) for start, size in zip(starts, sizes) if size > 0]
        beside = rows[0].keys() - per_token - {*OVERWRITTEN}
        _refuse_shared({name: rows[0][name] for name in beside}, len(cuts))
        yield from (_cut(rows[0], per_token, start, size) for start, size in cuts)
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
    """Entries of a collated value; 0 for values without: text, a plain number, an object or a namedtuple."""
    if children_of(value) is not None:
        return len(value) if type(value) in (list, tuple) else 0
    shape = np.shape(value)
    return shape[0] if shape else 0


def _refuse_shared(values: Mapping[str, Any], num_sequences: int) -> None:
    """Refuse images and other values of a packed sample: each of its sequences would get all of them."""
    if num_sequences > 1 and (
        held := sorted(name for name, value in values.items() if children_of(value) or np.shape(value))
    ):
        raise RecipeError(
            f"{held} beside {num_sequences} sequences of cu_seqlens cannot be assigned to them; give a dict "
            f"for each sequence; declare keys with one entry per token in Keys, split"
        )


def _axes_last(ids: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Position ids with axes before their tokens, [axes, ...], as [..., axes]; None for all others.

    shape: of the tokens, [T] or [b, T]. Raises RecipeError if it is unclear which dimension is which.
    """
    own, (rows, size) = tuple(np.shape(ids)), (1, *shape)[-2:]
    if own in (shape, (rows, size)) or len(own) not in (2, 3):
        return None
    if len(own) == 2:
        plain, by_axis, by_row = own[0] == size, rows == 1 and own[1] == size, False  # [T, axes], [axes, T]
    else:
        plain, by_axis = own[:2] == (rows, size), own[1:] == (rows, size)  # [b, T, axes], [axes, b, T]
        by_row = (own[0], own[2]) == (rows, size)  # [b, axes, T]
    none = len(own) == 3 and not (plain or by_axis or by_row)
    if none or (plain + by_axis + by_row > 1 and own[:-1] != (1, 1)):  # of one axis, all are the same
        raise RecipeError(
            f"position_ids have shape {own}, {shape} tokens: it is unclear which dimension is which; give "
            f"a dict for each sequence and declare position_ids in Keys, split, as [tokens, axes]"
        )
    if not (by_axis or by_row):
        return None
    ids = torch.as_tensor(ids)
    ids = ids.movedim(0, -1) if by_axis else ids.movedim(1, -1)
    return ids.reshape(*shape, ids.shape[-1])


def _mask_of(mask: Any, shape: tuple[int, ...]) -> Any:
    """An attention mask with one entry per token, in the shape of the tokens; None for one that packs imply.

    Raises RecipeError for a mask that differs from what packs imply.
    """
    size = shape[-1]
    try:
        is_array = isinstance(mask, np.ndarray) and mask.dtype.kind in "biuf"
        mask = mask if is_array else torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise RecipeError(
            f"attention_mask is {type(mask).__name__}; give a tensor with one entry per token, leave it out, "
            f"or declare it in Keys, not split, to get it as it is"
        ) from None
    own = tuple(mask.shape)
    if own == shape or (len(own) in (1, 2) and (1, *own)[-2:] == (1, *shape)[-2:]):  # [T] is a row [1, T]
        return mask.reshape(shape)
    mask = torch.as_tensor(mask)
    if mask.numel() <= 1:  # a stand-in for no mask
        return None
    if size > 1 and mask.shape[-2:] == (size, size):
        seen, hidden = mask.reshape(-1)[[0, 1]]
        causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
        if seen != hidden and bool((mask == torch.where(causal, seen, hidden)).all()):
            return None
    raise RecipeError(
        f"attention_mask has shape {own} for {size} tokens and is not causal, but in a pack "
        f"each sequence attends to itself, causally; leave it out, give one entry per token, or declare it "
        f"in Keys, not split, to get it as it is"
    )


def _cut(values: Mapping[str, Any], per_token: Set[str], start: int, size: int) -> dict[str, Any]:
    """Some tokens of a sequence; keys without an entry per token stay as they are."""
    return {n: value[start : start + size] if n in per_token else value for n, value in values.items()}
