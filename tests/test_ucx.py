"""The UCX transport between real processes."""

import asyncio
import contextlib
import fcntl
import gc
import multiprocessing as mp
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("ucxx", reason="ucxx is not installed: pip install 'tdio[ucx]'")

from tdio.errors import (
    AddressUnavailable,
    PeerLost,
    PipeClosed,
    PipeTimeout,
    PortInUse,
    ProtocolError,
    TransportUnavailable,
)
from tdio.transport import ucx
from tests._children import assert_ends_silently, children  # noqa: F401
from tests._ports import free_port

MIB = 1 << 20


@pytest.fixture
def listener():
    one = ucx.listen("127.0.0.1", 0)
    yield one
    one.close()


def send(endpoint, buffer, channel=0, timeout_s=20):
    transfer = endpoint.send(buffer, channel)
    endpoint.wait(lambda: transfer.done, timeout_s)
    return transfer.result()


def recv(endpoint, channel=0, timeout_s=20):
    endpoint.wait(lambda: endpoint.probe(channel) is not None, timeout_s)
    buffer = torch.empty(endpoint.probe(channel), dtype=torch.uint8)
    transfer = endpoint.recv(buffer, channel)
    endpoint.wait(lambda: transfer.done, timeout_s)
    assert transfer.result() == buffer.numel()
    return buffer


async def finish(endpoint, *transfers):
    await endpoint.wait_async(lambda: all(one.done for one in transfers), 20)
    return [one.result() for one in transfers]


async def begin_recv(endpoint):
    await endpoint.wait_async(lambda: endpoint.probe() is not None, 20)
    buffer = torch.empty(endpoint.probe(), dtype=torch.uint8)
    return buffer, endpoint.recv(buffer)


def pattern(nbytes):
    return torch.arange(nbytes, dtype=torch.int64).remainder(251).to(torch.uint8)


def echo(port, host="127.0.0.1"):
    """Send everything back, until the peer goes."""
    endpoint = ucx.connect(host, port, 20)
    try:
        while True:
            send(endpoint, recv(endpoint))
    except PeerLost:
        endpoint.close()


def serve_echo(host, ready):
    listener = ucx.listen(host, 0)
    ready.send((listener.host, listener.port))
    endpoint = listener.accept(20)
    listener.close()
    try:
        while True:
            send(endpoint, recv(endpoint))
    except PeerLost:
        endpoint.close()


SIZES = [0, 1, 100, 8191, 8192, 8193, 65_536, MIB, 5 * MIB + 3, 64 * MIB]


# ---- messages


def test_messages_of_every_size_arrive_whole_both_ways(child, listener):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    assert endpoint.tdio_peer
    assert endpoint.accepted is True
    for nbytes in SIZES:
        sent = pattern(nbytes)
        assert send(endpoint, sent) == nbytes
        assert torch.equal(recv(endpoint), sent)
    endpoint.close()


def test_the_async_face_moves_the_same(child, listener):
    child(echo, listener.port)

    async def main():
        endpoint = await listener.accept_async(20)
        for nbytes in SIZES:
            sent = pattern(nbytes)
            out = endpoint.send(sent)
            buffer, back = await begin_recv(endpoint)
            await finish(endpoint, back, out)
            assert torch.equal(buffer, sent)
        endpoint.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda b: np.frombuffer(b, np.uint8),
        lambda b: torch.tensor([*b]),
    ],
    ids=["bytes", "bytearray", "memoryview", "numpy", "torch"],
)
def test_anything_with_bytes_can_be_sent(child, listener, make):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    buffer = make(b"abcdefgh")
    send(endpoint, buffer)
    expected = np.asarray(buffer).tobytes() if isinstance(buffer, torch.Tensor) else b"abcdefgh"
    assert recv(endpoint).numpy().tobytes() == expected
    endpoint.close()


