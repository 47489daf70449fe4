"""What a rank saw, small enough to send home and to compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

import meshfeed as mf

Seen = dict[str, Any]


def seen_microbatch(microbatch: mf.Microbatch) -> Seen:
    """A microbatch's place, draws and the digest of every field's type, shape and bytes."""
    draws = microbatch.draws
    return {
        "index": microbatch.index,
        "draws": list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())),
        "cp": (microbatch.cp_size, microbatch.cp_rank),
        "fields": {name: digest(value) for name, value in microbatch.items()},
    }


def seen_step(step: Any, microbatches: Iterable[mf.Microbatch]) -> Seen:
    """A step's totals and its microbatches."""
    return {
        "step": step.index,
        "num_microbatches": step.num_microbatches,
        "totals": (step.tokens, step.valid_tokens, step.sum_sq),
        "microbatches": [seen_microbatch(microbatch) for microbatch in microbatches],
    }


def take(steps: Iterable[mf.Step], count: int | None = None) -> list[Seen]:
    """The next `count` steps of a feed, or all; the loop is left by `break`."""
    seen: list[Seen] = []
    if count == 0:
        return seen
    for step in steps:
        seen.append(seen_step(step, step.microbatches))
        if len(seen) == count:
            break
    return seen


def simulated(
    recipe: mf.Recipe, layout: mf.Layout, steps: int | Iterable[int], rank: int, **options: Any
) -> list[Seen]:
    """The same of one rank, by simulation."""
    return [
        {
            "step": made.batch.step,
            "num_microbatches": made.batch.plan.num_microbatches,
            "totals": (made.batch.tokens, made.batch.valid_tokens, made.batch.sum_sq),
            "microbatches": [seen_microbatch(microbatch) for microbatch in made.microbatches],
        }
        for made in mf.simulate(recipe, layout, steps, ranks=[rank], **options)
    ]


def content_of(state: Mapping[str, str]) -> dict[str, Any]:
    """What a state holds."""
    return json.loads(state["meshfeed"])


def digest(value: Any) -> str:
    """Type, shape and bytes of a field in one string."""
    told = hashlib.blake2b(digest_size=12)
    for piece in _pieces(value):
        told.update(piece)
    return f"{_form(value)} {told.hexdigest()}"


def ledger(seen: Iterable[Seen]) -> list[tuple[int, int, int, int, int]]:
    """(step, microbatch, source, epoch, index) of every sequence seen."""
    return [
        (step["step"], microbatch["index"], *draw)
        for step in seen
        for microbatch in step["microbatches"]
        for draw in microbatch["draws"]
    ]


def _pieces(value: Any) -> Iterator[bytes]:
    for piece in [value] if isinstance(value, torch.Tensor) else value:
        if isinstance(piece, torch.Tensor):
            yield np.ascontiguousarray(piece.numpy()).tobytes()
        else:
            yield bytes(piece)


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    return "[" + ",".join(_form(v) if isinstance(v, torch.Tensor) else str(len(v)) for v in value) + "]"


def assembled(microbatches: Iterable[mf.Microbatch]) -> dict[tuple[int, int, int], list[int]]:
    """(source, epoch, index) -> tokens of every sequence, put together from the ranks of one step.

    microbatches: packed, with zigzag, of all first-stage ranks of one tensor-parallel place.
    """
    chunks: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    lengths: dict[tuple[int, int, int], int] = {}
    for microbatch in microbatches:
        draws, cp, rank = microbatch.draws, microbatch.cp_size, microbatch.cp_rank
        names = list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()))
        tokens = microbatch["tokens"][0].tolist()
        real, padded = microbatch["cu_seqlens"].diff().tolist(), microbatch["cu_seqlens_padded"].tolist()
        for name, length, start, stop in zip(names, real, padded, padded[1:]):
            own = tokens[start // cp : stop // cp]
            half = len(own) // 2 if cp > 1 else len(own)
            places = [(rank, own[:half]), (2 * cp - 1 - rank, own[half:])] if cp > 1 else [(0, own)]
            for place, piece in places:
                assert chunks.setdefault(name, {}).setdefault(place, piece) == piece
            lengths[name] = length
    return {
        name: [token for _, piece in sorted(held.items()) for token in piece][: lengths[name]]
        for name, held in chunks.items()
    }
