"""What a pipe needs of a transport: messages that are sent and received whole, in order.

A transfer is started, then waited for, by plain code or by a coroutine: so one state machine in
``wire`` serves both faces. A transfer keeps its buffer alive until the transport is done with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Transfer(ABC):
    """One message on its way.

    Attributes:
        nbytes: the size of the message; of a receive, known once it is done.
    """

    nbytes: int

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the buffer is free again: the message arrived, left, or failed."""

    @abstractmethod
    def result(self) -> int:
        """Return the size of the message, or raise what went wrong (``PeerLost``, ...)."""


class Endpoint(ABC):
    """One end of a connection that carries messages.

    Threads may share it, each with calls of its own: on one channel one at a time receives, and
    one at a time sends.

    Attributes:
        name: both addresses, for errors.
        tdio_peer: whether the other end is tdio too, so that its frames may be used; known once
            the endpoint is handed out, and the same answer at both ends.
        accepted: whether a listener accepted this end; None where that is not known. The two ends
            of a handshake must not say the same.
    """

    name: str
    tdio_peer: bool = False
    accepted: bool | None = None

    @abstractmethod
    def send(self, buffer: Any, channel: int = 0) -> Transfer:
        """Start to send a message: anything with the buffer protocol, or a torch tensor.

        Messages of one channel arrive in order. Channel 1 is for acknowledgements between tdio
        peers: they must not wait behind tensordicts that nobody reads yet.
        """

    @abstractmethod
    def probe(self, channel: int = 0) -> int | None:
        """Return the size of the next message that has begun to arrive, or None.

        Moves the transport on. A lost peer: messages that arrived before are still returned, then
        ``PeerLost`` is raised.
        """

    @abstractmethod
    def recv(self, buffer: Any, channel: int = 0) -> Transfer:
        """Start to receive the next message; its buffer is at least as large as the message."""

    @abstractmethod
    def wait(self, ready: Any, timeout_s: float | None) -> None:
        """Block until ``ready()`` is true. Raises ``PeerLost`` or ``PipeTimeout``."""

    @abstractmethod
    async def wait_async(self, ready: Any, timeout_s: float | None) -> None:
        """The same for a coroutine; may be cancelled, which leaves the transfers under way."""

    @abstractmethod
    def flush(self) -> Transfer:
        """Start to wait until everything that was sent has reached the other end's transport."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection at once; buffers of transfers under way are kept until it is safe."""
