"""Pipes over UCX between real processes that die, stop, cheat, sleep and fork."""

import asyncio
import gc
import logging
import multiprocessing as mp
import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("ucxx", reason="ucxx is not installed: pip install 'tdio[ucx]'")

from tdio import TensorDictPipe, TensorDictServer
from tdio.errors import (
    AuthenticationFailed,
    PeerLost,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
    TransportUnavailable,
)
from tdio.transport import ucx
from tdio.wire.frames import Kind, encode_frame
from tests._children import children  # noqa: F401

MIB = 1 << 20
ONE = TensorDict(a=torch.arange(6), b=torch.ones(3))
#: How soon the loss of a peer must be noticed, in seconds.
NOTICED_S = 5


def listening(start, *args):
    """Let a child connect to a pipe that listens; returns the pipe and the child."""
    started = []
    pipe = TensorDictPipe.listen_sync(
        0,
        host="127.0.0.1",
        timeout=30,
        on_bound=lambda host, port: started.append(start(*args[:1], port, *args[1:])),
    )
    return pipe, started[0]


# ---- kill -9, in every phase


def victim(port, phase, ready):
    """Get into a phase, say so, and wait for the end."""
    if phase == "metadata":
        endpoint = ucx.connect("127.0.0.1", port, 20)
        # More than the other end takes in before it reads: the rest stays here.
        transfer = endpoint.send(encode_frame(Kind.SCHEMA, 0, 100, b"[" * (32 * MIB)))
        assert not transfer.done
        ready.send("stuck")
        time.sleep(100)
    pipe = TensorDictPipe.connect_sync("127.0.0.1", port, timeout=20)
    if phase == "between":
        pipe.send(ONE)
    if phase == "storage":
        threading.Timer(0.5, lambda: ready.send("stuck")).start()
        pipe.send(TensorDict(a=torch.ones(64 * MIB, dtype=torch.uint8)))
    ready.send("there")
    time.sleep(100)


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("phase", ["first", "metadata", "storage", "between"])
def test_a_killed_sender_is_noticed_by_its_reader(child, phase, face):
    ours, theirs = mp.Pipe()
    pipe, process = listening(child, victim, phase, theirs)
    assert ours.recv() == ("stuck" if phase in ("metadata", "storage") else "there")
    if phase == "between":
        assert torch.equal(pipe.recv()["a"], ONE["a"])
    if phase == "storage":
        # Else it would be through before it is killed.
        os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, process.kill)
    timer.start()
    began = time.monotonic()
    with pytest.raises(PeerLost):
        pipe.recv() if face == "sync" else asyncio.run(pipe.arecv())
    assert time.monotonic() - began < NOTICED_S
    timer.join()
    assert pipe.closed
    with pytest.raises(PipeClosed, match="lost"):
        pipe.recv()


@pytest.mark.parametrize("nbytes", [1000, 64 * MIB])
def test_a_killed_reader_is_noticed_by_its_sender(child, nbytes):
    ours, theirs = mp.Pipe()
    pipe, process = listening(child, victim, "first", theirs)
    ours.recv()
    timer = threading.Timer(0.5, process.kill)
    timer.start()
    began = time.monotonic()
    with pytest.raises(PeerLost):
        while True:
            pipe.send(TensorDict(a=torch.ones(nbytes, dtype=torch.uint8)))
    assert time.monotonic() - began < NOTICED_S + 0.5
    timer.join()
    pipe.close()
    assert pipe.closed


# ---- interrupted in the middle


def test_a_receive_cancelled_in_the_middle_of_a_storage(child):
    """In tensordict's pipe this is a segmentation fault."""
    for _ in range(3):
        ours, theirs = mp.Pipe()
        pipe, process = listening(child, victim, "storage", theirs)
        assert ours.recv() == "stuck"
        os.kill(process.pid, signal.SIGSTOP)

        async def work(pipe):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pipe.arecv(), 0.3)
            assert pipe.closed
            with pytest.raises(PipeClosed, match="interrupted"):
                await pipe.arecv()

        asyncio.run(work(pipe))
        del pipe
        gc.collect()
        os.kill(process.pid, signal.SIGCONT)
        process.join(NOTICED_S)
        assert process.exitcode == 1


# ---- peers that are not what they should be


