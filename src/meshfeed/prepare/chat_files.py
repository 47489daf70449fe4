"""What a transformers directory says of a tokenizer beside its tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.prepare.chat_template import DEFAULT


def config_in(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; nothing where there is none. Raises StoreError."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    with typed_errors(path):
        try:
            config: Any = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}: not valid JSON: {error}; copy it again") from error
    if not isinstance(config, dict):
        raise StoreError(f"{path}: not a JSON object; copy it again")
    return cast(dict[str, Any], config)


def templates_in(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template, of a folder: files before what the config says."""
    named: Any = config.get("chat_template") or {}
    if isinstance(named, str):
        named = {DEFAULT: named}
    elif isinstance(named, list):
        named = {str(each["name"]): str(each["template"]) for each in cast(list[Any], named)}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    alone = folder / "chat_template.jinja"
    if alone.exists():
        files[DEFAULT] = alone
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()} or named


def special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token and the like, as text."""
    found: dict[str, Any] = {}
    for name, token in config.items():
        text = cast(Any, token).get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
