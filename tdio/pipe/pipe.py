"""``TensorDictPipe``: a channel between two processes that streams tensordicts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from tdio._td import TensorDictBase
from tdio.errors import (
    AuthenticationFailed,
    EndOfStream,
    EventLoopRunning,
    PeerLost,
    PipeClosed,
    ProtocolError,
    TdioError,
)
from tdio.pipe.drive import run, run_async
from tdio.pipe.incoming import Incoming
from tdio.pipe.opening import (
    CONNECT_TIMEOUT_S,
    LISTEN_TIMEOUT_S,
    endpoint_of,
    read_key,
    ucx,
)
from tdio.pipe.outgoing import Packer
from tdio.transport.endpoint import Endpoint
from tdio.transport.tasks import Turn, let_others_run, refuse_in_loop
from tdio.wire.pipe import Protocol
from tdio.wire.pipe_auth import authenticate
from tdio.wire.pipe_reference import ReferenceProtocol
from tdio.wire.pipe_tdio import TdioProtocol

log = logging.getLogger("tdio")

#: More than this is not allocated for one tensordict unless the caller says so.
MAX_MESSAGE_BYTES = 8 << 30
#: How long one wait may take, in seconds.
TIMEOUT_S = 300.0
#: How long ``close`` waits for a peer to read what was sent, in seconds.
CLOSE_TIMEOUT_S = 30.0
#: How long ``close`` waits for a peer that has read everything to notice the end.
_GRACE_S = 2.0
#: After so many calls that did not wait, a coroutine lets others run.
_BREATHE = 32


class TensorDictPipe:
    """A channel between two processes that streams tensordicts over UCX.

    The first tensordict of a schema (keys, shapes, dtypes, non-tensor values) carries its metadata;
    the next ones are their storage only, received into the same buffer: **each receive overwrites
    what the last one returned**; clone what you keep. A tensordict that is consolidated is sent
    without a copy; another one is gathered into a buffer that is used again.

    Make one with ``connect`` at one end and ``listen`` at the other. The other end may be
    tensordict's own pipe.

    Args:
        endpoint: a ``tdio.transport.endpoint.Endpoint`` or a connected ``ucxx.Endpoint``.
        consolidated: one storage for each tensordict, or leaf by leaf. Two ends that are both
            tdio need not agree.
        listener: closed with the pipe.
        on_error: what ``async for`` does when the peer is lost or breaks the protocol: ``"raise"``
            the error, or ``"stop"`` as at the end of the stream, with a warning in the log and the
            exception in ``error``.
        max_message_bytes: a tensordict that is announced larger is refused before memory is taken.
        auth_key: both ends prove that they hold this key (bytes, or a file with it) before any
            tensordict. What follows is neither encrypted nor signed.
        timeout: how many seconds each wait may take: for the next tensordict, for a slow reader.
            None waits for ever.

    Attributes:
        error: what closed the pipe, if it was not ``close``.

    Raises:
        ValueError: ``on_error`` is neither, or the key is empty.
        TransportUnavailable: ``endpoint`` is one of ucxx, which is missing.

    Example:
        >>> import asyncio, torch
        >>> from tensordict import TensorDict
        >>> from tdio import TensorDictPipe
        >>> from tdio.transport.memory import memory_pair
        >>> async def main():
        ...     a, b = map(TensorDictPipe, memory_pair())
        ...     async def produce():
        ...         for i in range(3):
        ...             await a.asend(TensorDict(x=torch.full((2,), i)))
        ...         await a.aclose()
        ...     producer = asyncio.ensure_future(produce())
        ...     async for td in b:
        ...         print(td["x"].tolist())
        ...     await producer
        ...     await b.aclose()
        >>> asyncio.run(main())
        [0, 0]
        [1, 1]
        [2, 2]
    """

    def __init__(
        self,
        endpoint: Any,
        *,
        consolidated: bool = True,
        listener: Any = None,
        on_error: Literal["raise", "stop"] = "raise",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        auth_key: bytes | str | Path | None = None,
        timeout: float | None = TIMEOUT_S,
    ):
        self._closed = True
        if on_error not in ("raise", "stop"):
            raise ValueError(f"on_error is {on_error!r}; it must be 'raise' or 'stop'")
        self._key = read_key(auth_key)
        self._endpoint: Endpoint = endpoint_of(endpoint)
        if self._key is not None and self._endpoint.accepted is None:
            raise ValueError("auth_key= needs a pipe of connect() or listen()")
        self._listener = listener
        self._on_error = on_error
        self._timeout_s = timeout
        self.error: Exception | None = None
        self._send_error: TdioError | None = None
        tdio_peer = self._endpoint.tdio_peer
        self._protocol: Protocol = (
            TdioProtocol(self.name) if tdio_peer else ReferenceProtocol(self.name, consolidated)
        )
        self._packer = Packer(tdio_peer, consolidated)
        self._incoming = Incoming(self.name, max_message_bytes)
        self._send_turn, self._recv_turn, self._auth_turn = Turn(), Turn(), Turn()
        self._calls = 0
        self._closed = False

    # ---- opening

    @classmethod
    async def connect(
        cls, host: str, port: int, *, timeout: float = CONNECT_TIMEOUT_S, **options: Any
    ) -> TensorDictPipe:
        """Connect to a pipe or server that listens; tries again until one answers.

        Args:
            host: a name, an IPv4 or an IPv6 address.
            port: its port.
            timeout: for how many seconds.
            options: see the class; ``wait_timeout`` is its ``timeout``.

        Raises:
            PipeTimeout: nobody listened within ``timeout``.
            PeerLost: the host is unknown.
            AuthenticationFailed: the other end holds another key, or none.
            TransportUnavailable: ucxx is not installed, or cannot work in this process.
        """
        pipe = cls(await ucx().connect_async(host, port, timeout), **_renamed(options))
        await pipe._authenticate_async(timeout)
        return pipe

    @classmethod
    def connect_sync(
        cls, host: str, port: int, *, timeout: float = CONNECT_TIMEOUT_S, **options: Any
    ) -> TensorDictPipe:
        """``connect`` for code without an event loop; same arguments and errors."""
        refuse_in_loop("TensorDictPipe.connect_sync()", "await TensorDictPipe.connect()")
        pipe = cls(ucx().connect(host, port, timeout), **_renamed(options))
        pipe._authenticate(timeout)
        return pipe

    @classmethod
    async def listen(
        cls,
        port: int,
        *,
        host: str | None = None,
        timeout: float | None = LISTEN_TIMEOUT_S,
        on_bound: Callable[[str, int], None] | None = None,
        **options: Any,
    ) -> TensorDictPipe:
        """Wait for one client and return the pipe to it; then the port is free again.

        A client that does not hold the key is refused, with a warning in the log, and the next
        one is waited for. A second client is refused.

        Args:
            port: 0 for any that is free.
            host: the address of the interface to listen on; None for all of IPv4.
            timeout: for how many seconds to wait; None for ever.
            on_bound: called with the address and port once clients can connect.
            options: see the class; ``wait_timeout`` is its ``timeout``.

        Raises:
            PortInUse: something else listens there.
            PipeTimeout: no client came.
            TransportUnavailable: ucxx is not installed, or cannot work in this process.
        """
        listener = ucx().listen(host or "0.0.0.0", port)
        try:
            if on_bound is not None:
                on_bound(listener.host, listener.port)
            while True:
                pipe = cls(await listener.accept_async(timeout), **_renamed(options))
                try:
                    await pipe._authenticate_async(timeout)
                except (AuthenticationFailed, PeerLost) as error:
                    log.warning("a client was refused: %s", error)
                else:
                    return pipe
        finally:
            listener.close()

    @classmethod
    def listen_sync(
        cls,
        port: int,
        *,
        host: str | None = None,
        timeout: float | None = LISTEN_TIMEOUT_S,
        on_bound: Callable[[str, int], None] | None = None,
        **options: Any,
    ) -> TensorDictPipe:
        """``listen`` for code without an event loop; same arguments and errors."""
        refuse_in_loop("TensorDictPipe.listen_sync()", "await TensorDictPipe.listen()")
        listener = ucx().listen(host or "0.0.0.0", port)
        try:
            if on_bound is not None:
                on_bound(listener.host, listener.port)
            while True:
                pipe = cls(listener.accept(timeout), **_renamed(options))
                try:
                    pipe._authenticate(timeout)
                except (AuthenticationFailed, PeerLost) as error:
                    log.warning("a client was refused: %s", error)
                else:
                    return pipe
        finally:
            listener.close()

    def _authenticate(self, timeout_s: float | None) -> None:
        self._auth_turn.acquire(timeout_s, "authentication")
        try:
            if self._key is not None:
                run(self._endpoint, self._proof(self._key), timeout_s)
                self._key = None
        except BaseException as error:
            self._drop(error)
            raise
        finally:
            self._auth_turn.release()

    async def _authenticate_async(self, timeout_s: float | None) -> None:
        await self._auth_turn.acquire_async(timeout_s, "authentication")
        try:
            if self._key is not None:
                await run_async(self._endpoint, self._proof(self._key), timeout_s)
                self._key = None
        except BaseException as error:
            self._drop(error)
            raise
        finally:
            self._auth_turn.release()

    def _proof(self, key: bytes) -> Any:
        return authenticate(key, bool(self._endpoint.accepted), self.name)

    # ---- sending

    async def asend(self, td: TensorDictBase) -> None:
        """Send a tensordict; return when ``td`` may change again.

        That is before the other end has read it: ``aclose`` waits for that. Waits while the other
        end has much left to read. Calls that overlap are sent one after the other.

        Args:
            td: of any batch size, on any device; also a tensorclass (sent as a tensordict) or a
                lazy stack.

        Raises:
            UnsupportedValue: an entry cannot be sent; the pipe stays usable.
            PeerLost: the other end died or closed the pipe.
            PipeTimeout: the other end did not read for ``timeout`` seconds.
            PipeClosed: this end is closed.
        """
        self._check_send()
        if self._key is not None:
            await self._authenticate_async(self._timeout_s)
        await self._send_turn.acquire_async(self._timeout_s, "asend()")
        try:
            self._check_send()
            operation = self._protocol.send(self._packer.pack(td))
            await run_async(self._endpoint, operation, self._timeout_s)
        except BaseException as error:
            self._send_failed(error)
            raise
        finally:
            self._send_turn.release()
        self._calls += 1
        if not self._calls % _BREATHE:
            await let_others_run()

    def send(self, td: TensorDictBase) -> None:
        """``asend`` for code without an event loop; same arguments and errors.

        Raises:
            EventLoopRunning: called inside a running event loop.
        """
        refuse_in_loop("pipe.send()", "await pipe.asend()")
        self._check_send()
        if self._key is not None:
            self._authenticate(self._timeout_s)
        self._send_turn.acquire(self._timeout_s, "send()")
        try:
            self._check_send()
            operation = self._protocol.send(self._packer.pack(td))
            run(self._endpoint, operation, self._timeout_s)
        except BaseException as error:
            self._send_failed(error)
            raise
        finally:
            self._send_turn.release()

    def _check_send(self) -> None:
        self._check_open()
        if self._send_error is not None:
            raise self._send_error

    def _send_failed(self, error: BaseException) -> None:
        if isinstance(error, PeerLost):
            # What the other end sent before it was lost can still be received.
            self._send_error = error
        elif self._protocol.mid_send or isinstance(error, ProtocolError):
            self._drop(error)

    # ---- receiving

    async def arecv(
        self,
        td: TensorDictBase | None = None,
        *,
        device: torch.device | str | None = None,
        keep: bool = False,
    ) -> Any:
        """Receive the next tensordict.

        A call that is cancelled, or runs out of time, while it waits for a tensordict to arrive
        has lost nothing: the next call receives it. One that is interrupted in the middle of a
        tensordict closes the pipe.

        Args:
            td: a consolidated tensordict to receive into, if its layout, size and device match.
            device: where to allocate for a new schema; by default where the sender's storage was.
            keep: return a tensordict that no later receive changes, in memory of its own: the
                same as a clone of the result, without the copy.

        Returns:
            ``td`` if it matched, else the tensordict of the last receive, filled anew, or a new
            one. Its leaves are views of one storage (of one each with ``consolidated=False``).

        Raises:
            EndOfStream: the other end closed the pipe; everything was received.
            PeerLost: it died, or reset the connection.
            ProtocolError: it sent what is not allowed; the pipe is closed.
            PipeTimeout: nothing came for ``timeout`` seconds.
            PipeClosed: this end is closed.
        """
        self._check_open()
        if self._key is not None:
            await self._authenticate_async(self._timeout_s)
        await self._recv_turn.acquire_async(self._timeout_s, "arecv()")
        try:
            self._check_open()
            self._incoming.want(td, None if device is None else _device(device), keep)
            operation = self._protocol.receive(self._incoming)
            result = await run_async(self._endpoint, operation, self._timeout_s)
        except BaseException as error:
            self._recv_failed(error)
            raise
        finally:
            self._recv_turn.release()
        self._calls += 1
        if not self._calls % _BREATHE:
            await let_others_run()
        return result

    def recv(
        self,
        td: TensorDictBase | None = None,
        *,
        device: torch.device | str | None = None,
        keep: bool = False,
    ) -> Any:
        """``arecv`` for code without an event loop; same arguments, result and errors.

        Raises:
            EventLoopRunning: called inside a running event loop.
        """
        refuse_in_loop("pipe.recv()", "await pipe.arecv()")
        self._check_open()
        if self._key is not None:
            self._authenticate(self._timeout_s)
        self._recv_turn.acquire(self._timeout_s, "recv()")
        try:
            self._check_open()
            self._incoming.want(td, None if device is None else _device(device), keep)
            return run(self._endpoint, self._protocol.receive(self._incoming), self._timeout_s)
        except BaseException as error:
            self._recv_failed(error)
            raise
        finally:
            self._recv_turn.release()

    def _recv_failed(self, error: BaseException) -> None:
        fatal = isinstance(error, (PeerLost, ProtocolError, AuthenticationFailed))
        if (fatal or self._protocol.mid_recv) and not isinstance(error, EndOfStream):
            self._drop(error)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Receive until the other end closes the pipe; see ``on_error`` for what else ends it."""
        return self

    async def __anext__(self) -> Any:
        if self._closed and self.error is None:
            raise StopAsyncIteration
        try:
            return await self.arecv()
        except EndOfStream:
            raise StopAsyncIteration from None
        except TdioError as error:
            if self._stops_at(error):
                raise StopAsyncIteration from error
            raise

    def __iter__(self) -> Iterator[Any]:
        """The same for code without an event loop."""
        return self

    def __next__(self) -> Any:
        if self._closed and self.error is None:
            raise StopIteration
        try:
            return self.recv()
        except EndOfStream:
            raise StopIteration from None
        except TdioError as error:
            if self._stops_at(error):
                raise StopIteration from error
            raise

    def _stops_at(self, error: TdioError) -> bool:
        if self._on_error != "stop" or isinstance(error, EventLoopRunning):
            return False
        self.error = self.error or error
        log.warning("the iteration over %s stops at an error: %s", self.name, self.error)
        return True

    # ---- closing

    @property
    def name(self) -> str:
        """Both addresses."""
        return self._endpoint.name

    @property
    def closed(self) -> bool:
        """Whether this end is closed, by a call or by an error."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            why = f": {self.error}" if self.error is not None else ""
            raise PipeClosed(f"the pipe {self.name} is closed{why}") from self.error

    def _drop(self, error: BaseException | None = None) -> None:
        """Close the endpoint at once."""
        if self._closed:
            return
        self._closed = True
        if isinstance(error, Exception):
            self.error = error
        elif error is not None:
            self.error = PipeClosed(f"a call was interrupted by {type(error).__name__} half way")
        if self._listener is not None:
            self._listener.close()
        self._endpoint.close()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """End the stream, wait until the other end has read everything, and close.

        Closing a closed pipe does nothing. The end is closed in any case, also by an error.

        Args:
            timeout: for how many seconds to wait for the other end.

        Raises:
            PeerLost: it closed or died before it had read everything.
            PipeTimeout: it did not read everything in time.
        """
        if self._closed:
            return
        try:
            await self._send_turn.acquire_async(timeout, "aclose()")
            try:
                if not self._closed and self._send_error is None and self._key is None:
                    operation = self._protocol.close()
                    await run_async(self._endpoint, operation, self._limit(timeout))
            finally:
                self._send_turn.release()
        finally:
            self._drop()

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """``aclose`` for code without an event loop; same arguments and errors.

        Raises:
            EventLoopRunning: called inside a running event loop; the pipe stays open.
        """
        if self._closed:
            return
        refuse_in_loop("pipe.close()", "await pipe.aclose()")
        try:
            self._send_turn.acquire(timeout, "close()")
            try:
                if not self._closed and self._send_error is None and self._key is None:
                    run(self._endpoint, self._protocol.close(), self._limit(timeout))
            finally:
                self._send_turn.release()
        finally:
            self._drop()

    def _limit(self, timeout_s: float) -> float:
        return timeout_s if self._protocol.unread else min(timeout_s, _GRACE_S)

    async def __aenter__(self) -> TensorDictPipe:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        # A block that failed has not sent everything: its reader must not see a clean end.
        if error is None:
            await self.aclose()
        else:
            self._drop()

    def __enter__(self) -> TensorDictPipe:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self._drop()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
            self._drop()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"{type(self).__name__}({self.name}, {state})"


def _device(device: torch.device | str | int) -> torch.device:
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """The ``timeout`` of the class, under the name that it has where there is another one."""
    return {"timeout" if name == "wait_timeout" else name: v for name, v in options.items()}