@pytest.mark.parametrize(
    "message",
    [b"", b"GET / HTTP/1.1\r\n\r\n", encode_frame(Kind.ACK), encode_frame(Kind.SCHEMA, body=b"{")],
    ids=["nothing", "http", "ack", "schema"],
)
def test_garbage_closes_the_pipe(message):
    def stranger(port):
        endpoint = ucx.connect("127.0.0.1", port, 20)
        endpoint.send(message)
        threads.append(endpoint)

    threads = []
    pipe, thread = listening(in_thread, stranger)
    with pytest.raises(ProtocolError):
        pipe.recv()
    assert pipe.closed
    thread.join()
    threads[0].close()


def in_thread(work, *args):
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def test_a_second_client_is_refused():
    first, ports = [], []

    def begin(host, port):
        ports.append(port)
        in_thread(lambda: first.append(TensorDictPipe.connect_sync(host, port)))

    pipe = TensorDictPipe.listen_sync(0, host="127.0.0.1", on_bound=begin)
    with pytest.raises(PipeTimeout, match=str(ports[0])):
        TensorDictPipe.connect_sync("127.0.0.1", ports[0], timeout=1)
    first[0].send(ONE)
    assert torch.equal(pipe.recv()["a"], ONE["a"])
    first[0]._drop()
    pipe._drop()


def send_with_key(port, key, result):
    try:
        with TensorDictPipe.connect_sync("127.0.0.1", port, timeout=10, auth_key=key) as pipe:
            pipe.send(ONE)
        result.send("sent")
    except (AuthenticationFailed, PeerLost, PipeTimeout) as error:
        result.send(type(error).__name__)


def test_listen_refuses_a_client_without_the_key_and_waits_for_the_next(child, caplog):
    ours, theirs = mp.Pipe()

    def begin(host, port):
        def clients():
            for key in (b"wrong", b"right"):
                child(send_with_key, port, key, theirs).join(20)

        in_thread(clients)

    with caplog.at_level(logging.WARNING, "tdio"):
        pipe = TensorDictPipe.listen_sync(0, host="127.0.0.1", auth_key=b"right", on_bound=begin)
        assert len(list(pipe)) == 1
    pipe.close()
    assert "refused" in caplog.text
    assert ours.recv() in ("AuthenticationFailed", "PeerLost")
    assert ours.poll(10)
    assert ours.recv() == "sent"


def connect_without_a_proof(port, ready):
    endpoint = ucx.connect("127.0.0.1", port, 20)
    ready.send("connected")
    time.sleep(100)
    endpoint.close()


@pytest.mark.parametrize("face", ["sync", "async"])
def test_listen_refuses_a_client_that_does_not_prove_its_key(child, caplog, monkeypatch, face):
    monkeypatch.setattr("tdio.pipe.pipe.AUTH_S", 1.0)
    ours, theirs = mp.Pipe()

    def begin(host, port):
        def clients():
            child(connect_without_a_proof, port, theirs)
            assert ours.recv() == "connected"
            child(send_with_key, port, b"right", theirs)

        in_thread(clients)

    options = {"host": "127.0.0.1", "auth_key": b"right", "timeout": 30, "on_bound": begin}
    with caplog.at_level(logging.WARNING, "tdio"):
        if face == "sync":
            with TensorDictPipe.listen_sync(0, **options) as pipe:
                assert len(list(pipe)) == 1
        else:

            async def work():
                async with await TensorDictPipe.listen(0, **options) as pipe:
                    assert len([td async for td in pipe]) == 1

            asyncio.run(work())
    assert "refused" in caplog.text
    assert ours.poll(10)
    assert ours.recv() == "sent"


def test_listen_gives_up_at_its_limit_although_a_client_proves_nothing(child, caplog):
    ours, theirs = mp.Pipe()
    began = time.monotonic()
    with pytest.raises(PipeTimeout, match="no client came within 3 s"):
        TensorDictPipe.listen_sync(
            0,
            host="127.0.0.1",
            auth_key=b"right",
            timeout=3,
            on_bound=lambda host, port: child(connect_without_a_proof, port, theirs),
        )
    assert time.monotonic() - began < 9
    assert ours.poll(1)
    assert "refused" in caplog.text


@pytest.mark.parametrize(
    ("server_key", "wrong"), [(b"right", b"wrong"), (b"right", None), (None, b"x")]
)
def test_a_server_refuses_other_keys_and_goes_on(child, caplog, server_key, wrong):
    ours, theirs = mp.Pipe()
    got = []

    async def handler(pipe):
        async for td in pipe:
            got.append(td["a"].sum().item())
        server.close()

    async def work():
        async with server:
            process = child(send_with_key, server.port, wrong, theirs)
            serving = asyncio.ensure_future(server.serve(handler))
            await asyncio.to_thread(process.join, 20)
            child(send_with_key, server.port, server_key, theirs)
            await asyncio.wait_for(serving, 30)

    server = TensorDictServer(0, host="127.0.0.1", auth_key=server_key)
    with caplog.at_level(logging.WARNING, "tdio"):
        asyncio.run(work())
    assert got == [15]
    assert ours.recv() != "sent"
    assert ours.recv() == "sent"
    assert caplog.records


