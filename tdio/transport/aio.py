"""The same operations from a coroutine: an async link and the driver over it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tdio.errors import ServerUnavailable, TdioError
from tdio.transport.address import Address
from tdio.transport.client import BACKOFF_S
from tdio.transport.link import named
from tdio.transport.protocol import GREETING, Protocol, Steps
from tdio.wire.requests import Operation, Pause, Request
from tdio.wire.scatter import spread

T = TypeVar("T")
_MAX_IDLE = 4


class AsyncLink:
    """A connection of ``redis.asyncio`` that belongs to one event loop."""

    def __init__(self, address: Address, connection: Any):
        self._address = address
        self._connection = connection
        self._protocol = Protocol(address, address.window_bytes)
        self.broken = False

    @classmethod
    async def open(cls, address: Address) -> AsyncLink:
        """Open a connection. Raises as ``Address.connect`` and ``exchange``."""
        link = cls(address, await address.connect_async())
        try:
            link._protocol.greeted(await link.exchange(GREETING))
        except BaseException:
            await link.close()
            raise
        return link

    def stale(self) -> bool:
        """Whether the server closed the idle connection."""
        return bool(self._connection._reader.at_eof())

    async def close(self) -> None:
        """Close the connection."""
        self.broken = True
        await self._connection.disconnect()

    async def exchange(self, request: Request) -> Any:
        """Do one round trip. Raises as ``Link.exchange``; cancelled, the link is broken."""
        if isinstance(request, Pause):
            await asyncio.sleep(request.seconds)
            return None
        reader, writer = self._connection._reader, self._connection._writer
        steps = self._protocol.exchange(request)
        self.broken = True
        began = time.monotonic()
        try:
            return await self._drive(steps, reader, writer)
        except OSError as error:
            raise named(error, self._address, began) from error
        finally:
            self.broken = not self._protocol.in_step

    async def _drive(self, steps: Steps, reader: Any, writer: Any) -> Any:
        # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation.
        watch = _Watch(writer.transport, self._address.timeout_s)
        try:
            sending, buffer = next(steps)
            while True:
                watch.start()
                if sending:
                    writer.write(buffer)
                    await writer.drain()
                    sending, buffer = next(steps)
                    continue
                data = await reader.read(sum(map(len, buffer)))
                if not data:
                    raise ServerUnavailable(f"{self._address} closed the connection")
                spread(buffer, data)
                sending, buffer = steps.send(len(data))
        except StopIteration as stop:
            return stop.value
        except OSError:
            if watch.expired:
                raise TimeoutError from None
            raise
        finally:
            watch.stop()


class _Watch:
    """Drops a connection on which nothing has moved for ``limit_s`` seconds."""

    def __init__(self, transport: Any, limit_s: float):
        self.expired = False
        self._transport = transport
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to wait anew."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._expire)

    def stop(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self._transport.abort()


class AsyncClient:
    """A server, seen from one event loop. Operations may run side by side, each on its own link."""

    def __init__(self, address: Address):
        self.address = address
        self._idle: list[AsyncLink] = []
        self._owner = (os.getpid(), asyncio.get_running_loop())

    @property
    def usable(self) -> bool:
        """Whether this is the loop that the links belong to."""
        return self._owner == (os.getpid(), asyncio.get_running_loop())

    async def read(self, operation: Callable[[], Operation[T]]) -> T:
        """Run a read-only operation; as ``Client.read``, from a coroutine."""
        for wait_s in BACKOFF_S:
            try:
                return await self._drive(operation())
            except ServerUnavailable:
                await asyncio.sleep(wait_s)
        return await self._drive(operation())

    async def _drive(self, operation: Operation[T]) -> T:
        link = await self._take()
        try:
            request = next(operation)
            while True:
                try:
                    replies = await link.exchange(request)
                except TdioError as error:
                    request = operation.throw(error)
                    if link.broken:
                        await link.close()
                        link = await self._take()
                else:
                    del request
                    request = operation.send(replies)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException:
            link.broken = True
            raise
        finally:
            operation.close()
            if link.broken or len(self._idle) >= _MAX_IDLE:
                await link.close()
            else:
                self._idle.append(link)

    async def _take(self) -> AsyncLink:
        while self._idle:
            link = self._idle.pop()
            if not link.stale():
                return link
            await link.close()
        return await AsyncLink.open(self.address)

    async def close(self) -> None:
        """Close the connections."""
        while self._idle:
            await self._idle.pop().close()
