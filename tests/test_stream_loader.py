"""PipeStream over UCX, between processes: fan-in, faults, DataLoader workers."""

import asyncio
import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

pytest.importorskip("ucxx", reason="ucxx is not installed: pip install 'tdio[ucx]'")

from tdio import PipeReader, PipeStream, TensorDictPipe, TensorDictServer, aresume_position
from tdio.errors import PeerLost, PipeTimeout, PortInUse
from tdio.testing.resume import run_node_resume_test, run_resume_test

HOST = "127.0.0.1"
#: Its server process never uses UCX, so every child may.
CHILDREN = mp.get_context("forkserver")
CHILDREN.set_forkserver_preload(["torch", "tdio", "tdio.transport.ucx"])
pytestmark = pytest.mark.timeout(300)


def item(i, rows=4):
    return TensorDict(
        x=torch.full((rows, 64), i), y=torch.full((rows,), float(i)), batch_size=[rows]
    )


def connect_and_send(port, start, count, then=None):
    pipe = TensorDictPipe.connect_sync(HOST, port, timeout=100)
    for i in range(start, start + count):
        pipe.send(item(i))
    if then is not None:
        time.sleep(1)
        os.kill(os.getpid(), then)
    pipe.close(100)


def serve_all(link, count, resumable):
    """Serve ``count`` items to each client, until killed."""

    async def handler(pipe):
        try:
            for i in range(await aresume_position(pipe) if resumable else 0, count):
                await pipe.asend(item(i))
        except PeerLost:
            return

    async def main():
        server = TensorDictServer(0, host=HOST)
        server.start()
        link.send(server.port)
        await server.serve(handler)

    asyncio.run(main())


@pytest.fixture
def child():
    started = []

    def start(work, *args):
        process = CHILDREN.Process(target=work, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def server(child):
    def start(count, resumable=False):
        ours, theirs = CHILDREN.Pipe()
        child(serve_all, theirs, count, resumable)
        assert ours.poll(100)
        return ours.recv()

    return start


def values(items):
    return [int(td["x"][0, 0]) for td in items]


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def names():
    return {thread.name for thread in threading.enumerate()}


def test_fan_in(child):
    stream = PipeStream.serve(0, host=HOST, producers=2, timeout=100).start()
    for start in (0, 1000):
        child(connect_and_send, stream.port, start, 300)
    items = list(stream)
    assert sorted(values(items)) == [*range(300), *range(1000, 1300)]
    # Those of one producer stay in order.
    for start in (0, 1000):
        own = [v for v in values(items) if start <= v < start + 300]
        assert own == list(range(start, start + 300))
    assert all(td.is_consolidated() and bool((td["y"] == td["x"][0, 0]).all()) for td in items)
    assert "tdio-ahead" not in names()
    # The port is free again, and a second pass listens there.
    child(connect_and_send, stream.port, 0, 3)
    child(connect_and_send, stream.port, 0, 3)
    assert len(list(stream)) == 6


@pytest.mark.parametrize("on_lost", ["raise", "continue"])
def test_a_producer_is_killed(child, on_lost):
    stream = PipeStream.serve(0, host=HOST, producers=2, timeout=100, on_lost=on_lost).start()
    child(connect_and_send, stream.port, 0, 5, signal.SIGKILL)
    got = []
    items = iter(stream)
    got.append(next(items))
    child(connect_and_send, stream.port, 1000, 5)
    if on_lost == "raise":
        with pytest.raises(PeerLost, match="producer 1 of 2"):
            got += items
    else:
        got += items
        assert stream.lost == 1
        assert sorted(values(got)) == [*range(5), *range(1000, 1005)]


def test_nothing_is_left(server):
    port = server(100_000)
    stream = PipeStream.connect(HOST, port)
    next(iter(stream))
    before = descriptors()
    for _ in range(3):
        for _ in stream:
            break
    with pytest.raises(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError
    items = iter(stream)
    next(items)
    del items
    assert descriptors() <= before
    assert "tdio-ahead" not in names()


def test_nobody_there():
    with pytest.raises(PipeTimeout, match="nothing answered"):
        list(PipeStream.connect(HOST, 1, connect_timeout=0.3))
    with pytest.raises(PipeTimeout, match="2 of 2 not connected"):
        list(PipeStream.serve(0, producers=2, timeout=0.3))
    one = PipeStream.serve(0, host=HOST).start()
    with pytest.raises(PortInUse):
        PipeStream.serve(one.port, host=HOST).start()
    one.close()
    PipeStream.serve(one.port, host=HOST).start().close()


def test_a_node_resumes(server):
    port = server(6, resumable=True)
    run_node_resume_test(lambda: PipeReader(PipeStream.connect(HOST, port, resumable=True)))


def test_pipelines_resume(server):
    from torchdata.nodes import Loader, Prefetcher, Unbatcher

    port = server(5, resumable=True)

    def stream(**options):
        return PipeStream.connect(HOST, port, resumable=True, **options)

    run_resume_test(lambda: Loader(Prefetcher(PipeReader(stream()), 2)))
    run_resume_test(lambda: Loader(Unbatcher(PipeReader(stream(rebatch=7)))))


# ---- workers

LOADER = """
import sys
from torch.utils.data import DataLoader
from tdio import PipeStream

def main(port, workers, context):
    stream = PipeStream.connect("127.0.0.1", port, timeout=100)
    loader = DataLoader(stream, batch_size=None, num_workers=workers,
                        multiprocessing_context=context)
    for _ in range(2):
        items = list(loader)
        assert sorted(int(td["x"][0, 0]) for td in items) == sorted([*range(20)] * workers)
        assert all(td.is_consolidated() for td in items)
    for _ in loader:
        break

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.parametrize(("workers", "context"), [(1, "fork"), (2, "fork"), (1, "spawn")])
def test_workers(server, tmp_path, workers, context):
    """In a process that has not used UCX, so that its workers may be forked."""
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    command = [sys.executable, str(script), str(server(20)), str(workers), context]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_memory_that_is_received_into_again_does_not_leave_a_worker(server):
    """The worker is ahead of the trainer, which would see later items in earlier ones."""
    stream = PipeStream.connect(HOST, server(5, False), clone=False)
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ValueError, match="clone=False"):
        list(loader)


def test_serving_workers_do_not_share_a_port():
    loader = DataLoader(
        PipeStream.serve(0), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    with pytest.raises(ValueError, match="num_workers=2"):
        list(loader)


STATEFUL = """
import sys
from torchdata.stateful_dataloader import StatefulDataLoader
from tdio import PipeStream

def values(items):
    return [int(td["x"][0, 0]) for td in items]

def main(port, workers):
    def loader():
        stream = PipeStream.connect("127.0.0.1", port, timeout=100, resumable=True)
        return StatefulDataLoader(stream, batch_size=None, num_workers=workers)
    first = loader()
    items = iter(first)
    got = values(next(items) for _ in range(7))
    state = first.state_dict()
    del items
    assert len(repr(state)) < 2000, state
    resumed = loader()
    resumed.load_state_dict(state)
    assert got + values(resumed) == list(range(20))
    assert values(resumed) == list(range(20))

if __name__ == "__main__":
    for workers in (1, 0):  # the one forks, which a process that has used UCX may not
        main(int(sys.argv[1]), workers)
"""


def test_a_stateful_loader_resumes(server, tmp_path):
    script = tmp_path / "stateful.py"
    script.write_text(STATEFUL)
    command = [sys.executable, str(script), str(server(20, True))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
