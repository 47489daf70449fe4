"""ShareGPT's conversations have from and value; chat templates know role and content."""

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
"""What ShareGPT calls who speaks -> role."""


def with_role(k: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Message k with role and content, where it has ShareGPT's from and value.

    Raises StoreError for a speaker that none of its sets has: a wrong role would bear no loss, or all.
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
