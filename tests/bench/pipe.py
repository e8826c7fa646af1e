"""Pipes against tensordict's pipe, bare ucxx, a TCP socket and a multiprocessing pipe.

Each side is two processes on this host, a sender and a receiver, that stay connected; a run
streams so many messages one way and ends when both have said that they are through. The bare
library streams with ``ucxx-core`` as ``ucxx.benchmarks.send_recv`` uses it: one request at a time,
reused buffers, ``progress_mode="polling"``, error handling on, shared memory. There and beside the
socket and the pipe each process has a core of its own, as with that program's affinity options: two
that poll on one core measure the scheduler. Against the reference, which has threads, none has.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import multiprocessing.connection
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tests.bench._measure import Row, compare

KIB, MIB = 1 << 10, 1 << 20
#: Messages of one run.
COUNTS = {KIB: 10_000, MIB: 500, 64 * MIB: 10}
#: Of the reference, which takes longer.
SLOW_COUNTS = {KIB: 400, MIB: 80, 64 * MIB: 3}
#: Processes start fast from a server that has the imports and never uses UCX.
_PROCESSES = mp.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "tensordict", "tdio", "tests.bench.pipe"])


def tensordict_of(nbytes: int) -> TensorDict:
    floats = nbytes // 4
    td = TensorDict(obs=torch.randn(3 * floats // 4), action=torch.randn(floats // 4))
    return td.consolidate(metadata=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


# ---- what is measured: each kind opens one connection and sends or receives on it


class Pipes:
    """tdio, the sync face."""

    loop = False
    payload = staticmethod(tensordict_of)

    def open(self, sends: bool, port: int) -> Any:
        from tdio import TensorDictPipe

        if sends:
            return TensorDictPipe.connect_sync("127.0.0.1", port)
        return TensorDictPipe.listen_sync(port, host="127.0.0.1")

    def send(self, pipe: Any, payload: Any) -> None:
        pipe.send(payload)

    def recv(self, pipe: Any, nbytes: int) -> None:
        pipe.recv()


class AsyncPipes(Pipes):
    """tdio, the async face."""

    loop = True

    async def open(self, sends: bool, port: int) -> Any:
        from tdio import TensorDictPipe

        if sends:
            return await TensorDictPipe.connect("127.0.0.1", port)
        return await TensorDictPipe.listen(port, host="127.0.0.1")

    async def send(self, pipe: Any, payload: Any) -> None:
        await pipe.asend(payload)

    async def recv(self, pipe: Any, nbytes: int) -> None:
        await pipe.arecv()


class Streams(AsyncPipes):
    """A ``PipeStream``: each item has memory of its own."""

    async def open(self, sends: bool, port: int) -> Any:
        from tdio import PipeStream

        pipe = await super().open(sends, port)
        return pipe if sends else iter(PipeStream(pipe))

    async def recv(self, items: Any, nbytes: int) -> None:
        next(items)


class Cloned(AsyncPipes):
    """A receive and a clone that stays consolidated: a copy of the storage, and the views."""

    async def recv(self, pipe: Any, nbytes: int) -> None:
        from tdio.data.batches import _rebuilt

        _rebuilt(await pipe.arecv(), torch.Tensor.clone)


class Reference(AsyncPipes):
    """tensordict's pipe with its defaults."""

    async def open(self, sends: bool, port: int) -> Any:
        from tensordict._ucxx import TensorDictPipe

        if not sends:
            return await TensorDictPipe.listen(port)
        while True:
            try:
                return await TensorDictPipe.connect("127.0.0.1", port)
            except Exception:
                await asyncio.sleep(0.1)


class Endpoints:
    """tdio's transport without the protocol, the sync face."""

    loop = False

    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}

    def payload(self, nbytes: int) -> Any:
        return torch.ones(nbytes, dtype=torch.uint8)

    def open(self, sends: bool, port: int) -> Any:
        from tdio.transport import ucx

        if sends:
            return ucx.connect("127.0.0.1", port, 30)
        with_listener = ucx.listen("127.0.0.1", port)
        endpoint = with_listener.accept(30)
        with_listener.close()
        return endpoint

    def send(self, endpoint: Any, payload: Any) -> None:
        transfer = endpoint.send(payload)
        if not transfer.done:
            endpoint.wait(lambda: transfer.done, 30)
        transfer.result()

    def recv(self, endpoint: Any, nbytes: int) -> None:
        size = endpoint.probe()
        if size is None:
            endpoint.wait(lambda: endpoint.probe() is not None, 30)
            size = endpoint.probe()
        if size not in self.buffers:
            self.buffers[size] = torch.empty(size, dtype=torch.uint8)
        transfer = endpoint.recv(self.buffers[size])
        if not transfer.done:
            endpoint.wait(lambda: transfer.done, 30)
        assert transfer.result() == nbytes


