"""meshfeed convert: any store that mf.open reads -> a token store."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast, get_args

from meshfeed.cli.command import OK, print_json, say, show_progress
from meshfeed.cli.options import Command, argument, option
from meshfeed.cli.recipes import StorageOptions
from meshfeed.formats.mds_sample import DTYPE_CODES
from meshfeed.prepare.convert import Conversion
from meshfeed.report.words import counted
from meshfeed.store import open_store
from meshfeed.store.base import LabelsAre
from meshfeed.store.index import DTYPES


@dataclass(frozen=True, kw_only=True)
class Convert(Command, StorageOptions):
    """make a token store (.bin/.idx) of MDS, litdata, Parquet or JSON lines

    Write tokens of another format as a token store: the .bin/.idx pair that Megatron reads or, with
    columns beside the tokens, a folder with dataset.json. Documents keep their order and tokens. A column
    must have a number for each token; --drop leaves others behind. Labels are written shifted. The output
    appears whole or not at all; a run that is killed leaves only files called *.tmp, to be deleted.
    """

    examples = """
        meshfeed convert s3://bucket/mds corpus --drop url --drop meta
        meshfeed convert tokens.parquet corpus --column input_ids --dtype int32
    """
    keys = {
        "source, destination, format": "what was read, and what was written",
        "num_documents, num_tokens, columns": "what both hold",
        "dropped": "columns left out",
        "copied, not_copied": "files of values and origins beside the source",
        "size_bytes, elapsed_s": "size of the destination; seconds that this run took",
    }

    source: str = argument("PATH", "path or URL, of any format that mf.open reads")
    destination: str = argument("OUT", "path to write: a prefix, or a folder for columns")
    column: str | None = option("the column of tokens, if there are several", metavar="NAME")
    source_dtype: str | None = option(
        "dtype of raw tokens: of a file without an index, or an MDS column of plain bytes",
        choices=tuple(DTYPE_CODES.values()),
        metavar="DTYPE",
    )
    labels: str | None = option(
        "whether the source's labels are shifted already: have at a token what it predicts",
        choices=get_args(LabelsAre),
    )
    dtype: str | None = option(
        "dtype to write, such as uint16; it must hold every token (default: the source's)",
        choices=[dtype.name for dtype in DTYPES.values()],
        metavar="DTYPE",
    )
    drop: list[str] | None = option(
        "leave this column out (of .bin/.idx also: sequences, modes); may be repeated", metavar="NAME"
    )
    overwrite: bool = option("replace the destination if it is a store", default=False)

    def run(self) -> int:
        begin, drop = time.monotonic(), self.drop or []
        source = open_store(
            self.source,
            column=self.column,
            dtype=self.source_dtype,
            labels=cast(LabelsAre | None, self.labels),
            cache=self.cache,
            options=self.storage_options,
        )
        conversion = Conversion(
            source, self.destination, dtype=self.dtype, drop=drop, overwrite=self.overwrite
        )
        show_progress("converting", conversion.run(), quiet=self.json)
        facts: dict[str, Any] = conversion.facts() | {"elapsed_s": round(time.monotonic() - begin, 3)}
        if self.json:
            print_json(facts)
            return OK
        counts = ", ".join(counted(facts[f"num_{what}s"], what) for what in ("document", "token"))
        dropped = f"; dropped {', '.join(facts['dropped'])}" if facts["dropped"] else ""
        say(
            f"{facts['destination']}: {counts}, {facts['size_bytes']:,} bytes in {facts['elapsed_s']} s; "
            f"columns {', '.join(facts['columns'])}{dropped}"
        )
        if facts["copied"]:
            say(f"copied {', '.join(facts['copied'])}")
        if facts["not_copied"]:
            say(
                f"not copied: {', '.join(facts['not_copied'])}; `meshfeed audit --by` takes the path of such "
                f"values, and `meshfeed trace` names records of the source alone"
            )
        return OK
