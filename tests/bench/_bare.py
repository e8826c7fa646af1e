"""The server's own limit: a bare pipelined client that sends ready commands and counts bytes."""

from __future__ import annotations

import selectors
import socket
from typing import Any

import numpy as np


def encode(key: str, rows: np.ndarray[Any, Any], row_bytes: int) -> tuple[bytes, int]:
    """Return GETRANGE commands for rows of one string, and the bytes of all replies."""
    out = []
    for row in rows.tolist():
        start, end = str(row * row_bytes), str(row * row_bytes + row_bytes - 1)
        out.append(
            f"*4\r\n$8\r\nGETRANGE\r\n${len(key)}\r\n{key}\r\n"
            f"${len(start)}\r\n{start}\r\n${len(end)}\r\n{end}\r\n"
        )
    return "".join(out).encode(), len(rows) * (len(f"${row_bytes}\r\n") + row_bytes + 2)


class Bare:
    """A connection that only counts the bytes of the replies."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        self.scratch = memoryview(bytearray(1 << 20))

    def run(self, commands: bytes, reply_bytes: int) -> None:
        view = memoryview(commands)
        self.selector.modify(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while reply_bytes:
            for _, events in self.selector.select():
                if events & selectors.EVENT_WRITE and view:
                    view = view[self.socket.send(view) :]
                    if not view:
                        self.selector.modify(self.socket, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    reply_bytes -= self.socket.recv_into(self.scratch)

    def close(self) -> None:
        self.selector.close()
        self.socket.close()
