"""mosaicml-streaming as an oracle, imported without the clients of every cloud that it would bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidden import hidden

_UNUSED = (
    "torchvision",
    "transformers",
    "matplotlib",
    "boto3",
    "botocore",
    "google",
    "azure",
    "oci",
    "paramiko",
    "databricks",
    "alipcs_py",
    "huggingface_hub",
    "tqdm",
    "requests",
)


def imported(keep: Sequence[str] = ()) -> Any:
    """The package `streaming`. keep: packages that are to be imported in earnest."""
    with hidden(set(_UNUSED) - set(keep)):
        import streaming
        import streaming.base.format.mds.reader
        import streaming.base.format.mds.writer
    return streaming
