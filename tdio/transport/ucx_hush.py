"""How a listener becomes quiet before it is destroyed.

UCX 1.21 keeps a client that has connected and not yet said what it wants, on the socket that it
accepted, and where its first words come after the listener is destroyed, it passes them to that:
the process dies. So nothing new is let in, and the sockets of those that are half way are shut
down, whereupon UCX drops them. The listener goes when none is left.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator

#: UCX drops a client whose socket is shut down within a moment, from a thread of its own; a machine
#: that is busy may be late. For so long at most, in seconds, and how often to look.
_LIMIT_S, _STEP_S = 2.0, 1e-3
#: A socket whose peer has reset it no longer says who that was: it is half way too, and gone within
#: a moment, or it is of a connection that its owner has not closed yet. How long to wait for it.
_NAMELESS_S = 0.25
#: A socket that is being accepted is for a moment neither in the queue nor among the descriptors:
#: so many looks in a row must find nothing.
_LOOKS = 3
_SO_ATTACH_FILTER = 26
#: ``struct sock_filter`` of the one instruction "return 0": keep nothing of a packet.
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)
#: ``tcpi_unacked`` of ``struct tcp_info``: of a listening socket, how many wait to be accepted.
_TCP_INFO_BYTES, _UNACKED_AT = 104, 24

#: The address of a socket's other end, host and port; None where it is not connected any more.
Peer = tuple[str, int] | None


def sockets_at(family: int, host: str, port: int) -> set[str]:
    """The names of the process's TCP sockets of a family at an address; of a listener, its own."""
    return {name for name, _ in _sockets(family, host, port)}


def hush(
    family: int,
    host: str,
    port: int,
    others: Collection[str],
    spared: Collection[Peer],
    settle: Callable[[], None],
) -> bool:
    """Let nobody in any more at an address of this process, and turn out who is half way.

    Args:
        family: the address family of the listener there.
        host: its address, as UCX tells it.
        port: its port.
        others: sockets there that are not its own, as ``sockets_at`` tells them.
        spared: the peers whose connections there go on.
        settle: drives UCX, and refuses whom it has announced meanwhile.

    Returns:
        Whether nobody is half way.
    """
    code = c.create_string_buffer(_DROP, len(_DROP))
    program = struct.pack("@HP", 1, c.addressof(code))
    began = time.monotonic()
    limit_s, quiet = _NAMELESS_S, 0
    while time.monotonic() - began < limit_s:
        settle()
        left = 0
        for name, one in _sockets(family, host, port):
            if name in others:
                continue
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                left += _queued(one)
            elif (peer := _peer(one)) not in spared:
                left += 1
                limit_s = _LIMIT_S if peer else limit_s
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        quiet = 0 if left else quiet + 1
        if quiet == _LOOKS:
            break
        time.sleep(_STEP_S)
    # Those that are nameless still are connections that their owners have not closed.
    return quiet == _LOOKS or limit_s == _NAMELESS_S


def _queued(listening: socket.socket) -> int:
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (waiting,) = struct.unpack_from("=I", info, _UNACKED_AT)
    return int(waiting)


def _sockets(family: int, host: str, port: int) -> Iterator[tuple[str, socket.socket]]:
    """Names and copies of the process's sockets at an address, each open until the next.

    Nothing but sockets is touched: to close the copy of a file would drop its locks.
    """
    for number in os.listdir("/proc/self/fd"):
        # Some were closed since they were listed.
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            with _copy(int(number)) as one:
                if one.family == family and one.type == socket.SOCK_STREAM and _at(one, host, port):
                    yield name, one


def _copy(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        blocking = os.get_blocking(copy)
        one = socket.socket(fileno=copy)
        # A default timeout of the process makes it non-blocking, and with it what it is a copy of.
        os.set_blocking(copy, blocking)
    except BaseException:
        os.close(copy)
        raise
    return one


def _peer(one: socket.socket) -> Peer:
    try:
        host, port = one.getpeername()[:2]
    except OSError:
        return None
    return host, port


def _at(one: socket.socket, host: str, port: int) -> bool:
    name = one.getsockname()
    return bool(name[1] == port and host in (name[0], "0.0.0.0", "::"))
