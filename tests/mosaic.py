"""mosaicml-streaming as an oracle, imported without the clients of every cloud that it would bring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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


def written(
    folder: Path, columns: Mapping[str, str], samples: Iterable[Mapping[str, Any]], **options: Any
) -> Path:
    """An MDS dataset of these samples. options: of their MDSWriter."""
    with imported().MDSWriter(out=str(folder), columns=dict(columns), **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder
