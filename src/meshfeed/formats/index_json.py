"""index.json of a dataset, read field by field. An error names the file and the field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from meshfeed.errors import StoreError


@dataclass(frozen=True, slots=True)
class IndexReader:
    """Fields of a foreign index. `where` is the path of the given object; every method raises StoreError.

    Attributes:
        url: of the index.
    """

    url: str

    def refuse(self, where: str, what: str) -> NoReturn:
        raise StoreError(f"{self.url}: {where} {what}; recreate the index, or copy it again")

    def json(self, text: bytes | str, where: str = "it") -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self.refuse(where, f"is not valid JSON: {error}")

    def field(self, given: Any, key: str, where: str = "") -> Any:
        if not isinstance(given, dict):
            self.refuse(where or "it", "is not an object")
        if key not in given:
            self.refuse(_path(where, key), "is missing")
        return cast(Any, given[key])

    def entry(self, given: Any, key: str) -> dict[str, Any]:
        value = self.field(given, key)
        if not isinstance(value, dict):
            self.refuse(key, "is not an object")
        return cast(dict[str, Any], value)

    def listed(self, given: Any, key: str, where: str = "") -> list[Any]:
        value = self.field(given, key, where)
        if not isinstance(value, list):
            self.refuse(_path(where, key), "is not a list")
        return cast(list[Any], value)

    def whole(self, given: Any, key: str, most: int, where: str = "") -> int:
        """A whole number from 0 to `most`."""
        value = self.field(given, key, where)
        if type(value) is not int or not 0 <= value <= most:
            self.refuse(_path(where, key), f"is {str(value)[:50]}; a whole number from 0 to {most} belongs")
        return value

    def text(self, given: Any, key: str, where: str = "") -> str:
        value = self.field(given, key, where)
        if not isinstance(value, str):
            self.refuse(_path(where, key), f"is {str(value)[:50]}; a text belongs there")
        return value

    def refuse_twice(self, where: str, names: Sequence[str]) -> None:
        for name, count in Counter(names).items():
            if count > 1:
                self.refuse(where, f"list the file {name!r} twice")


def _path(where: str, key: str) -> str:
    return f"{where}.{key}".strip(".")
