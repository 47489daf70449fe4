"""Text -> tokens, for stores whose documents are text."""

from __future__ import annotations

import hashlib
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError


class Tokenizer:
    """Bytes as they are, or a file of the `tokenizers` package.

    name: "bytes", or the file's path. Raises StoreError, when it is first used, for a file that is none.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        return np.dtype(np.uint8 if self.name == "bytes" else np.uint32)

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that decides its tokens."""
        if self.name == "bytes":
            return "bytes"
        try:
            return hashlib.blake2b(Path(self.name).read_bytes(), digest_size=16).hexdigest()
        except OSError as error:
            raise StoreError(f"{self.name}: {error.strerror}; give 'bytes' or a tokenizer's file") from error

    def encode(self, text: str) -> npt.NDArray[Any]:
        """The tokens of a text; [n] of `dtype`."""
        if self.name == "bytes":
            return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
        return np.array(self._loaded.encode(text, add_special_tokens=False).ids, np.uint32)

    @cached_property
    def _loaded(self) -> Any:
        try:
            return import_module("tokenizers").Tokenizer.from_file(self.name)
        except ImportError as missing:
            raise StoreError(f"{self.name}: needs tokenizers: pip install tokenizers") from missing
        except Exception as error:  # the package raises Exception itself
            raise StoreError(f"{self.name}: no tokenizer: {error}") from error
