"""The part of UCX's C interface (``ucp.h``) that pipes call, bound with ctypes.

ucxx opens the library, its contexts and its workers. What it has no call for (a listener on one
interface or on IPv6, refusing a client, reading the size of a message before there is a buffer)
and what each message needs is called here directly: 2.0-2.8 us for a message of 1 KiB, where
ucxx's request objects took 5.5 us. UCX adds fields behind a mask and keeps the old layout, so the
structures below hold for every 1.x.
"""

from __future__ import annotations

import ctypes as c
import functools
import importlib
import socket
import struct
import sys
from typing import Any

from tdio.errors import TransportUnavailable

OK = 0
IN_PROGRESS = 1
#: A returned pointer at or above this is an error code: unsigned -100 .. -1.
FIRST_ERROR = (1 << 64) - 100
ERR_BUSY = -15
ERR_MESSAGE_TRUNCATED = -9
ERR_CONNECTION_RESET = -25

HOST_MEMORY, CUDA_MEMORY = 0, 1
OP_FLAGS, OP_MEMORY_TYPE, OP_RECV_INFO = 1 << 4, 1 << 6, 1 << 7
STREAM_WAIT_ALL = 1
FORCE_CLOSE = 1
FULL_MASK = (1 << 64) - 1

EP_ERROR_MODE, EP_ERROR_HANDLER, EP_ADDRESS, EP_FLAGS, EP_REQUEST = 2, 4, 16, 32, 64
EP_LOCAL_ADDRESS, EP_REMOTE_ADDRESS = 2, 4
ERRORS_OF_PEER = 1
CLIENT_SERVER = 1
LISTENER_ADDRESS, LISTENER_HANDLER = 1, 4
_SOCKADDR_BYTES = 128


class OpParam(c.Structure):
    """``ucp_request_param_t``."""

    _fields_ = (
        ("mask", c.c_uint32),
        ("flags", c.c_uint32),
        ("request", c.c_void_p),
        ("callback", c.c_void_p),
        ("datatype", c.c_uint64),
        ("user_data", c.c_void_p),
        ("reply_buffer", c.c_void_p),
        ("memory_type", c.c_int),
        ("recv_info", c.c_void_p),
        ("memh", c.c_void_p),
    )


class TagInfo(c.Structure):
    """``ucp_tag_recv_info_t``."""

    _fields_ = (("tag", c.c_uint64), ("length", c.c_size_t))


class SockAddr(c.Structure):
    """``ucs_sock_addr_t``."""

    _fields_ = (("address", c.c_void_p), ("length", c.c_uint32))


class Handler(c.Structure):
    """A callback and its argument."""

    _fields_ = (("callback", c.c_void_p), ("argument", c.c_void_p))


class EpParams(c.Structure):
    """``ucp_ep_params_t``."""

    _fields_ = (
        ("mask", c.c_uint64),
        ("address", c.c_void_p),
        ("error_mode", c.c_int),
        ("error_handler", Handler),
        ("user_data", c.c_void_p),
        ("flags", c.c_uint),
        ("sockaddr", SockAddr),
        ("conn_request", c.c_void_p),
        ("name", c.c_char_p),
        ("local_sockaddr", SockAddr),
    )


class EpAttr(c.Structure):
    """``ucp_ep_attr_t``."""

    _fields_ = (
        ("mask", c.c_uint64),
        ("name", c.c_char * 32),
        ("local", c.c_char * _SOCKADDR_BYTES),
        ("remote", c.c_char * _SOCKADDR_BYTES),
        ("transports", c.c_void_p * 3),
        ("user_data", c.c_void_p),
    )


class ListenerParams(c.Structure):
    """``ucp_listener_params_t``."""

    _fields_ = (
        ("mask", c.c_uint64),
        ("sockaddr", SockAddr),
        ("accept_handler", Handler),
        ("conn_handler", Handler),
    )


class ListenerAttr(c.Structure):
    """``ucp_listener_attr_t``."""

    _fields_ = (("mask", c.c_uint64), ("sockaddr", c.c_char * _SOCKADDR_BYTES))


#: What UCX writes to when it gives an endpoint up: 0 before, then when that was.
Mark = c.c_int64
ConnCallback = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)

