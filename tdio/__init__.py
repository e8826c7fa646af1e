"""Feed PyTorch training from TensorDicts that live outside the training process."""

from tdio.data import (
    StoreDataset,
    collate_lazy,
    collate_nested,
    collate_pad,
    collate_stack,
    tensordict_collate,
)
from tdio.store import LazyStackedTensorDictStore, TensorDictStore, delete_store, open_store

__version__ = "0.1.0"

__all__ = [
    "LazyStackedTensorDictStore",
    "StoreDataset",
    "TensorDictStore",
    "collate_lazy",
    "collate_nested",
    "collate_pad",
    "collate_stack",
    "delete_store",
    "open_store",
    "tensordict_collate",
]
