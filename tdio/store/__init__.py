"""Stores: tensordicts on a server, as TensorDictBase subclasses."""

from tdio.store.lazy import LazyStackedTensorDictStore
from tdio.store.plain import TensorDictStore, open_store
from tdio.store.plain import delete as delete_store

__all__ = ["LazyStackedTensorDictStore", "TensorDictStore", "delete_store", "open_store"]
