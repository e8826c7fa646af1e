"""Where a server is, and how to open a connection to it. Pickles as an address."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import context
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from tdio.errors import AuthenticationFailed, ServerTimeout, ServerUnavailable

#: Seconds to wait for a connection, and for the next bytes of a reply, unless the caller says
#: otherwise with redis-py's own arguments of these names.
SOCKET_CONNECT_TIMEOUT_S = 0.8
SOCKET_TIMEOUT_S = 10.0
#: Bytes of replies under way at once, from a server on this host and over a network. Above the
#: first the server copies what it cannot send yet (256 rows of 21 KB: 9.5 ms a batch with 16 MiB,
#: 5.9 ms with 256 KiB); below the second the way there and back is waited for again and again (the
#: same rows over 1 ms of round trip: 54 ms with 256 KiB, 16 ms with 2 MiB).
WINDOW_BYTES, FAR_WINDOW_BYTES = 256 * 1024, 2 * 1024 * 1024
_NEAR = ("localhost", "127.0.0.1", "::1")
#: Options that hold a secret: shown nowhere, and pickled only for a worker process.
_SECRETS = ("password", "ssl_password", "credential_provider")
_SENTINELS = (
    redis.sentinel.SentinelConnectionPool,
    redis.asyncio.sentinel.SentinelConnectionPool,
)
_FROM_CLIENT = (
    *("username", "password", "credential_provider", "protocol", "client_name"),
    *("socket_timeout", "socket_connect_timeout"),
)


@dataclass(frozen=True)
class Address:
    """The address of a server that speaks the Redis protocol.

    Attributes:
        host: host name, for TCP.
        port: port, for TCP.
        db: database number.
        unix_socket_path: path of a Unix socket; ``host`` and ``port`` are then ignored.
        options: further keyword arguments of ``redis.Redis`` (``username``, ``password``,
            ``ssl``, ``protocol``, ``socket_timeout`` in seconds, ...).
    """

    host: str = "localhost"
    port: int = 6379
    db: int = 0
    unix_socket_path: str | None = None
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"{self.unix_socket_path or f'{self.host}:{self.port}'} db={self.db}"

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def timeout_s(self) -> float:
        """Seconds without a byte from the server after which a wait ends."""
        return float(self.options.get("socket_timeout") or SOCKET_TIMEOUT_S)

    @property
    def window_bytes(self) -> int:
        """How many bytes of replies may be under way at once."""
        near = self.unix_socket_path or self.host in _NEAR
        return WINDOW_BYTES if near else FAR_WINDOW_BYTES

    @classmethod
    def of_client(cls, client: Any) -> Address:
        """Return the address of a ``redis.Redis`` or ``redis.asyncio.Redis``.

        Raises:
            TypeError: the client does not tell its server (a cluster or a custom client).
        """
        pool = getattr(client, "connection_pool", None)
        kwargs = getattr(pool, "connection_kwargs", None)
        if pool is None or kwargs is None:
            raise TypeError(
                f"client= takes a redis.Redis or redis.asyncio.Redis, not {type(client).__name__}; "
                "pass host=, port= and db= instead"
            )
        if isinstance(pool, _SENTINELS):
            raise TypeError(
                "a client of a Sentinel names no server of its own; pass host= and port= of the "
                "master, as discover_master tells them"
            )
        options = {k: kwargs[k] for k in _FROM_CLIENT if kwargs.get(k) is not None}
        options |= {k: v for k, v in kwargs.items() if k.startswith("ssl_") and v is not None}
        kinds = (redis.SSLConnection, redis.asyncio.SSLConnection)
        if issubclass(pool.connection_class, kinds):
            options["ssl"] = True
        return cls(
            host=kwargs.get("host", "localhost"),
            port=int(kwargs.get("port", 6379)),
            db=int(kwargs.get("db") or 0),
            unix_socket_path=kwargs.get("path"),
            options=options,
        )

    def open_link(self) -> Any:
        """Open a connection that does round trips."""
        from tdio.transport.link import Link

        return Link(self)

    def connect(self) -> Any:
        """Open a connection: a connected, authenticated ``redis.connection`` object.

        Raises:
            ServerUnavailable: nothing answers at the address.
            ServerTimeout: it accepts and stays silent.
            AuthenticationFailed: wrong user or password. Not retried.
        """
        pool: Any = redis.Redis(**self._kwargs(Retry)).connection_pool
        if pool.connection_class is redis.SSLConnection:
            pool.connection_class = _TlsConnection
        connection = pool.make_connection()
        with self._named_errors():
            connection.connect()
        return connection

    async def connect_async(self) -> Any:
        """Open a connection of ``redis.asyncio`` to the running loop. Raises as ``connect``."""
        client = redis.asyncio.Redis(**self._kwargs(redis.asyncio.retry.Retry))
        pool: Any = client.connection_pool
        connection = pool.make_connection()
        with self._named_errors():
            await connection.connect()
        return connection

    def _kwargs(self, retry: Any) -> dict[str, Any]:
        """Return the arguments of a redis-py client that tries once."""
        kwargs = {
            "socket_connect_timeout": SOCKET_CONNECT_TIMEOUT_S,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "protocol": 2,
            **{k: v for k, v in self.options.items() if v is not None},
            "db": self.db,
            # Ten retries with back-off are redis-py's default: 4 s to report a closed port.
            "retry": retry(NoBackoff(), 0),
        }
        if self.unix_socket_path is not None:
            return kwargs | {"unix_socket_path": self.unix_socket_path}
        return kwargs | {"host": self.host, "port": self.port}

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn redis-py's errors of connecting into ours."""
        try:
            yield
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise AuthenticationFailed(
                f"{self} refused the user or the password ({error}); check username= and password="
            ) from error
        except (redis.TimeoutError, TimeoutError) as error:
            # redis-py's words for the connection and the TLS handshake; else a reply did not come.
            name = "socket_connect_timeout" if "connecting" in str(error) else "socket_timeout"
            limit = float(self._kwargs(Retry)[name])
            raise ServerTimeout(
                f"{self} did not answer within {limit:g} s, the {name}= ({error}); is it up, and "
                f"is the address right?{self._tls_hint()}"
            ) from error
        except (redis.RedisError, OSError) as error:
            if "NOAUTH" in str(error):
                raise AuthenticationFailed(f"{self} asks for a password; pass password=") from error
            cause = error.__cause__ or error.__context__ or error
            if isinstance(cause, ssl.CertificateError):
                raise ServerUnavailable(
                    f"the TLS certificate of {self} is not accepted: {error}; pass ssl_ca_certs= "
                    "of the authority that signed it, and the host= that it is for"
                ) from error
            nobody = isinstance(cause, (ConnectionRefusedError, socket.gaierror))
            raise ServerUnavailable(
                f"no server answers at {self}: {error}; start one, or pass the host=, port= or "
                f"unix_socket_path= of one that runs{'' if nobody else self._tls_hint()}"
            ) from error

    def _tls_hint(self) -> str:
        """Say what ``ssl=`` may have to do with it, at the end of a message."""
        if self.unix_socket_path is not None:
            return ""
        if self.options.get("ssl"):
            return "; if the port does not speak TLS, leave out ssl=True"
        return "; if the port speaks TLS, pass ssl=True"

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        # A secret travels to the workers that this process starts, and into no file.
        if context.get_spawning_popen() is None:
            state["options"] = {k: v for k, v in self.options.items() if k not in _SECRETS}
        return state


class _TlsConnection(redis.SSLConnection):
    """A connection whose TLS handshake has the limit of connecting, not that of a reply."""

    def _connect(self) -> Any:
        reply_s, self.socket_timeout = self.socket_timeout, self.socket_connect_timeout
        try:
            sock = super()._connect()  # type: ignore[no-untyped-call]
        finally:
            self.socket_timeout = reply_s
        sock.settimeout(reply_s)
        return sock
