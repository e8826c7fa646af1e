"""``PipeReader``: a stream as a source of a ``torchdata.nodes`` pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode

from tdio.data.stream import PipeStream


class PipeReader(BaseNode[Any]):  # type: ignore[misc]
    """A node that yields the items of a stream; its state is the stream's.

    ``reset()`` begins a pass: a stream of ``connect`` or ``serve`` waits for new connections, one
    over live pipes has one pass. Use ``clone=True`` (the default) where later nodes keep items.

    Args:
        stream: it belongs to this node from then on.

    Raises:
        StateMismatch: from ``reset``: the stream cannot go back to that state.
        PipeClosed: from ``reset``: a second pass over live pipes.

    Example:
        >>> import threading, torch
        >>> from tensordict import TensorDict
        >>> from torchdata.nodes import Loader, Mapper
        >>> from tdio import PipeReader, PipeStream, TensorDictPipe
        >>> from tdio.transport.memory import memory_pair
        >>> writer, reader = map(TensorDictPipe, memory_pair())
        >>> def produce():
        ...     with writer:
        ...         for i in range(3):
        ...             writer.send(TensorDict(x=torch.tensor(i)))
        >>> threading.Thread(target=produce).start()
        >>> node = Mapper(PipeReader(PipeStream(reader)), lambda td: td["x"].item())
        >>> list(Loader(node))
        [0, 1, 2]
    """

    def __init__(self, stream: PipeStream) -> None:
        super().__init__()
        self.stream = stream
        self._items: Iterator[Any] | None = None
        self._ended = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin a pass from its beginning, or where ``initial_state`` was taken."""
        super().reset(initial_state)
        # Its pipes are closed before new ones are opened.
        self._items = None
        self._ended = False
        if initial_state is not None:
            self.stream.load_state_dict(initial_state["stream"])
            self._ended = bool(initial_state["ended"])
        self._items = iter(()) if self._ended else iter(self.stream)

    def next(self) -> Any:
        """Return the next item; see ``PipeStream``."""
        assert self._items is not None
        item = next(self._items, None)
        if item is None:
            self._ended = True
            raise StopIteration
        return item

    def get_state(self) -> dict[str, Any]:
        """Return what ``reset`` takes."""
        return {"stream": self.stream.state_dict(), "ended": int(self._ended)}
