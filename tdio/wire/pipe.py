"""What a pipe's protocol asks of its driver, and what it is told.

A protocol is generators: they yield requests, are sent the replies, and know nothing of sockets,
threads or loops. ``mid_send`` and ``mid_recv`` are true while a message is half done: an operation
that ends then, by an error or a cancellation, leaves the pipe unusable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from tdio.errors import ProtocolError

#: Wait for the next message on a channel; the reply is its size. Nothing is received yet, so
#: an operation that is cancelled here has lost nothing.
PROBE: Final = 0
#: The same without waiting: the size or None.
PEEK: Final = 1
#: Send a buffer; the reply comes when the buffer is free again.
SEND: Final = 2
#: Receive the next message into a buffer; the reply is its size.
RECV: Final = 3
#: Wait until what was sent has reached the other end's transport.
FLUSH: Final = 4

DATA: Final = 0
CONTROL: Final = 1

#: ``(what, buffer or None, channel)``
Request = tuple[int, Any, int]
T = TypeVar("T")
PipeOperation = Generator[Request, Any, T]


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A schema as it is announced.

    Attributes:
        identity: the metadata as text, without the size and device of the storage.
        text: the metadata as it is sent.
        nbytes: the size of the storage.
        flags: ``ESCAPED`` or 0.
    """

    identity: str
    text: bytes
    nbytes: int
    flags: int = 0


@dataclass
class Parcel:
    """One tensordict to send: a storage with its schema, or leaf by leaf with a header.

    Attributes:
        cuda: the CUDA devices whose streams fill the buffers.
    """

    buffers: list[torch.Tensor]
    schema: Outgoing | None = None
    header: bytes = b""
    nbytes: int = 0
    cuda: set[torch.device] = field(init=False)

    def __post_init__(self) -> None:
        self.cuda = {buffer.device for buffer in self.buffers if buffer.is_cuda}


class Sink(ABC):
    """Where received tensordicts take shape.

    Attributes:
        nbytes: the size of the storage of the current schema, -1 before the first.
    """

    nbytes: int = -1

    @abstractmethod
    def announce(self, text: bytes, flags: int) -> None:
        """Take a new schema. Raises ProtocolError."""

    @abstractmethod
    def target(self) -> torch.Tensor:
        """Return the storage that the next message is received into."""

    @abstractmethod
    def finish(self) -> Any:
        """Return the tensordict whose storage is full. Raises ProtocolError."""

    @abstractmethod
    def announce_leaves(self, text: bytes) -> list[torch.Tensor]:
        """Take a header; return a buffer for each leaf that follows. Raises ProtocolError."""

    @abstractmethod
    def finish_leaves(self) -> Any:
        """Return the tensordict whose leaves have arrived. Raises ProtocolError."""


class Protocol(ABC):
    """How two ends talk.

    Attributes:
        name: the endpoint, for errors.
        mid_send: a send stopped now would leave half a message.
        mid_recv: a receive stopped now would leave half a message.
    """

    def __init__(self, name: str):
        self.name = name
        self.mid_send = False
        self.mid_recv = False

    @abstractmethod
    def send(self, parcel: Parcel) -> PipeOperation[None]:
        """Send one tensordict."""

    @abstractmethod
    def receive(self, sink: Sink) -> PipeOperation[Any]:
        """Receive one tensordict."""

    @abstractmethod
    def close(self) -> PipeOperation[None]:
        """Tell the other end that nothing more comes, once it has everything."""

    @property
    @abstractmethod
    def unread(self) -> int:
        """How many tensordicts were sent that the other end is not known to have read."""


def receive_exactly(
    buffer: Any, nbytes: int, where: str, what: str, size: int | None = None
) -> PipeOperation[None]:
    """Receive a message that must be ``nbytes`` long; ``size`` is what a probe said, if one did.

    Raises:
        ProtocolError: it is shorter or longer: nothing half filled is ever handed out.
    """
    if size is None:
        size = yield PROBE, None, DATA
    if size == nbytes:
        size = yield RECV, buffer, DATA
    if size != nbytes:
        raise ProtocolError(f"{where} sent {size} bytes where {what} of {nbytes} bytes was due")
