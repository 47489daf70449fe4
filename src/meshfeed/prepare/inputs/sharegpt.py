"""ShareGPT's conversations have from and value; chat templates use role and content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshfeed.errors import StoreError

_ROLE_OF_SPEAKER = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""ShareGPT's name of a speaker -> role."""


def with_role(k: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Message k with role and content instead of ShareGPT's from and value.

    Raises StoreError for an unknown speaker: with a wrong role, its text would wrongly bear loss, or not.
    """
    found = dict(message)
    if found.get("role") is not None or found.get("from") is None:
        return found
    speaker = found.pop("from")
    if not isinstance(speaker, str) or speaker not in _ROLE_OF_SPEAKER:
        raise StoreError(
            f"message {k}: from {speaker!r} is not one of {', '.join(_ROLE_OF_SPEAKER)}; write role and "
            f"content as the chat template knows them"
        )
    return found | {"role": _ROLE_OF_SPEAKER[speaker], "content": found.pop("value", None)}