class Bare:
    """ucxx's core API, polling."""

    loop = False

    def __init__(self) -> None:
        os.environ["UCX_MM_ERROR_HANDLING"] = "y"
        import ucxx._lib.libucxx as core
        from ucxx._lib.arr import Array

        self.core, self.array = core, Array
        self.tag = core.UCXXTag(1)
        self.buffers: dict[int, Any] = {}
        features = (core.Feature.TAG, core.Feature.WAKEUP)
        self.worker = core.UCXWorker(core.UCXContext(feature_flags=features))
        self.worker.init_blocking_progress_mode()
        self.kept: list[Any] = []

    def payload(self, nbytes: int) -> Any:
        # Not zeros, which Linux would all map to one page, warm in the cache.
        return self.array(np.ones(nbytes, np.uint8))

    def open(self, sends: bool, port: int) -> Any:
        core = self.core
        if sends:
            while True:
                try:
                    endpoint = core.UCXEndpoint.create(self.worker, "127.0.0.1", port, True)
                    self.wait(endpoint.tag_send(self.payload(8), core.UCXXTag(0)))
                    return endpoint
                except core.UCXError:
                    self.kept.append(endpoint)
                    time.sleep(0.2)
        made: list[Any] = []
        listener = core.UCXListener.create(
            worker=self.worker,
            port=port,
            cb_func=lambda request: made.append(
                listener.create_endpoint_from_conn_request(request, True)
            ),
        )
        self.kept.append(listener)
        while not made:
            self.worker.progress()
        self.wait(made[0].tag_recv(self.payload(8), core.UCXXTag(0)))
        return made[0]

    def wait(self, request: Any) -> None:
        while not request.completed:
            self.worker.progress()
        request.check_error()

    def send(self, endpoint: Any, payload: Any) -> None:
        self.wait(endpoint.tag_send(payload, self.tag))

    def recv(self, endpoint: Any, nbytes: int) -> None:
        if nbytes not in self.buffers:
            self.buffers[nbytes] = self.payload(nbytes)
        self.wait(endpoint.tag_recv(self.buffers[nbytes], self.tag))


class Sockets:
    """A plain TCP socket."""

    loop = False

    def __init__(self) -> None:
        self.buffers: dict[int, memoryview] = {}

    def payload(self, nbytes: int) -> Any:
        return b"x" * nbytes

    def open(self, sends: bool, port: int) -> Any:
        if not sends:
            with socket.create_server(("127.0.0.1", port)) as server:
                return server.accept()[0]
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                pass

    def send(self, one: Any, payload: Any) -> None:
        one.sendall(payload)

    def recv(self, one: Any, nbytes: int) -> None:
        if nbytes not in self.buffers:
            self.buffers[nbytes] = memoryview(bytearray(nbytes))
        got = 0
        while got < nbytes:
            got += one.recv_into(self.buffers[nbytes][got:])


class Connections(Sockets):
    """A pipe of multiprocessing."""

    def open(self, sends: bool, port: int) -> Any:
        path = f"/tmp/tdio-bench-{port}"
        if not sends:
            with mp.connection.Listener(path) as listener:
                return listener.accept()
        while True:
            try:
                return mp.connection.Client(path)
            except (FileNotFoundError, ConnectionRefusedError):
                pass

    def send(self, one: Any, payload: Any) -> None:
        one.send_bytes(payload)

    def recv(self, one: Any, nbytes: int) -> None:
        if nbytes not in self.buffers:
            self.buffers[nbytes] = memoryview(bytearray(nbytes))
        one.recv_bytes_into(self.buffers[nbytes])


# ---- running them


def _plain(kind: Any, sends: bool, link: Any, ports: list[int]) -> None:
    ends = [kind.open(sends, port) for port in ports]
    link.send("ready")
    payloads: dict[int, Any] = {}
    for nbytes, count in iter(link.recv, None):
        # Made once: in later runs this is inside the time.
        if sends and nbytes not in payloads:
            payloads[nbytes] = kind.payload(nbytes)
        payload = payloads.get(nbytes)
        link.send("prepared")
        link.recv()
        for _ in range(count):
            for end in ends:
                kind.send(end, payload) if sends else kind.recv(end, nbytes)
        link.send("done")