def test_many_messages_keep_their_order_and_channels_do_not_mix(child, listener):
    child(_numbered, listener.port)
    endpoint = listener.accept(20)
    for channel in (1, 0):
        got = [recv(endpoint, channel).numpy()[:4].view("<u4")[0] for _ in range(250)]
        assert got == list(range(channel, 500, 2))
    send(endpoint, b"done")
    endpoint.close()


def _numbered(port):
    endpoint = ucx.connect("127.0.0.1", port, 20)
    for number in range(500):
        send(endpoint, number.to_bytes(4, "little") * 300, channel=number % 2)
    recv(endpoint)


def test_the_size_is_known_before_there_is_a_buffer(child, listener):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    assert endpoint.probe() is None
    send(endpoint, bytes(12345))
    endpoint.wait(lambda: endpoint.probe() is not None, 20)
    assert endpoint.probe() == endpoint.probe() == 12345
    larger = torch.full((20_000,), 9, dtype=torch.uint8)
    transfer = endpoint.recv(larger)
    endpoint.wait(lambda: transfer.done, 20)
    assert transfer.result() == transfer.nbytes == 12345
    assert (larger[12345:] == 9).all()
    endpoint.close()


def test_a_buffer_that_is_too_small_is_an_error(child, listener):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    for nbytes in (100, MIB):
        send(endpoint, bytes(nbytes))
        endpoint.wait(lambda: endpoint.probe() is not None, 20)
        transfer = endpoint.recv(bytearray(nbytes // 2))
        endpoint.wait(lambda: transfer.done, 20)  # noqa: B023
        with pytest.raises(ProtocolError, match="longer than the buffer"):
            transfer.result()
    endpoint.close()


def test_buffers_that_cannot_be_used_are_refused(child, listener):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    with pytest.raises(TypeError, match="read-only"):
        endpoint.recv(b"abc")
    with pytest.raises(ValueError, match="contiguous"):
        endpoint.send(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="contiguous"):
        endpoint.send(memoryview(bytes(8))[::2])
    endpoint.close()
    with pytest.raises(PipeClosed):
        endpoint.send(b"abc")


# ---- addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0"])
def test_ipv4_ipv6_and_names(child, host):
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    ours, theirs = mp.Pipe()
    child(serve_echo, host, theirs)
    bound, port = ours.recv()
    endpoint = ucx.connect("127.0.0.1" if bound == "0.0.0.0" else host, port, 20)
    assert endpoint.accepted is False
    assert str(port) in endpoint.name
    send(endpoint, b"hello")
    assert recv(endpoint).numpy().tobytes() == b"hello"
    endpoint.close()


def _has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_port_in_use_is_named(listener):
    with pytest.raises(PortInUse, match=str(listener.port)):
        ucx.listen("127.0.0.1", listener.port)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortInUse):
        ucx.listen("127.0.0.1", other.getsockname()[1])


def test_a_closed_listener_frees_its_port(child):
    first = ucx.listen("127.0.0.1", 0)
    child(echo, first.port)
    endpoint = first.accept(20)
    first.close()
    second = ucx.listen("127.0.0.1", first.port)
    assert second.port == first.port
    second.close()
    send(endpoint, b"still there")
    assert recv(endpoint).numpy().tobytes() == b"still there"
    endpoint.close()
    with pytest.raises(PipeClosed):
        first.accept(1)


def test_an_unknown_host_is_named():
    with pytest.raises(PeerLost, match=r"nowhere\.invalid"):
        ucx.connect("nowhere.invalid", 1, 1)
    with pytest.raises(PeerLost, match=r"nowhere\.invalid"):
        ucx.listen("nowhere.invalid", 0)


def test_connecting_waits_for_the_server_and_gives_up_at_its_limit(child):
    port = free_port()
    began = time.monotonic()
    with pytest.raises(PipeTimeout, match=f"127.0.0.1:{port}"):
        ucx.connect("127.0.0.1", port, 0.5)
    assert 0.4 < time.monotonic() - began < 5
    child(echo, port)
    time.sleep(1)
    late = ucx.listen("127.0.0.1", port)
    late.accept(20).close()
    late.close()


def test_accepting_gives_up_at_its_limit(listener):
    with pytest.raises(PipeTimeout, match=str(listener.port)):
        listener.accept(0.2)
    with pytest.raises(PipeTimeout):
        asyncio.run(listener.accept_async(0.2))


def test_a_second_client_is_refused(child, listener):
    ours, theirs = mp.Pipe()
    child(echo, listener.port)
    endpoint = listener.accept(20)
    child(_connect_and_tell, listener.port, theirs)
    time.sleep(1.5)
    listener.close()
    assert ours.poll(40)
    assert ours.recv() == "PipeTimeout"
    send(endpoint, b"on")
    assert recv(endpoint).numpy().tobytes() == b"on"
    endpoint.close()


def _connect_and_tell(port, result):
    try:
        ucx.connect("127.0.0.1", port, 3)
        result.send("connected")
    except Exception as error:
        result.send(type(error).__name__)


def test_strangers_do_not_stop_a_listener(child, listener):
    """Bytes that are not UCX's, and a client that dies while it is greeted."""
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    dying = child(_connect_and_tell, listener.port, mp.Pipe()[1])
    time.sleep(1)
    dying.kill()
    dying.join()
    child(echo, listener.port)
    endpoint = listener.accept(20)
    send(endpoint, b"x")
    assert len(recv(endpoint)) == 1
    endpoint.close()


def test_one_listener_serves_many_endpoints_in_one_loop(child, listener):
    async def serve(endpoint):
        for _ in range(20):
            buffer, transfer = await begin_recv(endpoint)
            await finish(endpoint, transfer)
            assert buffer.numel() == 5000
        endpoint.close()

    async def main():
        await asyncio.gather(*[serve(await listener.accept_async(30)) for _ in range(12)])

    for _ in range(4):
        child(_three_clients, listener.port)
    asyncio.run(main())


def _three_clients(port):
    endpoints = [ucx.connect("127.0.0.1", port, 20) for _ in range(3)]
    for _ in range(20):
        for endpoint in endpoints:
            send(endpoint, bytes(5000))
    for endpoint in endpoints:
        endpoint.wait(lambda: endpoint.probe() is None, 5)  # noqa: B023
    with pytest.raises(PeerLost):
        recv(endpoints[-1])


# ---- lost peers


def test_what_came_before_the_end_can_still_be_read(child, listener):
    child(_send_and_exit, listener.port)
    endpoint = listener.accept(20)
    time.sleep(1)
    got = [len(recv(endpoint)) for _ in range(5)]
    assert got == [10, 20, 30, 40, 50]
    with pytest.raises(PeerLost, match="connection is lost"):
        recv(endpoint)
    endpoint.close()


def _send_and_exit(port):
    endpoint = ucx.connect("127.0.0.1", port, 20)
    for number in range(1, 6):
        send(endpoint, bytes(10 * number))
    transfer = endpoint.flush()
    endpoint.wait(lambda: transfer.done, 5)
    endpoint.close()


def killed(process):
    process.kill()
    process.join()
    return time.monotonic()


def test_a_peer_killed_before_its_first_message_is_noticed(child, listener):
    process = child(echo, listener.port)
    endpoint = listener.accept(20)
    at = killed(process)
    with pytest.raises(PeerLost):
        recv(endpoint)
    assert time.monotonic() - at < 5
    endpoint.close()


def test_a_peer_killed_between_messages_is_noticed_by_both_faces(child, listener):
    for face in ("sync", "async"):
        process = child(echo, listener.port)
        endpoint = listener.accept(20)
        send(endpoint, bytes(MIB))
        recv(endpoint)
        at = killed(process)
        with pytest.raises(PeerLost):
            if face == "sync":
                recv(endpoint)
            else:
                asyncio.run(endpoint.wait_async(lambda: endpoint.probe() is not None, 20))  # noqa: B023
        with pytest.raises(PeerLost):
            for _ in range(100):
                send(endpoint, bytes(MIB))
        assert time.monotonic() - at < 5
        endpoint.close()


@pytest.mark.parametrize("size", [100_000, 4 * MIB, 256 * MIB])
def test_a_sender_killed_inside_a_message_is_noticed(child, listener, size):
    process = child(_send_for_ever, listener.port, size)
    endpoint = listener.accept(20)
    recv(endpoint)
    endpoint.wait(lambda: endpoint.probe() is not None, 20)
    at = killed(process)
    with pytest.raises(PeerLost):
        for _ in range(100):
            recv(endpoint)
    assert time.monotonic() - at < 5
    endpoint.close()


@pytest.mark.parametrize("size", [100_000, 64 * MIB])
def test_a_sender_killed_while_its_message_is_received_is_noticed(child, listener, size):
    process = child(_send_for_ever, listener.port, size)
    endpoint = listener.accept(20)
    recv(endpoint)
    timer = threading.Timer(0.5, process.kill)
    timer.start()
    with pytest.raises(PeerLost):
        while True:
            recv(endpoint)
    at = time.monotonic()
    timer.join()
    assert at - time.monotonic() < 5
    endpoint.close()


def _send_for_ever(port, size):
    endpoint = ucx.connect("127.0.0.1", port, 20)
    while True:
        send(endpoint, bytearray(size), timeout_s=100)


@pytest.mark.parametrize("size", [1000, MIB, 64 * MIB])
def test_a_receiver_killed_while_it_does_not_read_is_noticed(child, listener, size):
    process = child(_sleep, listener.port)
    endpoint = listener.accept(20)
    timer = threading.Timer(1.0, process.kill)
    timer.start()
    began = time.monotonic()
    with pytest.raises(PeerLost):
        while True:
            send(endpoint, bytearray(size))
    timer.join()
    assert time.monotonic() - began < 6
    endpoint.close()


def _sleep(port):
    endpoint = ucx.connect("127.0.0.1", port, 20)
    time.sleep(100)
    endpoint.close()


def test_a_killed_peer_is_noticed_although_a_child_of_it_holds_its_sockets(child, listener):
    ours, theirs = mp.Pipe()
    process = child(_fork_and_sleep, listener.port, theirs)
    endpoint = listener.accept(20)
    grandchild = ours.recv()
    try:
        at = killed(process)
        with pytest.raises(PeerLost):
            recv(endpoint)
        assert time.monotonic() - at < 5
    finally:
        os.kill(grandchild, signal.SIGKILL)
        endpoint.close()


def _fork_and_sleep(port, result):
    endpoint = ucx.connect("127.0.0.1", port, 20)
    pid = os.fork()
    if pid:
        result.send(pid)
    time.sleep(100)
    endpoint.close()


# ---- waiting


def test_an_idle_wait_costs_next_to_nothing(child, listener):
    child(_sleep, listener.port)
    endpoint = listener.accept(20)

    def cost(wait):
        began = time.process_time()
        with pytest.raises(PipeTimeout):
            wait()
        return (time.process_time() - began) / 2

    def ready():
        return endpoint.probe() is not None

    assert cost(lambda: endpoint.wait(ready, 2)) < 0.05
    assert cost(lambda: asyncio.run(endpoint.wait_async(ready, 2))) < 0.05
    assert cost(lambda: listener.accept(2)) < 0.05
    endpoint.close()


def test_a_cancelled_wait_is_harmless(child, listener):
    child(echo, listener.port)

    async def main():
        endpoint = await listener.accept_async(20)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(
                endpoint.wait_async(lambda: endpoint.probe() is not None, 20), 0.2
            )
        sent = pattern(64 * MIB)
        out = endpoint.send(sent)
        await endpoint.wait_async(lambda: endpoint.probe() is not None, 20)
        buffer = torch.empty(endpoint.probe(), dtype=torch.uint8)
        back = endpoint.recv(buffer)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(endpoint.wait_async(lambda: back.done, 20), 0.002)
        await endpoint.wait_async(lambda: back.done and out.done, 20)
        assert torch.equal(buffer, sent)
        endpoint.close()

    asyncio.run(main())


def test_buffers_of_transfers_under_way_may_be_dropped(child, listener):
    """What crashes the process in tensordict's pipe: the receive is given up in the middle."""
    for _ in range(5):
        process = child(_send_for_ever, listener.port, 64 * MIB)
        endpoint = listener.accept(20)
        endpoint.wait(lambda: endpoint.probe() is not None, 20)  # noqa: B023
        transfer = endpoint.recv(bytearray(endpoint.probe()))
        endpoint.wait(lambda: True, 1)
        outgoing = endpoint.send(bytearray(64 * MIB))
        endpoint.close()
        assert transfer.done
        assert outgoing.done
        with pytest.raises((PipeClosed, PeerLost)):
            outgoing.result()
        del transfer, outgoing
        gc.collect()
        process.join(10)
        assert process.exitcode == 1


def test_an_endpoint_that_is_dropped_closes(child, listener):
    process = child(echo, listener.port)
    endpoint = listener.accept(20)
    endpoint.send(bytes(10 * MIB))
    del endpoint
    gc.collect()
    process.join(10)
    assert process.exitcode == 0


def test_endpoints_give_their_descriptors_back(child, listener):
    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    child(_connect_and_close, listener.port, 6)
    listener.accept(20).close()
    before = count()
    for _ in range(5):
        listener.accept(20).close()
    assert count() <= before + 2


def _connect_and_close(port, times):
    for _ in range(times):
        endpoint = ucx.connect("127.0.0.1", port, 20)
        with pytest.raises(PeerLost):
            recv(endpoint)
        endpoint.close()


# ---- processes and threads


def test_threads_use_their_own_endpoints_at_once(child, listener):
    for _ in range(4):
        child(echo, listener.port)
    endpoints = [listener.accept(20) for _ in range(4)]
    errors = []

    def work(endpoint, number):
        try:
            for nbytes in (10, 10_000, MIB) * 10:
                sent = torch.full((nbytes,), number, dtype=torch.uint8)
                send(endpoint, sent)
                assert torch.equal(recv(endpoint), sent)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(endpoint, number))
        for number, endpoint in enumerate(endpoints)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for endpoint in endpoints:
        endpoint.close()


