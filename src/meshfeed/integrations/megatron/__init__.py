"""Megatron-core: readers, iterators per virtual stage, `get_batch`, replacements for its schedulers.

from meshfeed.integrations import megatron

feed = megatron.feed(recipe, config, readers="shared", micro_batch_size=2)
iterators = megatron.data_iterators(feed)  # in forward_step: megatron.get_batch(data_iterator)

Megatron-core is imported by the functions that need it, and needs no change.
"""

from meshfeed.integrations.megatron.batch_sizes import batch_of_schedule
from meshfeed.integrations.megatron.batches import MODEL_KEYS, StageBatch, StageIterator, get_batch
from meshfeed.integrations.megatron.config import SCHEDULERS, packing_of
from meshfeed.integrations.megatron.feeds import feed
from meshfeed.integrations.megatron.hybrid import HybridCPDataLoaderWrapper
from meshfeed.integrations.megatron.iterations import begin, data_iterators
from meshfeed.integrations.megatron.mock import mock_lengths
from meshfeed.integrations.megatron.pretrain import DatasetsProvider
from meshfeed.integrations.megatron.schedule import SequencePacking, Wrapped
from meshfeed.integrations.megatron.stages import Readers, is_reader, layout, readers, stage_map

__all__ = [
    "MODEL_KEYS",
    "SCHEDULERS",
    "DatasetsProvider",
    "HybridCPDataLoaderWrapper",
    "Readers",
    "SequencePacking",
    "StageBatch",
    "StageIterator",
    "Wrapped",
    "batch_of_schedule",
    "begin",
    "data_iterators",
    "feed",
    "get_batch",
    "is_reader",
    "layout",
    "mock_lengths",
    "packing_of",
    "readers",
    "stage_map",
]