# ---- servers


def send_three(port, result):
    pipe = TensorDictPipe.connect_sync("127.0.0.1", port, timeout=20)
    try:
        for _ in range(3):
            pipe.send(ONE)
        pipe.close()
        result.send("read")
    except PeerLost:
        result.send("lost")


def test_a_handler_that_raises_is_logged_and_ends_its_pipe_only(child, caplog):
    ours, theirs = mp.Pipe()
    served = []

    async def handler(pipe):
        served.append(pipe)
        await pipe.arecv()
        if len(served) == 1:
            raise KeyError("broken handler")
        async for _ in pipe:
            pass
        server.close()

    async def work():
        async with server:
            serving = asyncio.ensure_future(server.serve(handler))
            first = child(send_three, server.port, theirs)
            await asyncio.to_thread(first.join, 20)
            child(send_three, server.port, theirs)
            await asyncio.wait_for(serving, 30)

    server = TensorDictServer(0, host="127.0.0.1")
    with caplog.at_level(logging.ERROR, "tdio"):
        asyncio.run(work())
    assert "broken handler" in caplog.text
    assert [ours.recv(), ours.recv()] == ["lost", "read"]
    assert all(pipe.closed for pipe in served)


def say_nothing(port, ready):
    """Connect as UCX does, and stay silent."""
    endpoint = ucx._dial("silent", socket.AF_INET, ("127.0.0.1", port))
    while True:
        endpoint._worker.step()
        ready.set()
        time.sleep(0.01)


@pytest.mark.parametrize("face", ["serve", "async for"])
def test_clients_that_say_nothing_delay_no_other(child, face):
    ours, theirs = mp.Pipe()
    ready = mp.get_context("forkserver").Event()

    async def handler(pipe):
        async for _ in pipe:
            pass
        server.close()

    async def taken():
        async for pipe in server:
            async with pipe:
                await handler(pipe)

    async def work():
        async with server:
            serving = asyncio.ensure_future(server.serve(handler) if face == "serve" else taken())
            for _ in range(3):
                child(say_nothing, server.port, ready)
            while not ready.is_set():
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            child(send_three, server.port, theirs)
            assert await asyncio.to_thread(ours.poll, 20)
            return ours.recv(), serving

    server = TensorDictServer(0, host="127.0.0.1")
    # Three handshakes that run out one after the other would take longer.
    ucx_handshake = ucx.HANDSHAKE_S
    ucx.HANDSHAKE_S = 60
    try:
        said, _ = asyncio.run(asyncio.wait_for(work(), 50))
    finally:
        ucx.HANDSHAKE_S = ucx_handshake
    assert said == "read"


def test_closing_a_server_lets_handlers_finish_and_aclose_cancels_the_slow(child):
    for close in ("close", "aclose"):
        ours, theirs = mp.Pipe()
        ended = []

        async def handler(pipe):
            try:
                await pipe.arecv()
                server.close()  # noqa: B023
                await asyncio.sleep(0.5 if close == "close" else 50)  # noqa: B023
                async for _ in pipe:
                    pass
                ended.append("finished")  # noqa: B023
            except asyncio.CancelledError:
                ended.append("cancelled")  # noqa: B023
                raise

        async def work():
            serving = asyncio.ensure_future(server.serve(handler))  # noqa: B023
            child(send_three, server.start().port, theirs)  # noqa: B023
            while not server._closed:  # noqa: B023
                await asyncio.sleep(0.05)
            if close == "aclose":  # noqa: B023
                await server.aclose(timeout=0.2)  # noqa: B023
            await asyncio.wait_for(serving, 30)

        server = TensorDictServer(0, host="127.0.0.1")
        asyncio.run(work())
        assert ended == ["finished" if close == "close" else "cancelled"]
        assert ours.poll(20)
        assert ours.recv() == ("read" if close == "close" else "lost")