_P, _N = c.c_void_p, c.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name without "ucp_": result, arguments
    "worker_arm": (c.c_int8, _P),
    "tag_recv_request_test": (c.c_int8, _P, _P),
    "stream_send_nbx": (_P, _P, _P, _N, _P),
    "stream_recv_nbx": (_P, _P, _P, _N, _P, _P),
    "ep_flush_nbx": (_P, _P, _P),
    "request_check_status": (c.c_int8, _P),
    "request_cancel": (None, _P, _P),
    "request_free": (None, _P),
    "ep_create": (c.c_int8, _P, _P, _P),
    "ep_close_nbx": (_P, _P, _P),
    "ep_query": (c.c_int8, _P, _P),
    "listener_create": (c.c_int8, _P, _P, _P),
    "listener_query": (c.c_int8, _P, _P),
    "listener_reject": (c.c_int8, _P, _P),
    "listener_destroy": (None, _P),
}


#: Those that every message needs: a call with arguments of ``prepare`` takes half the time. ctypes
#: does not look at these: a wrong number of them is a crash.
_PREPARED: dict[str, Any] = {
    "worker_progress": c.c_uint,
    "tag_send_nbx": _P,
    "tag_recv_nbx": _P,
    "tag_probe_nb": _P,
}


def prepare(*arguments: int) -> tuple[Any, ...]:
    """The arguments of one of the ``_PREPARED`` functions, which take nothing else."""
    return tuple(map(c.c_void_p.from_param, arguments))


class Ucp:
    """The functions of the library, without their ``ucp_``."""

    def __init__(self, library: Any):
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, f"ucp_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        for name, result in _PREPARED.items():
            function = getattr(library, f"ucp_{name}")
            function.restype = result
            setattr(self, name, function)
        status = c.CDLL("libucs.so.0").ucs_status_string
        status.restype, status.argtypes = c.c_char_p, [c.c_int8]
        self._status_string = status

    def text(self, status: int) -> str:
        """What an error code means."""
        return str(self._status_string(status).decode())


def marking(mark: Mark) -> Handler:
    """The error handler of an endpoint, which sets ``mark``; that must outlive the endpoint.

    It is libc's ``time(&mark)``, no Python: UCX holds a lock while it calls the handler, and a
    handler in Python may hand the interpreter to a thread that then waits for that lock for ever.
    """
    time = c.cast(c.CDLL(None).time, c.c_void_p)
    return Handler(time, c.addressof(mark))


@functools.cache
def core() -> Any:
    """``ucxx._lib.libucxx``: contexts and workers.

    Raises:
        TransportUnavailable: ucxx is not installed, or does not load here.
    """
    if sys.platform != "linux":
        raise TransportUnavailable("pipes need UCX, which exists for Linux only")
    try:
        library = importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise TransportUnavailable(
            f"pipes need ucxx, which does not load here ({error}); install it with "
            "`pip install 'tdio[ucx]'`, or the ucxx-cu13 package where CUDA is 13"
        ) from error
    return library


@functools.cache
def ucp() -> Any:
    """The functions that keep the interpreter lock: each returns within microseconds.

    Raises:
        TransportUnavailable: ucxx is not installed, or does not load here.
    """
    core()
    return Ucp(c.PyDLL("libucp.so.0"))


@functools.cache
def ucp_unlocked() -> Any:
    """The same, for workers that another thread drives too: these let the other thread run.

    Raises:
        TransportUnavailable: ucxx is not installed, or does not load here.
    """
    core()
    return Ucp(c.CDLL("libucp.so.0"))


def pack_address(family: int, address: Any) -> bytes:
    """``struct sockaddr_in`` or ``sockaddr_in6`` of what ``getaddrinfo`` returned."""
    raw = socket.inet_pton(family, address[0].partition("%")[0])
    if family == socket.AF_INET:
        return struct.pack("=HH4s8x", family, socket.htons(address[1]), raw)
    return struct.pack("=HHI16sI", family, socket.htons(address[1]), 0, raw, address[3])


def unpack_address(raw: bytes) -> tuple[str, int]:
    """Host and port of a ``struct sockaddr``."""
    family, port = struct.unpack_from("=HH", raw)
    at, size = (4, 4) if family == socket.AF_INET else (8, 16)
    return socket.inet_ntop(family, raw[at : at + size]), socket.ntohs(port)


def field_bytes(structure: Any, name: str) -> bytes:
    """The bytes of an array field, past any zero in them."""
    field = getattr(type(structure), name)
    return bytes(memoryview(structure).cast("B")[field.offset : field.offset + field.size])
