"""What a training loop touches: datasets and collate functions."""

from tdio.data.collate import tensordict_collate
from tdio.data.dataset import StoreDataset

__all__ = ["StoreDataset", "tensordict_collate"]
