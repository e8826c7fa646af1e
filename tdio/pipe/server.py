"""``TensorDictServer``: a port, and a pipe for each client that comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from tdio.errors import PipeClosed, PipeTimeout, TdioError
from tdio.pipe.channel import AUTH_S, CLOSE_TIMEOUT_S
from tdio.pipe.opening import checked, ucx
from tdio.pipe.pipe import TensorDictPipe
from tdio.transport.tasks import Tasks

log = logging.getLogger("tdio")

#: How often a server that waits looks whether it was closed, in seconds.
_LOOK_S = 0.25


class TensorDictServer:
    """Accepts clients and gives a ``TensorDictPipe`` for each.

    With ``serve(on_connect)`` each client has a task of its own: its pipe is closed when
    ``on_connect`` returns, and dropped, so that the client sees an error and no clean end, when it
    raises; the exception is logged and the server goes on. With ``async for pipe in server`` the
    pipes are yours to close.

    ``close`` frees the port at once and lets the handlers go on; ``serve`` returns when they have
    ended. ``aclose`` waits for them too, and cancels those that take longer than its timeout.

    Args:
        port: 0 for any that is free; ``port`` tells it once ``start`` was called.
        consolidated: as of the pipes.
        host: the address of the interface to listen on; None for all of IPv4.
        auth_key: as of the pipes; a client without it is refused, with a warning in the log.
        options: other arguments of ``TensorDictPipe``.

    Raises:
        ValueError: the key is empty, or an option has a value that it cannot have.
        TypeError: there is no such option.

    Example:
        >>> import asyncio
        >>> from tdio import TensorDictPipe, TensorDictServer
        >>> async def main():
        ...     async def handler(pipe):
        ...         async for td in pipe:
        ...             print(td["obs"].shape)
        ...     server = TensorDictServer(13337)
        ...     await server.serve(handler)  # until server.close()
    """

    def __init__(
        self,
        port: int,
        *,
        consolidated: bool = True,
        host: str | None = None,
        auth_key: bytes | str | Path | None = None,
        **options: Any,
    ):
        own = {"consolidated": consolidated, "auth_key": auth_key}
        self._options = checked(TensorDictPipe, {**own, **options})
        self.host, self.port = host or "0.0.0.0", port
        self._listener: Any = None
        self._tasks = Tasks()
        self._closed = False

    def start(self) -> TensorDictServer:
        """Listen, so that clients can connect; ``serve`` and ``async for`` do it too.

        Raises:
            PortInUse: something else listens there.
            AddressUnavailable: ``host`` is no address of this machine.
            ValueError: there is no such port.
            PipeClosed: the server was closed.
            TransportUnavailable: ucxx is not installed, or cannot work in this process.
        """
        if self._closed:
            raise PipeClosed(f"the server on port {self.port} is closed; make a new one")
        if self._listener is None:
            self._listener = ucx().listen(self.host, self.port)
            self.host, self.port = self._listener.host, self._listener.port
        return self

    async def _arrived(self) -> Any:
        """Return the endpoint of the next client, None when the server is closed."""
        while not self._closed:
            try:
                return await self._listener.arrive_async(_LOOK_S)
            except PipeTimeout:
                continue
            except PipeClosed:
                break
        return None

    async def _greet(self, arrived: Any) -> TensorDictPipe | None:
        """Return the pipe of a client, None for one that fails in the handshake or the proof."""
        endpoint = await self._listener.greet_async(arrived)
        if endpoint is None:
            return None
        pipe = TensorDictPipe(endpoint, **self._options)
        try:
            await pipe._authenticate_async(AUTH_S)
        except TdioError as error:
            log.warning("a client was refused: %s", error)
            return None
        return pipe

    async def serve(self, on_connect: Callable[[TensorDictPipe], Awaitable[None]]) -> None:
        """Run ``on_connect`` on the pipe of each client, until ``close`` is called.

        Args:
            on_connect: a coroutine function. Its exception is logged and ends its pipe only.

        Raises:
            PortInUse: something else listens on the port.
            TransportUnavailable: ucxx is not installed, or cannot work in this process.
        """
        self.start()
        greeting = Tasks()
        try:
            # Each is greeted in a task of its own: one that says nothing delays no other.
            while (arrived := await self._arrived()) is not None:
                greeting.start(self._welcome(arrived, on_connect), f"greeting {arrived.name}")
            greeting.cancel()
            await self._tasks.finish(None)
        finally:
            # Reached with tasks left when serve itself is cancelled.
            self.close()
            greeting.cancel()
            self._tasks.cancel()

    async def __aiter__(self) -> AsyncIterator[TensorDictPipe]:
        """Yield the pipe of each client, until ``close`` is called."""
        self.start()
        arriving = asyncio.ensure_future(self._arrived())
        greeting: set[asyncio.Future[TensorDictPipe | None]] = set()
        try:
            while True:
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait({arriving, *greeting}, return_when=first)
                if arriving in done:
                    if (arrived := arriving.result()) is None:
                        return
                    greeting.add(asyncio.ensure_future(self._greet(arrived)))
                    arriving = asyncio.ensure_future(self._arrived())
                for task in greeting & done:
                    greeting.discard(task)
                    if (pipe := task.result()) is not None:
                        yield pipe
        finally:
            await _give_up(arriving, greeting)

    async def _welcome(
        self, arrived: Any, on_connect: Callable[[TensorDictPipe], Awaitable[None]]
    ) -> None:
        pipe = await self._greet(arrived)
        if pipe is not None:
            self._tasks.start(_handle(pipe, on_connect), f"the handler of {pipe.name}")

    def close(self) -> None:
        """Stop accepting and free the port. Handlers and pipes go on."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """``close``, then wait for the handlers.

        Args:
            timeout: those that take longer, in seconds, are cancelled and their pipes dropped.
        """
        self.close()
        await self._tasks.finish(timeout)

    async def __aenter__(self) -> TensorDictServer:
        return self.start()

    async def __aexit__(self, *args: Any) -> None:
        await self.aclose()


async def _give_up(
    arriving: asyncio.Future[Any], greeting: set[asyncio.Future[TensorDictPipe | None]]
) -> None:
    """Let go of the clients that nobody takes any more."""
    tasks = {arriving, *greeting}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is None and task.result() is not None:
            (task.result().close if task is arriving else task.result()._drop)()


async def _handle(
    pipe: TensorDictPipe, on_connect: Callable[[TensorDictPipe], Awaitable[None]]
) -> None:
    async with pipe:
        await on_connect(pipe)
