"""The lengths of a store's documents: statistics, and a histogram by powers of two."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.report.words import counted

_PERCENTILES = {"p1": 1, "p10": 10, "p25": 25, "median": 50, "p75": 75, "p90": 90, "p99": 99, "p99.9": 99.9}


@dataclass(frozen=True, slots=True)
class Bin:
    """Documents of first..last tokens.

    Attributes:
        first, last: tokens, both inclusive.
        documents: their number.
        tokens: their total.
    """

    first: int
    last: int
    documents: int
    tokens: int

    @property
    def span(self) -> str:
        """The label of the bin in tables and pictures."""
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,}..{self.last:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLengths:
    """Document lengths: of all documents, or of a sample of blocks spread evenly over a huge store.

    Attributes:
        tokens: of each document in the sample; int64 [n].
        num_documents: documents in the store.
    """

    tokens: Longs
    num_documents: int

    @property
    def title(self) -> str:
        if self.tokens.size == self.num_documents:
            return f"tokens per document, {counted(self.num_documents, 'document')}"
        return (
            f"tokens per document, from {self.tokens.size:,} of {self.num_documents:,} documents (blocks "
            f"spread evenly)"
        )

    def statistics(self) -> dict[str, int | float]:
        """Statistics in tokens, and the number of empty documents; {} without documents."""
        if not self.tokens.size:
            return {}
        of_each = np.percentile(self.tokens, list(_PERCENTILES.values())).tolist()
        return {
            "min": int(self.tokens.min()),
            **dict(zip(_PERCENTILES, of_each)),
            "max": int(self.tokens.max()),
            "mean": float(self.tokens.mean()),
            "empty": int((self.tokens == 0).sum()),
        }

    def facts(self) -> dict[str, Any]:
        """Statistics, histogram and number of documents, as JSON-able values."""
        counts = {"looked_at": self.tokens.size, "of": self.num_documents}
        return counts | self.statistics() | {"histogram": [asdict(each) for each in self.bins()]}

    def bins(self) -> list[Bin]:
        """A bin per power of two, from the first non-empty bin to the last."""
        if not self.tokens.size:
            return []
        # 0 -> bin 0, 1 -> 1, 2..3 -> 2, 4..7 -> 3; frexp's exponent is the number of bits
        bits = np.frexp(self.tokens.astype(np.float64))[1]
        counts = np.bincount(bits)
        tokens = np.zeros(counts.size, np.int64)
        np.add.at(tokens, bits, self.tokens)
        some = range(int(np.flatnonzero(counts)[0]), counts.size)
        return [Bin(1 << b >> 1, (1 << b) - 1, int(counts[b]), int(tokens[b])) for b in some]
