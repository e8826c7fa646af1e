"""Feed PyTorch training from TensorDicts that live outside the training process."""

from tdio.data import (
    PipeReader,
    PipeStream,
    StoreBatchSampler,
    StoreDataset,
    StoreReader,
    aresume_position,
    collate_lazy,
    collate_nested,
    collate_pad,
    collate_stack,
    resume_position,
    tensordict_collate,
)
from tdio.pipe import TensorDictPipe, TensorDictServer, recv_tensordict, send_tensordict
from tdio.store import LazyStackedTensorDictStore, TensorDictStore, delete_store, open_store

__version__ = "0.1.0"

__all__ = [
    "LazyStackedTensorDictStore",
    "PipeReader",
    "PipeStream",
    "StoreBatchSampler",
    "StoreDataset",
    "StoreReader",
    "TensorDictPipe",
    "TensorDictServer",
    "TensorDictStore",
    "aresume_position",
    "collate_lazy",
    "collate_nested",
    "collate_pad",
    "collate_stack",
    "delete_store",
    "open_store",
    "recv_tensordict",
    "resume_position",
    "send_tensordict",
    "tensordict_collate",
]
