"""Pages about plans, runs and documents: data in, one self-contained page out.

`reader` reads a run log; `history` makes a page of it.
"""

from meshfeed.report.reader import DecodeHistory, MixtureHistory, RankHistory, RunHistory, Start, read_run

__all__ = ["DecodeHistory", "MixtureHistory", "RankHistory", "RunHistory", "Start", "read_run"]