def test_a_forked_child_of_a_user_of_ucx_gets_a_clear_error(child, listener):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    ours, theirs = mp.Pipe()
    process = child(
        _try_everything, endpoint, listener.port, theirs, context=mp.get_context("fork")
    )
    process.join(20)
    assert process.exitcode == 0
    assert ours.recv() == ["TransportUnavailable"] * 4
    send(endpoint, b"the parent's still works")
    assert len(recv(endpoint)) == 24
    endpoint.close()


def _try_everything(endpoint, port, result):
    said = []
    for work in (
        lambda: ucx.connect("127.0.0.1", port, 5),
        lambda: ucx.listen("127.0.0.1", 0),
        lambda: endpoint.send(b"x"),
        lambda: endpoint.probe(),
    ):
        try:
            work()
            said.append("worked")
        except TransportUnavailable as error:
            assert "spawn" in str(error)
            said.append("TransportUnavailable")
    result.send(said)


def test_a_forked_child_may_use_ucx_where_its_parent_has_not(child, listener):
    ours, theirs = mp.Pipe()
    child(_fork_an_echo, listener.port, theirs)
    endpoint = listener.accept(20)
    send(endpoint, b"x")
    assert len(recv(endpoint)) == 1
    endpoint.close()
    assert ours.poll(20)
    assert ours.recv() == 0


