"""The rows of Arrow streams and files, as `datasets.save_to_disk` and polars write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

_ROWS_TOGETHER = 256


def rows_of(batch: Any, names: Sequence[str], most: int) -> Iterator[dict[str, Any]]:
    """The rows of a batch, of some columns. most: bytes that are converted at a time."""
    some = batch.select(list(names))
    together = max(min(most * max(len(some), 1) // max(some.nbytes, 1), _ROWS_TOGETHER), 1)
    for first in range(0, len(some), together):
        yield from plain_rows(some.slice(first, together))


def plain_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch: JSON of `arrow.json` is what it says, and structs have no nulls.

    A struct has every key of its column's type, so that a null says nothing; `datasets` writes both.
    """
    nested = {each.name: each.type for each in batch.schema if _is_nested(each.type)}
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows if nested else ():
        row.update({name: _plain(row[name], of) for name, of in nested.items()})
    return rows


def kinds_in(schema: Any) -> dict[str, str]:
    """The columns that datasets declares to be parts, in what it writes beside a schema: name -> kind."""
    try:
        said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = said.get("info", {}).get("features", {})
        kinds = {name: _kind_in(feature) for name, feature in features.items()}
    except (ValueError, AttributeError):  # not what datasets writes
        return {}
    return {name: kind for name, kind in kinds.items() if kind is not None and name in schema.names}


def _kind_in(feature: Any) -> str | None:
    """The kind of a feature, or of the items of a list."""
    if isinstance(feature, list):
        return _kind_in(feature[0]) if len(cast(list[Any], feature)) == 1 else None
    said = str(feature.get("_type"))
    if said in ("Sequence", "List", "LargeList"):
        return _kind_in(feature["feature"])
    return said.lower() if said in ("Image", "Audio", "Video") else None


def may_hold_parts(of: Any) -> bool:
    """Whether values of a type can hold pictures or sound: bytes, or a struct of bytes or a path."""
    if str(of).startswith(("list<", "large_list<")):
        return may_hold_parts(of.value_type)
    if (fields := _fields(of)) is not None:
        return any(each.name in ("bytes", "path") for each in fields)
    return str(of) in ("binary", "large_binary")


def _is_nested(of: Any) -> bool:
    """Whether values of a type hold structs or JSON."""
    inner = [of.field(i).type for i in range(of.num_fields)]
    return (
        _fields(of) is not None or _is_json(of) or str(of).startswith("map<") or any(map(_is_nested, inner))
    )


def _is_json(of: Any) -> bool:
    return getattr(of, "extension_name", "") == "arrow.json"


def _fields(of: Any) -> list[Any] | None:
    return [of.field(i) for i in range(of.num_fields)] if str(of).startswith("struct<") else None


def _plain(value: Any, of: Any) -> Any:
    if value is None:
        return None
    if _is_json(of):
        return json.loads(value)
    if (fields := _fields(of)) is not None:
        found = {each.name: _plain(value[each.name], each.type) for each in fields}
        return {name: each for name, each in found.items() if each is not None}
    if str(of).startswith("map<"):
        return dict(cast(list[tuple[Any, Any]], value))
    if isinstance(value, list) and of.num_fields == 1:
        return [_plain(each, of.field(0).type) for each in cast(list[Any], value)]
    return value
