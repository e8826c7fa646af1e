"""Servers that do not speak the protocol, from the start or later: a named error, no hang."""

import asyncio
import contextlib
import socket
import threading

import hiredis
import pytest
from _hostile import cases, little_memory, plain_store, ragged_store, refuses

import tdio
from tdio import LazyStackedTensorDictStore
from tdio.errors import TdioError
from tdio.transport.address import Address
from tdio.transport.aio import AsyncClient
from tdio.wire.requests import Commands


@pytest.fixture(autouse=True)
def limited():
    with little_memory():
        yield


REPLIES = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "nothing at all": b"",
    "half a reply": b"$100\r\nabc",
    "an absurd length": b"$99999999999999\r\nabc",
    "a negative length": b"$-5\r\n",
    "an absurd count": b"*2147483647\r\n",
    "an absurd map": b"%2147483647\r\n",
    "absurd nesting": b"*1\r\n" * 10_000,
    "binary": bytes(range(256)) * 4,
    "numbers": b":1\r\n" * 100,
    "errors": b"-ERR no\r\n" * 100,
    "nothing of each": b"$-1\r\n" * 100,
    "empty lists": b"*0\r\n" * 100,
    "texts": b"$3\r\nabc\r\n" * 100,
    "lists": b"*3\r\n:1\r\n$-1\r\n$3\r\nabc\r\n" * 100,
    "a map whose key is a list": b"%1\r\n*0\r\n+b\r\n" * 100,
}
VALKEY = b"*4\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n$7\r\nversion\r\n"
GREETINGS = {
    "a list for a name": b"*2\r\n*1\r\n+a\r\n+b\r\n",
    "half a list": VALKEY.replace(b"*4", b"*3"),
    "a number": VALKEY + b":100000000000000\r\n",
    "a list": VALKEY + b"*1\r\n+9.0\r\n",
    "an error": VALKEY + b"-ERR no\r\n",
    "many digits": VALKEY + b"$5000\r\n" + b"9" * 5000 + b"\r\n",
    "the future": VALKEY + b"+12.0\r\n",
    "loading": b"-LOADING the dataset\r\n",
}


def reply_of(peer, command):
    """Have the server behind answer a command; return the bytes of its reply."""
    peer.sendall(
        b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in command)
    )
    parser, reply = hiredis.Reader(), b""
    while True:
        data = peer.recv(1 << 20)
        assert data, "the server behind has gone"
        reply += data
        parser.feed(data)
        if parser.gets() is not False:
            return reply


@contextlib.contextmanager
def a_server_that_answers(reply, hit, port):
    """Relays to a server, but answers a command that ``hit`` names with ``reply`` and hangs up."""

    def serve(peer):
        with peer, socket.create_connection(("127.0.0.1", port), timeout=20) as behind:
            parser = hiredis.Reader()
            while data := peer.recv(65536):
                parser.feed(data)
                while command := parser.gets():
                    if hit(command):
                        peer.sendall(reply)
                        return
                    peer.sendall(reply_of(behind, command))

    def accept():
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listening.accept()
                peer.settimeout(20)
                with contextlib.suppress(OSError):
                    serve(peer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield {"host": "127.0.0.1", "port": listening.getsockname()[1], "socket_timeout": 2}
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("reply", cases(REPLIES))
def test_a_server_that_does_not_speak_the_protocol(server, reply):
    def hit(command):
        return command[0] not in (b"CLIENT", b"SELECT", b"PING", b"HELLO")

    with a_server_that_answers(reply, hit, server.port) as kwargs:
        for open_it in (tdio.open_store, LazyStackedTensorDictStore.from_store):
            with pytest.raises(TdioError):
                open_it(td_id="any", **kwargs)


@pytest.mark.parametrize("reply", cases(REPLIES | GREETINGS))
def test_a_server_that_greets_oddly(server, conn, prefix, reply):
    with (
        plain_store(prefix, conn) as plain,
        a_server_that_answers(reply, lambda c: c[0] == b"HELLO", server.port) as kwargs,
    ):
        refuses(kwargs, plain, ["rows"])
        address = Address(kwargs["host"], kwargs["port"], options={"socket_timeout": 2})
        # It may have sent what passes for a reply.
        with contextlib.suppress(TdioError):
            asyncio.run(asked(address))


async def asked(address):
    def operation():
        return (yield Commands([("GET", "a")]))

    return await AsyncClient(address).read(operation)


@pytest.mark.parametrize("reply", cases(REPLIES))
def test_a_server_that_goes_mad_later(server, conn, prefix, reply):
    def hit(command):
        return any(b":d:" in part for part in command[1:2])

    with (
        plain_store(prefix, conn) as plain,
        ragged_store(prefix, conn) as ragged,
        a_server_that_answers(reply, hit, server.port) as kwargs,
    ):
        refuses(kwargs, plain, ["rows"])
        refuses(kwargs, ragged, ["all"])
