"""What a training loop touches: datasets, collate functions, samplers."""

from tdio.data.collate import (
    collate_lazy,
    collate_nested,
    collate_pad,
    collate_stack,
    tensordict_collate,
)
from tdio.data.dataset import StoreDataset
from tdio.data.nodes import StoreReader
from tdio.data.sampler import StoreBatchSampler

__all__ = [
    "StoreBatchSampler",
    "StoreDataset",
    "StoreReader",
    "collate_lazy",
    "collate_nested",
    "collate_pad",
    "collate_stack",
    "tensordict_collate",
]