async def _looped(kind: Any, sends: bool, link: Any, ports: list[int]) -> None:
    ends = [await kind.open(sends, port) for port in ports]
    link.send("ready")

    async def stream(end: Any, payload: Any, nbytes: int, count: int) -> None:
        for _ in range(count):
            await (kind.send(end, payload) if sends else kind.recv(end, nbytes))

    payloads: dict[int, Any] = {}
    for nbytes, count in iter(link.recv, None):
        if sends and nbytes not in payloads:
            payloads[nbytes] = kind.payload(nbytes)
        payload = payloads.get(nbytes)
        link.send("prepared")
        link.recv()
        await asyncio.gather(*[stream(end, payload, nbytes, count) for end in ends])
        link.send("done")


def _work(make: Callable[[], Any], sends: bool, link: Any, ports: list[int], pin: bool) -> None:
    torch.set_num_threads(1)
    if pin and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {int(sends)})
    kind = make()
    if kind.loop:
        asyncio.run(_looped(kind, sends, link, ports))
    else:
        _plain(kind, sends, link, ports)
    link.send("bye")
    # What a library does as it ends is not measured, and the reference may hang in it.
    os._exit(0)


class Side:
    """Two processes with some connections of one kind between them."""

    def __init__(self, make: Callable[[], Any], connections: int, pin: bool):
        ports = [free_port() for _ in range(connections)]
        self.connections = connections
        self.links, self.processes = [], []
        for sends in (False, True):
            ours, theirs = _PROCESSES.Pipe()
            process = _PROCESSES.Process(
                target=_work, args=(make, sends, theirs, ports, pin), daemon=True
            )
            process.start()
            self.links.append(ours)
            self.processes.append(process)
        self.say(None, "ready")

    def say(self, what: Any, answer: str) -> None:
        for link in self.links:
            if what is not None:
                link.send(what)
        for link in self.links:
            if not link.poll(120):
                raise TimeoutError(f"no {answer!r} within 120 s")
            assert link.recv() == answer

    def run(self, nbytes: int, count: int) -> Callable[[], None]:
        def work() -> None:
            self.say("go", "done")
            self.say((nbytes, count), "prepared")

        self.say((nbytes, count), "prepared")
        return work

    def stop(self) -> None:
        self.say("go", "done")
        for link in self.links:
            link.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


#: name: ours, theirs, connections, sizes, whether theirs is slow
ROWS: dict[str, tuple[Any, Any, int, tuple[int, ...], bool]] = {
    "stream_{}_vs_reference": (AsyncPipes, Reference, 1, (KIB, MIB, 64 * MIB), True),
    "stream_sync_{}_vs_reference": (Pipes, Reference, 1, (KIB, MIB, 64 * MIB), True),
    "stream_{}_vs_ucxx": (Pipes, Bare, 1, (KIB, MIB, 64 * MIB), False),
    "stream_async_{}_vs_ucxx": (AsyncPipes, Bare, 1, (KIB, MIB, 64 * MIB), False),
    "transport_{}_vs_ucxx": (Endpoints, Bare, 1, (KIB, MIB, 64 * MIB), False),
    "stream_{}_vs_socket": (Pipes, Sockets, 1, (KIB, MIB, 64 * MIB), False),
    "stream_{}_vs_mp_pipe": (Pipes, Connections, 1, (KIB, MIB, 64 * MIB), False),
    "stream_vs_arecv": (Streams, Cloned, 1, (MIB,), False),
    "stream_vs_arecv_{}": (Streams, Cloned, 1, (KIB, 64 * MIB), False),
    "two_pipes_{}_vs_reference": (AsyncPipes, Reference, 2, (KIB, MIB), True),
    "ten_pipes_{}_vs_reference": (AsyncPipes, Reference, 10, (KIB, MIB), True),
}


def size_text(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB" if nbytes >= MIB else f"{nbytes // KIB}KiB"


def run(only: str, runs: int) -> list[Row]:
    rows = []
    for template, (ours, theirs, connections, sizes, slow) in ROWS.items():
        for nbytes in sizes:
            name = template.format(size_text(nbytes))
            if only not in name:
                continue
            counts = [COUNTS[nbytes], (SLOW_COUNTS if slow else COUNTS)[nbytes]]
            counts = [max(4, count // connections) for count in counts]
            sides = [Side(make, connections, not slow) for make in (ours, theirs)]
            try:
                work = [side.run(nbytes, n) for side, n in zip(sides, counts, strict=True)]
                per_message = 1 if nbytes < MIB else nbytes / MIB
                amounts = [count * connections * per_message for count in counts]
                unit = "msg/s" if nbytes < MIB else "MiB/s"
                rows.append(
                    compare(name, *work, amount=(amounts[0], amounts[1]), unit=unit, runs=runs)
                )
            finally:
                for side in sides:
                    side.stop()
    return rows
