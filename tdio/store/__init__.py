"""Stores: tensordicts on a server, as TensorDictBase subclasses."""

from tdio.store.lazy import LazyStackedTensorDictStore
from tdio.store.opening import delete_store, open_store
from tdio.store.plain import TensorDictStore

__all__ = ["LazyStackedTensorDictStore", "TensorDictStore", "delete_store", "open_store"]
