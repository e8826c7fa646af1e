"""How a listener becomes quiet before it is destroyed.

UCX 1.21 keeps a client that has connected and not yet said what it wants, on the socket that it
accepted, and where its first words come after the listener is destroyed, it passes them to that:
the process dies. So nothing new is let in, and who is half way gets a moment to say its words.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import os
import socket
import struct
import time
from collections.abc import Callable

#: How long those that are half way get, in seconds, and how often UCX is driven meanwhile.
_MOMENT_S, _STEPS = 5e-3, 5
_SO_ATTACH_FILTER = 26
#: ``struct sock_filter`` of the one instruction "return 0": keep nothing of a packet.
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)


def hush(host: str, port: int, settle: Callable[[], None]) -> None:
    """Let the system drop what comes for the listener of this process at an address.

    Args:
        host: its address, as UCX tells it.
        port: its port.
        settle: drives UCX.
    """
    code = c.create_string_buffer(_DROP, len(_DROP))
    program = struct.pack("@HP", 1, c.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        # Some were closed since they were listed.
        with contextlib.suppress(OSError):
            _drop(os.dup(int(name)), host, port, program)
    for _ in range(_STEPS):
        settle()
        time.sleep(_MOMENT_S / _STEPS)
    settle()


def _drop(descriptor: int, host: str, port: int, program: bytes) -> None:
    """Take the descriptor, a copy, and set the filter where it is the listener's."""
    try:
        one = socket.socket(fileno=descriptor)
    except OSError:
        # Most are no sockets.
        os.close(descriptor)
        return
    with one:
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _at(one, host, port):
            one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _at(one: socket.socket, host: str, port: int) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    name = one.getsockname()
    return bool(name[1] == port and name[0].partition("%")[0] == host)