def send_many(port, count, nbytes, sent):
    pipe = TensorDictPipe.connect_sync("127.0.0.1", port, timeout=20)
    td = TensorDict(a=torch.ones(nbytes, dtype=torch.uint8)).consolidate(metadata=True)
    with pipe:
        for _ in range(count):
            pipe.send(td)
            sent.value += 1


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_slow_reader_holds_its_sender_back_and_memory_does_not_grow(child):
    sent = mp.get_context("forkserver").Value("i", 0)
    pipe, _ = listening(child, send_many, 100, 4 * MIB, sent)
    pipe.recv()
    before = resident()
    seen = -1
    while seen != sent.value:
        seen = sent.value
        # A reader that waits for something else drives UCX all the same.
        with pytest.raises(PipeTimeout):
            pipe._endpoint.wait(lambda: False, 0.5)
    assert seen <= 10
    assert resident() - before < 80 * MIB
    assert sum(1 for _ in pipe) == 99
    assert resident() - before < 80 * MIB
    pipe.close()


# ---- workers of a DataLoader


class FromPipe(IterableDataset):
    """Connects in the worker and reads with plain calls."""

    def __init__(self, port):
        self.port = port

    def __iter__(self):
        with TensorDictPipe.connect_sync("127.0.0.1", self.port, timeout=20) as pipe:
            for td in pipe:
                yield td["a"].clone()


def serve_numbers(ready, count):
    def tell(host, port):
        ready.send(port)

    with TensorDictPipe.listen_sync(0, host="127.0.0.1", on_bound=tell) as pipe:
        for i in range(count):
            pipe.send(TensorDict(a=torch.full((3,), i)))


def load(port, context):
    loader = DataLoader(
        FromPipe(port), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    return [batch[0].item() for batch in loader]


def load_and_tell(port, result):
    result.send(load(port, "fork"))


@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_a_worker_of_a_loader_reads_with_plain_calls(child, context):
    ours, theirs = mp.Pipe()
    child(serve_numbers, theirs, 50)
    port = ours.recv()
    if context == "spawn":
        assert load(port, "spawn") == list(range(50))
    else:
        # A parent that has not used UCX: not this process, which may have.
        child(load_and_tell, port, theirs)
        assert ours.poll(60)
        assert ours.recv() == list(range(50))


def test_a_forked_worker_whose_parent_used_ucx_gets_a_clear_error_at_once():
    listener = ucx.listen("127.0.0.1", 0)
    began = time.monotonic()
    with pytest.raises(TransportUnavailable, match="spawn"):
        load(listener.port, "fork")
    assert time.monotonic() - began < 15
    listener.close()


def test_a_pipe_is_closed_by_one_thread_while_others_use_it():
    """UCX's handles are freed by the one; whatever the others are at, they get an error."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for i in range(15):
            ends = []

            def begin(host, port):
                in_thread(lambda: ends.append(TensorDictPipe.connect_sync(host, port)))  # noqa: B023

            pipe = TensorDictPipe.listen_sync(0, host="127.0.0.1", on_bound=begin)
            pipe.send(ONE)
            while not ends:
                time.sleep(0.001)
            errors = []

            def use(call):
                try:
                    while True:
                        call()
                except (PipeClosed, PeerLost, PipeTimeout) as error:
                    errors.append(error)  # noqa: B023

            threads = [
                in_thread(use, call)
                for call in (lambda: pipe.send(ONE), ends[0].recv, lambda: ends[0].send(ONE))  # noqa: B023
            ]
            time.sleep(0.01 + i / 1000)
            (pipe if i % 2 else ends[0])._drop()
            for thread in threads:
                thread.join(10)
            assert len(errors) == 3
            for end in (pipe, ends[0]):
                end._drop()
    finally:
        sys.setswitchinterval(interval)


# ---- one pipe, two threads


def duplex(pipe, count, result=None):
    """Send and receive at once, in two threads; reports what went wrong."""
    wrong = []
    sys.setswitchinterval(1e-5)

    def send():
        for i in range(count):
            pipe.send(TensorDict(x=torch.full((1 + i % 3,), i)))

    def receive():
        for i in range(count):
            got = pipe.recv()["x"]
            assert got.tolist() == [i] * (1 + i % 3)

    def noting(work):
        try:
            work()
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=noting, args=(work,)) for work in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe._drop() if wrong else pipe.close()
    if result is not None:
        result.send(wrong)
    return wrong


def duplex_client(port, count, result):
    duplex(TensorDictPipe.connect_sync("127.0.0.1", port, timeout=20), count, result)


def test_one_thread_sends_while_another_receives(child):
    """What UCX says of an acknowledgement is not taken for the size of a tensordict."""
    ours, theirs = mp.Pipe()
    interval = sys.getswitchinterval()
    pipe, _ = listening(child, duplex_client, 6000, theirs)
    try:
        assert duplex(pipe, 6000) == []
    finally:
        sys.setswitchinterval(interval)
    assert ours.poll(30)
    assert ours.recv() == []
