"""``TensorDictPipe``: a channel between two processes that streams tensordicts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch

from tdio._td import TensorDictBase
from tdio.errors import EndOfStream, EventLoopRunning, TdioError
from tdio.pipe.channel import AUTH_S, CLOSE_TIMEOUT_S, MAX_MESSAGE_BYTES, TIMEOUT_S, Channel
from tdio.pipe.drive import run, run_async
from tdio.pipe.opening import CONNECT_TIMEOUT_S, LISTEN_TIMEOUT_S, checked, ucx
from tdio.transport.tasks import Limit, let_others_run, refuse_in_loop

__all__ = ["CLOSE_TIMEOUT_S", "MAX_MESSAGE_BYTES", "TIMEOUT_S", "TensorDictPipe"]

log = logging.getLogger("tdio")

#: After so many calls that did not wait, a coroutine lets others run.
_BREATHE = 32


class TensorDictPipe(Channel):
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
            ValueError: there is no such port, or an option has a value that it cannot have.
            TypeError: there is no such option.
            TransportUnavailable: ucxx is not installed, or cannot work in this process.
        """
        options, limit = checked(cls, options), Limit(timeout)
        pipe = cls(await ucx().connect_async(host, port, timeout), **options)
        await pipe._authenticate_async(limit.left())
        return pipe

    @classmethod
    def connect_sync(
        cls, host: str, port: int, *, timeout: float = CONNECT_TIMEOUT_S, **options: Any
    ) -> TensorDictPipe:
        """``connect`` for code without an event loop; same arguments and errors."""
        refuse_in_loop("TensorDictPipe.connect_sync()", "await TensorDictPipe.connect()")
        options, limit = checked(cls, options), Limit(timeout)
        pipe = cls(ucx().connect(host, port, timeout), **options)
        pipe._authenticate(limit.left())
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

        A client that does not prove within 10 s that it holds the key is refused, with a warning
        in the log, and the next one is waited for. A second client is refused.

        Args:
            port: 0 for any that is free.
            host: the address of the interface to listen on; None for all of IPv4.
            timeout: for how many seconds to wait; None for ever.
            on_bound: called with the address and port once clients can connect.
            options: see the class; ``wait_timeout`` is its ``timeout``.

        Raises:
            PortInUse: something else listens there.
            PipeTimeout: no client came that passed.
            AddressUnavailable: ``host`` is no address of this machine.
            ValueError: there is no such port, or an option has a value that it cannot have.
            TypeError: there is no such option.
            TransportUnavailable: ucxx is not installed, or cannot work in this process.
        """
        options, limit = checked(cls, options), Limit(timeout)
        listener = ucx().listen(host or "0.0.0.0", port)
        try:
            if on_bound is not None:
                on_bound(listener.host, listener.port)
            while True:
                pipe = cls(await listener.accept_async(limit), **options)
                try:
                    await pipe._authenticate_async(limit.at_most(AUTH_S))
                except TdioError as error:
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
        options, limit = checked(cls, options), Limit(timeout)
        listener = ucx().listen(host or "0.0.0.0", port)
        try:
            if on_bound is not None:
                on_bound(listener.host, listener.port)
            while True:
                pipe = cls(listener.accept(limit), **options)
                try:
                    pipe._authenticate(limit.at_most(AUTH_S))
                except TdioError as error:
                    log.warning("a client was refused: %s", error)
                else:
                    return pipe
        finally:
            listener.close()

    # ---- sending

    async def _breathe(self) -> None:
        # Before an operation, never behind it: a cancellation would meet what is complete.
        self._calls += 1
        if not self._calls % _BREATHE:
            await let_others_run()

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
        if self._key is not None:
            self._check_send()
            await self._authenticate_async(self._timeout_s)
        await self._send_turn.acquire_async(self._timeout_s, "asend()")
        try:
            await self._breathe()
            self._check_send()
            operation = self._protocol.send(self._packer.pack(td))
            await run_async(self._endpoint, operation, self._timeout_s)
        except BaseException as error:
            self._send_failed(error)
            raise
        finally:
            self._send_turn.release()

    def send(self, td: TensorDictBase) -> None:
        """``asend`` for code without an event loop; same arguments and errors.

        Raises:
            EventLoopRunning: called inside a running event loop.
        """
        refuse_in_loop("pipe.send()", "await pipe.asend()")
        if self._key is not None:
            self._check_send()
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
        if self._key is not None:
            self._check_open()
            await self._authenticate_async(self._timeout_s)
        await self._recv_turn.acquire_async(self._timeout_s, "arecv()")
        try:
            await self._breathe()
            self._check_open()
            self._incoming.want(td, None if device is None else _device(device), keep)
            operation = self._protocol.receive(self._incoming)
            return await run_async(self._endpoint, operation, self._timeout_s)
        except BaseException as error:
            self._recv_failed(error)
            raise
        finally:
            self._recv_turn.release()

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
        if self._key is not None:
            self._check_open()
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


def _device(device: torch.device | str | int) -> torch.device:
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
