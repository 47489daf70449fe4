"""litdata as an oracle: its own writer, without the worker processes of `optimize`, and its own reader."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hidden import hidden

_UNUSED = ("boto3", "botocore", "requests", "urllib3", "tifffile", "torchvision", "huggingface_hub")


def imported() -> Any:
    """The package `litdata`."""
    with hidden(_UNUSED):
        import litdata
        import litdata.streaming.writer
    return litdata


def written(folder: Path, items: Sequence[Any], *, chunk_bytes: int = 1 << 13, **options: Any) -> Path:
    """A dataset of these items. options: of litdata's BinaryWriter."""
    writer = imported().streaming.writer.BinaryWriter(str(folder), chunk_bytes=chunk_bytes, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an item that is larger than a chunk should be
        for i, item in enumerate(items):
            writer[i] = item
        writer.done()
    writer.merge()
    return folder


def theirs(folder: Path, cache: Path, **options: Any) -> list[Any]:
    """All items, or blocks, as litdata reads them; from a copy, since it unpacks what is compressed in place."""
    copy = shutil.copytree(folder, cache / "copy")
    dataset = imported().StreamingDataset(str(copy), cache_dir=str(cache), shuffle=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of buffers that nobody may write to
        return [dataset[i] for i in range(len(dataset))]
