"""Messages between the leader and its clients: JSON and an optional payload of bytes. No pickle."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

from meshfeed import errors
from meshfeed.errors import MeshfeedError, PrepareError, StoreError

VERSION = 3
_HEAD = struct.Struct("<II")
_MOST_BYTES = 1 << 28


def encode(message: dict[str, Any], payload: bytes = b"") -> bytes:
    """A message as bytes."""
    text = json.dumps(message).encode()
    if max(len(text), len(payload)) > _MOST_BYTES:
        raise StoreError(
            f"{max(len(text), len(payload))} bytes in one message between a process and its node's leader "
            f"exceed {_MOST_BYTES}; list a smaller folder or read smaller ranges"
        )
    return _HEAD.pack(len(text), len(payload)) + text + payload


def receive(link: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next message and its payload; None if the other end is closed. Raises OSError."""
    head = _exactly(link, _HEAD.size)
    if head is None:
        return None
    text_size, payload_size = _HEAD.unpack(head)
    if max(text_size, payload_size) > _MOST_BYTES:
        return None
    body = _exactly(link, text_size + payload_size)
    return None if body is None else (json.loads(body[:text_size]), body[text_size:])


def error_to_json(error: MeshfeedError) -> dict[str, str]:
    """An error as plain JSON."""
    return {"kind": (errors.class_of(error) or MeshfeedError).__name__, "text": str(error)}


def error_from_json(error: dict[str, str]) -> MeshfeedError:
    """The error of `error_to_json`; of its own class for storage errors, else a StoreError."""
    kind = getattr(errors, error["kind"], StoreError)
    known = isinstance(kind, type) and issubclass(kind, StoreError | PrepareError)
    return kind(error["text"]) if known else StoreError(error["text"])


def same_user(link: socket.socket) -> bool:
    """Whether the process at the other end of a connection belongs to this user."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _exactly(link: socket.socket, size: int) -> bytes | None:
    pieces: list[bytes] = []
    while size:
        piece = link.recv(min(size, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
