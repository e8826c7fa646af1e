"""Servers that the tests start, and end: other builds than the embedded one, and TLS."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme

from tdio.server import EmbeddedServer


class ServerOf(EmbeddedServer):
    """The embedded server with another binary: its watchdog ends it with this process."""

    def __init__(self, binary: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._binary = binary

    def _try_start(self, binary: str, deadline: float) -> tuple[str | None, str]:
        return super()._try_start(self._binary, deadline)


@contextmanager
def server_of(binary: str, **kwargs: Any) -> Iterator[EmbeddedServer]:
    """Run a server from its binary."""
    server = ServerOf(binary, **kwargs)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def version_of(binary: str) -> tuple[int, ...]:
    """Return the version that a server's binary states."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20)
    words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return tuple(int(part) for part in words["v"].split("."))


def redis_of_the_system() -> str | None:
    """Return the redis-server that the system's packages have installed, if any."""
    return shutil.which("redis-server")


@contextmanager
def tls_in_front_of(port: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Run a TLS terminator in front of a port of 127.0.0.1; yield the arguments that reach it.

    The servers that wheels bring are built without TLS, so it stands where stunnel would.
    """
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 18):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # One side is gone: so goes the other.
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, behind[1]), carry(behind[0], writer))

    async def stop(front: asyncio.Server) -> None:
        front.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    start = asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    front = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    try:
        yield {
            "host": "127.0.0.1",
            "port": front.sockets[0].getsockname()[1],
            "ssl": True,
            "ssl_ca_certs": str(folder / "authority.pem"),
        }
    finally:
        asyncio.run_coroutine_threadsafe(stop(front), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
