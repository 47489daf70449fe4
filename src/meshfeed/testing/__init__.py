"""Laws for your own test suite: a dataset, a recipe and a layout that keep them can be killed anywhere.

    from meshfeed.testing import assert_deterministic, assert_epochs_differ
    from meshfeed.testing import assert_elastic, assert_resumable, assert_roles

Each raises AssertionError that shows the first field, place and value that differ.
"""

from meshfeed.testing.datasets import assert_deterministic, assert_epochs_differ
from meshfeed.testing.difference import difference
from meshfeed.testing.jobs import assert_elastic, assert_resumable, assert_roles

__all__ = [
    "assert_deterministic",
    "assert_elastic",
    "assert_epochs_differ",
    "assert_resumable",
    "assert_roles",
    "difference",
]
