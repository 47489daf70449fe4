"""Laws for your own test suite: what keeps them can be split, killed and resumed anywhere.

    from meshfeed.testing import assert_deterministic, assert_epochs_differ
    from meshfeed.testing import assert_elastic, assert_resumable, assert_roles
    from meshfeed.testing import assert_processor, assert_rule, assert_store, assert_tokenizer

Each raises AssertionError that shows the first field, place and value that differ.
"""

from meshfeed.testing.datasets import assert_deterministic, assert_epochs_differ
from meshfeed.testing.difference import difference
from meshfeed.testing.jobs import assert_elastic, assert_resumable, assert_roles
from meshfeed.testing.rules import assert_processor, assert_rule
from meshfeed.testing.stores import assert_store, assert_tokenizer

__all__ = [
    "assert_deterministic",
    "assert_elastic",
    "assert_epochs_differ",
    "assert_processor",
    "assert_resumable",
    "assert_roles",
    "assert_rule",
    "assert_store",
    "assert_tokenizer",
    "difference",
]