def _fork_an_echo(port, result):
    import ucxx  # noqa: F401

    process = mp.get_context("fork").Process(target=echo, args=(port,))
    process.start()
    process.join(20)
    result.send(process.exitcode)


def test_a_spawned_child_works(child, listener):
    process = child(echo, listener.port, context=mp.get_context("spawn"))
    endpoint = listener.accept(60)
    send(endpoint, b"x")
    assert len(recv(endpoint)) == 1
    endpoint.close()
    process.join(20)
    assert process.exitcode == 0


# ---- ucxx at the other side


def _ucxx_client(port, host="127.0.0.1"):
    import ucxx

    if ":" in host:
        # UCX 1.21 needs both ends to have their devices speak IPv6.
        os.environ["UCX_TCP_AF_PRIO"] = "inet6,inet"

    async def main():
        endpoint = await ucxx.create_endpoint(host, port)
        await _ucxx_echo(endpoint)

    asyncio.run(main())


async def _ucxx_echo(endpoint):
    for nbytes in SIZES:
        buffer = np.empty(nbytes, np.uint8)
        await endpoint.recv(buffer)
        await endpoint.send(buffer)
    await endpoint.recv(np.empty(1, np.uint8))


def _ucxx_server(ready):
    import ucxx

    async def main():
        done = asyncio.Event()

        async def serve(endpoint):
            await _ucxx_echo(endpoint)
            done.set()

        server = ucxx.create_listener(serve, port=0)
        ready.send(server.port)
        await done.wait()

    asyncio.run(main())


