"""``StoreReader``: a store as a source of a ``torchdata.nodes`` pipeline."""

from __future__ import annotations

from typing import Any

from torchdata.nodes import BaseNode

from tdio.data.dataset import StoreDataset
from tdio.data.sampler import StoreBatchSampler


class StoreReader(BaseNode[Any]):  # type: ignore[misc]
    """A node that reads the batches of a sampler from a store, one round trip each.

    A pass is an epoch; ``reset()`` begins the next one. The state is that of the sampler, whole
    numbers only: no data.

    Args:
        dataset: what to read.
        sampler: which rows; it belongs to this node from then on.

    Raises:
        StateMismatch: from ``reset`` with a state of other data or another order.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchdata.nodes import Loader, Prefetcher
        >>> from tdio import StoreBatchSampler, StoreDataset, StoreReader, TensorDictStore
        >>> from tdio.server import embedded_server
        >>> with embedded_server() as server:
        ...     data = TensorDict(x=torch.arange(6), batch_size=[6])
        ...     store = TensorDictStore.from_tensordict(data, **server.connection_kwargs)
        ...     reader = StoreReader(StoreDataset(store), StoreBatchSampler(6, 4))
        ...     loader = Loader(Prefetcher(reader, prefetch_factor=2))
        ...     [batch["x"].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5]]
    """

    def __init__(self, dataset: StoreDataset, sampler: StoreBatchSampler) -> None:
        super().__init__()
        self.dataset, self.sampler = dataset, sampler
        self._batches = iter(sampler)
        self._ended = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin a pass: the next epoch, or where ``initial_state`` was taken."""
        super().reset(initial_state)
        self._ended = False
        if initial_state is not None:
            self.sampler.load_state_dict(initial_state["sampler"])
            # At the end of an epoch the sampler has moved on to the next one, but what is left of
            # this pass is nothing: an Unbatcher would skip rows of the next one.
            moved_on = self.sampler.epoch != initial_state["sampler"]["epoch"]
            self._ended = bool(initial_state["ended"]) or moved_on
        self._batches = iter(self.sampler)

    def next(self) -> Any:
        """Return the next batch; see ``StoreDataset.__getitems__``."""
        rows = None if self._ended else next(self._batches, None)
        if rows is None:
            self._ended = True
            raise StopIteration
        return self.dataset.__getitems__(rows)

    def get_state(self) -> dict[str, Any]:
        """Return what ``reset`` takes."""
        return {"sampler": self.sampler.state_dict(), "ended": int(self._ended)}
