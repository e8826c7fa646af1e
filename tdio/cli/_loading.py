"""The loader that both halves of the demo train from."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from tdio import StoreDataset


def shuffled(dataset: StoreDataset, batch_size: int, workers: int) -> DataLoader[Any]:
    """Return a shuffled loader whose workers live through all epochs."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=dataset.collate_fn,
    )