def _exchange(endpoint):
    assert not endpoint.tdio_peer
    for nbytes in SIZES:
        sent = pattern(nbytes)
        send(endpoint, sent)
        assert torch.equal(recv(endpoint), sent)
    send(endpoint, b"x")


def test_ucxx_can_connect(child, listener):
    child(_ucxx_client, listener.port)
    endpoint = listener.accept(30)
    _exchange(endpoint)
    endpoint.close()


def test_ucxx_can_listen(child):
    ours, theirs = mp.Pipe()
    child(_ucxx_server, theirs)
    endpoint = ucx.connect("127.0.0.1", ours.recv(), 30)
    _exchange(endpoint)
    endpoint.close()


@pytest.mark.parametrize("mode", ["thread", "blocking", "polling"])
def test_an_endpoint_of_ucxx_is_adopted(child, listener, mode):
    process = child(_adopt_and_echo, listener.port, mode)
    endpoint = listener.accept(30)
    _exchange(endpoint)
    with pytest.raises(PeerLost):
        recv(endpoint)
    endpoint.close()
    process.join(30)
    assert process.exitcode == 0


def _adopt_and_echo(port, mode):
    import ucxx

    async def main():
        ucxx.init(progress_mode=mode)
        theirs = await ucxx.create_endpoint("127.0.0.1", port)
        endpoint = ucx.adopt(theirs)
        assert not endpoint.tdio_peer
        assert endpoint.accepted is None
        for _ in SIZES:
            buffer, transfer = await begin_recv(endpoint)
            await finish(endpoint, transfer)
            await finish(endpoint, endpoint.send(buffer))
        await endpoint.wait_async(lambda: endpoint.probe() is not None, 20)
        pending = endpoint.recv(bytearray(1))
        pending = endpoint.recv(bytearray(1))
        assert not pending.done
        endpoint.close()
        with pytest.raises(PipeClosed):
            endpoint.send(b"x")

    asyncio.run(main())


