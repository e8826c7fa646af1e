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
from tdio.data.pipe_reader import PipeReader
from tdio.data.sampler import StoreBatchSampler
from tdio.data.stream import PipeStream, aresume_position, resume_position

__all__ = [
    "PipeReader",
    "PipeStream",
    "StoreBatchSampler",
    "StoreDataset",
    "StoreReader",
    "aresume_position",
    "collate_lazy",
    "collate_nested",
    "collate_pad",
    "collate_stack",
    "resume_position",
    "tensordict_collate",
]