def test_adopting_anything_else_is_an_error():
    with pytest.raises(TypeError, match=r"ucxx\.Endpoint"):
        ucx.adopt(object())


def test_ucxx_can_connect_over_ipv6(child):
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    listener = ucx.listen("::1", 0)
    child(_ucxx_client, listener.port, "::1")
    endpoint = listener.accept(30)
    _exchange(endpoint)
    endpoint.close()
    listener.close()


# ---- a listener that another thread closes


def _come_and_go(port):
    while True:
        try:
            ucx.connect("127.0.0.1", port, 20).close()
        except (PipeTimeout, PeerLost, ProtocolError):
            pass


def _close_while_clients_come(port, rounds, result):
    """In a process of its own: what fails here is a crash, or a wait without end."""
    found = set()

    def accept(listener):
        try:
            while True:
                listener.accept(5).close()
        except PipeClosed:
            found.add("closed")
        except Exception as error:
            found.add(repr(error))

    for count in range(rounds):
        listener = ucx.listen("127.0.0.1", port)
        threads = [threading.Thread(target=accept, args=(listener,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(count % 12 * 0.005)
        listener.close()
        for thread in threads:
            thread.join()
    result.send(found)


@pytest.mark.timeout(240)
def test_a_listener_is_closed_by_another_thread_while_clients_come(child):
    port = free_port()
    for _ in range(2):
        child(_come_and_go, port)
    ours, theirs = mp.Pipe()
    # Each of the delays some times.
    closing = child(_close_while_clients_come, port, 48, theirs)
    closing.join(120)
    assert closing.exitcode == 0, closing.exitcode
    assert ours.recv() == {"closed"}


@pytest.mark.parametrize("words", [b"", b"\x10"], ids=["silent", "within its words"])
def test_a_client_that_is_half_way_is_turned_out_when_its_listener_closes(words):
    for _ in range(5):
        listener = ucx.listen("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", listener.port)) as client:
            client.sendall(words)
            with pytest.raises(PipeTimeout):
                listener.accept(0.02)
            listener.close()
            client.settimeout(20)
            try:
                assert client.recv(1) == b""
            except ConnectionResetError:
                pass  # what it said was not read


def test_connections_go_on_when_a_later_listener_at_their_port_closes(child, listener):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    for _ in range(3):
        listener.close()
        send(endpoint, pattern(100))
        assert torch.equal(recv(endpoint), pattern(100))
        listener = ucx.listen("127.0.0.1", listener.port)
        with pytest.raises(PipeTimeout):
            listener.accept(0.02)
    listener.close()
    endpoint.close()


def test_a_listener_is_closed_though_no_descriptor_is_left():
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=_close_without_descriptors, args=(theirs,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and ours.poll(0) and ours.recv() == "free again"


def _close_without_descriptors(result):
    listener = ucx.listen("127.0.0.1", 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    listener.close()
    for one in taken:
        os.close(one)
    ucx.listen("127.0.0.1", listener.port).close()
    result.send("free again")


def test_a_listener_that_closes_leaves_sockets_blocking():
    one, two = socket.socketpair()
    with one, two:
        one.settimeout(None)
        socket.setdefaulttimeout(5)
        try:
            ucx.listen("127.0.0.1", 0).close()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(one.fileno())


def test_a_listener_that_closes_leaves_what_is_not_its_own(child, tmp_path):
    listener = ucx.listen("0.0.0.0", 0)
    port = listener.port
    try:
        other = ucx.listen("::1", port)
    except AddressUnavailable as error:
        pytest.skip(f"no IPv6 here: {error}")
    child(echo, port, "::1")
    endpoint = other.accept(20)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", port))
    datagrams.connect(("127.0.0.1", port))
    with open(tmp_path / "locked", "w") as file, datagrams:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        listener.close()
        # Locks of a file are dropped where a process closes any descriptor of it.
        assert subprocess.call([sys.executable, "-c", _LOCK, file.name]) == 7
        datagrams.send(b"x")
        assert datagrams.recv(1) == b"x"
    send(endpoint, pattern(100))
    assert torch.equal(recv(endpoint), pattern(100))
    endpoint.close()
    child(echo, port, "::1")
    other.accept(20).close()
    other.close()


_LOCK = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(7)
"""


def test_two_threads_and_two_coroutines_wait_for_one_endpoint(child, listener):
    child(echo, listener.port)
    endpoint = listener.accept(20)
    errors = []

    def sleep():
        try:
            endpoint.wait(lambda: False, 0.5)
        except Exception as error:
            errors.append(type(error))

    threads = [threading.Thread(target=sleep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [PipeTimeout] * 2

    async def both():
        waits = [endpoint.wait_async(lambda: False, 60) for _ in range(2)]
        tasks = [asyncio.ensure_future(one) for one in waits]
        await asyncio.sleep(0.3)
        endpoint.close()
        # The descriptor of a new worker may be the one that was just closed.
        again = ucx.connect("127.0.0.1", other.port, 20)
        with pytest.raises(PipeTimeout):
            await again.wait_async(lambda: False, 0.3)
        again.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    other = ucx.listen("127.0.0.1", 0)
    taken = []
    taking = threading.Thread(target=lambda: taken.append(other.accept(20)))
    taking.start()
    assert [type(one) for one in asyncio.run(both())] == [PipeClosed] * 2
    taking.join()
    taken[0].close()
    other.close()


# ---- what cannot be


@pytest.mark.parametrize("port", [-1, 65536, 70000, "x", None, True])
def test_a_port_that_cannot_be_is_named(port):
    for work in (ucx.listen, lambda host, port: ucx.connect(host, port, 1)):
        with pytest.raises(ValueError, match=repr(port)):
            work("127.0.0.1", port)
    with pytest.raises(ValueError, match=repr(port)):
        asyncio.run(ucx.connect_async("127.0.0.1", port, 1))
    with pytest.raises(ValueError, match="from 1"):
        ucx.connect("127.0.0.1", 0, 1)


@pytest.mark.parametrize("host", ["8.8.8.8", "2001:4860:4860::8888"])
def test_an_address_of_another_machine_is_named(host):
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with pytest.raises(AddressUnavailable, match=rf"{host}.*Cannot assign"):
        ucx.listen(host, 0)


@pytest.mark.parametrize("timeout_s", [0, 0.4])
def test_a_refused_connection_is_said_to_be_one(timeout_s):
    port = free_port()
    with pytest.raises(PipeTimeout) as caught:
        ucx.connect("127.0.0.1", port, timeout_s)
    assert "raise the timeout" not in str(caught.value)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PipeTimeout) as caught:
        ucx.connect("127.0.0.1", silent.getsockname()[1], timeout_s)
    assert "no answer" in str(caught.value)


def _connect_and_say_nothing(port, count):
    """Clients that UCX knows, and that do not do their half of the handshake."""
    found = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
    silent = [ucx._dial("silent", found[0][0], found[0][4]) for _ in range(count)]
    while True:
        for endpoint in silent:
            endpoint._worker.step()
        time.sleep(0.01)


def test_accepting_gives_up_at_its_limit_although_a_client_is_silent(child, listener):
    child(_connect_and_say_nothing, listener.port, 3)
    began = time.monotonic()
    with pytest.raises(PipeTimeout, match="within 2 s"):
        listener.accept(2)
    assert time.monotonic() - began < 4.5


def test_a_wait_that_is_cancelled_has_not_seen_what_it_waited_for(child, listener):
    """Else who cancels a receive loses what has arrived."""
    child(echo, listener.port)
    endpoint = listener.accept(20)

    async def main():
        seen = []
        await asyncio.sleep(0.01)
        task = asyncio.ensure_future(endpoint.wait_async(lambda: not seen.append(True), 20))
        await asyncio.sleep(0)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert (outcome is None) == bool(seen)

    asyncio.run(main())
    endpoint.close()


def test_an_interpreter_that_ends_with_open_connections_says_nothing():
    code = (
        "import builtins, threading\n"
        "from tdio.transport import ucx\n"
        "listener, got = ucx.listen('127.0.0.1', 0), []\n"
        "thread = threading.Thread(target=lambda: got.append(listener.accept(20)))\n"
        "thread.start()\n"
        "builtins.kept = listener, got, ucx.connect('127.0.0.1', listener.port, 20)\n"
        "thread.join()\n"
    )
    assert_ends_silently(code, 90)
