"""tdio and tensordict's own pipe, as two processes, in both directions."""

import asyncio
import os
import time
import traceback

import pytest
import torch

pytest.importorskip("ucxx")

from tdio import TensorDictPipe, TensorDictServer, recv_tensordict, send_tensordict
from tdio.errors import PeerLost, ProtocolError, UnsupportedValue
from tdio.testing._pipe_kinds import check_same, check_same_bits, kinds, leaf_kinds
from tdio.transport import ucx
from tests._children import CHILDREN
from tests._ports import free_port

# What tensordict's pipe cannot send, and what it cannot read.
NOT_FROM_REFERENCE = {"tensorclass", "dtypes", "odd names", "lazy stack", "lazy below"}
NOT_TO_REFERENCE = {"dtypes", "odd names"}
FLOAT8 = "float8"


def plain_kinds(without):
    torch.manual_seed(0)
    found = {name: td for name, td in kinds().items() if name not in without}
    whole = kinds()["dtypes"]
    names = [n for n in whole.keys() if FLOAT8 not in n and n != "complex128"]
    found["dtypes"] = whole.select(*names)
    return found


def leaves_of():
    torch.manual_seed(0)
    return leaf_kinds()


# ---- what tensordict does, in a process of its own


async def reference_sends(pipe, tds):
    for td in tds:
        await pipe.asend(td)
    # Without this tensordict's close loses what it has sent.
    await asyncio.sleep(0.5)


async def reference_checks(pipe, tds):
    check = check_same if pipe._consolidated else check_same_leaves
    for want in tds:
        check(await pipe.arecv(), want)
    # If it closed at once, the other end could not know that everything had arrived.
    await asyncio.sleep(0.5)


async def reference_send_tensordict(endpoint, tds, consolidated):
    from tensordict._ucxx import send_tensordict as send

    for td in tds:
        await send(endpoint, td, consolidated=consolidated)
    await asyncio.sleep(0.5)


async def reference_recv_tensordict(endpoint, tds, consolidated):
    from tensordict._ucxx import recv_tensordict as recv

    check = check_same if consolidated else check_same_leaves
    for want in tds:
        check(await recv(endpoint, consolidated=consolidated), want)


def check_same_leaves(got, want):
    assert got.batch_size == want.batch_size
    for key, value in want.items(True, True):
        if isinstance(value, torch.Tensor) and not value.is_nested:
            one = got.get(key)
            check_same_bits(getattr(one, "data", one), getattr(value, "data", value), str(key))


async def reference_work(kind, port, consolidated, tds_name, without):
    import ucxx
    from tensordict._ucxx import TensorDictPipe as Pipe

    tds = list((plain_kinds(without) if tds_name == "storage" else leaves_of()).values())
    tds = [td for td in tds for _ in range(2)]
    if kind in ("sends", "checks"):
        pipe = await Pipe.connect("127.0.0.1", port, consolidated=consolidated)
        await {"sends": reference_sends, "checks": reference_checks}[kind](pipe, tds)
        await pipe.aclose()
    elif kind == "listens":
        pipe = await Pipe.listen(port, consolidated=consolidated)
        await reference_checks(pipe, tds)
        await pipe.aclose()
    else:
        endpoint = await ucxx.create_endpoint("127.0.0.1", port)
        work = reference_send_tensordict if kind == "send" else reference_recv_tensordict
        await work(endpoint, tds, consolidated)
        await endpoint.close()


def reference_main(connection, *args):
    torch.set_num_threads(1)
    try:
        asyncio.run(reference_work(*args))
    except BaseException:
        connection.send(traceback.format_exc())
    else:
        connection.send(None)
    # tensordict's side may hang as it ends.
    connection.close()
    os._exit(0)


class Reference:
    """tensordict's pipe at work in a process of its own."""

    def __init__(self, *args):
        self.ours, theirs = CHILDREN.Pipe()
        self.process = CHILDREN.Process(target=reference_main, args=(theirs, *args), daemon=True)
        self.process.start()

    def end(self):
        try:
            assert self.ours.poll(60), "tensordict's side is still running"
            failure = self.ours.recv()
            assert failure is None, f"tensordict's side failed:\n{failure}"
        finally:
            self.process.join(3)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()


def with_reference(kind, consolidated, without, ours):
    """Listen, let tensordict connect, and run ``ours`` on the pipe."""
    started = []

    async def work():
        def begin(host, port):
            tds = "storage" if consolidated else "leaves"
            started.append(Reference(kind, port, consolidated, tds, without))

        pipe = await TensorDictPipe.listen(0, on_bound=begin, consolidated=consolidated)
        await asyncio.wait_for(ours(pipe), 60)

    try:
        asyncio.run(work())
    finally:
        for reference in started:
            reference.end()


@pytest.mark.parametrize("consolidated", [True, False])
def test_from_tensordict(consolidated):
    tds = plain_kinds(NOT_FROM_REFERENCE) if consolidated else leaves_of()

    async def ours(pipe):
        for name in (n for n in tds for _ in range(2)):
            got = await pipe.arecv()
            if consolidated:
                check_same(got, tds[name])
            else:
                check_same_leaves(got, tds[name])
        with pytest.raises(PeerLost):
            await pipe.arecv()

    with_reference("sends", consolidated, NOT_FROM_REFERENCE, ours)


@pytest.mark.parametrize("consolidated", [True, False])
def test_to_tensordict(consolidated):
    tds = plain_kinds(NOT_TO_REFERENCE) if consolidated else leaves_of()

    async def ours(pipe):
        if consolidated:
            for name in ("dtypes", "odd names"):
                with pytest.raises(UnsupportedValue, match="consolidated=False"):
                    await pipe.asend(kinds()[name])
        for td in (td for td in tds.values() for _ in range(2)):
            await pipe.asend(td)
        await pipe.aclose()

    with_reference("checks", consolidated, NOT_TO_REFERENCE, ours)


def test_connecting_to_tensordict():
    port = free_port()
    reference = Reference("listens", port, True, "storage", NOT_TO_REFERENCE)

    async def ours():
        async with await TensorDictPipe.connect("127.0.0.1", port, timeout=60) as pipe:
            for td in (td for td in plain_kinds(NOT_TO_REFERENCE).values() for _ in range(2)):
                await pipe.asend(td)

    asyncio.run(ours())
    reference.end()


def test_tensordict_connects_to_a_server():
    async def ours():
        got = []

        async def handler(pipe):
            try:
                async for td in pipe:
                    got.append(set(td.keys()))
            except PeerLost:
                pass
            finally:
                server.close()

        async with TensorDictServer(0, host="127.0.0.1") as server:
            reference = Reference("sends", server.port, True, "storage", NOT_FROM_REFERENCE)
            await asyncio.wait_for(server.serve(handler), 60)
        reference.end()
        return got

    assert len(asyncio.run(ours())) == 2 * len(plain_kinds(NOT_FROM_REFERENCE))


@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.parametrize("kind", ["send", "recv"])
def test_send_and_recv_tensordict(kind, consolidated):
    without = NOT_FROM_REFERENCE if kind == "send" else NOT_TO_REFERENCE
    tds = plain_kinds(without) if consolidated else leaves_of()
    listener = ucx.listen("127.0.0.1", 0)
    storage = "storage" if consolidated else "leaves"
    reference = Reference(kind, listener.port, consolidated, storage, without)

    async def ours():
        endpoint = await listener.accept_async(60)
        listener.close()
        for td in (td for td in tds.values() for _ in range(2)):
            if kind == "recv":
                await send_tensordict(endpoint, td, consolidated=consolidated)
            else:
                got = await recv_tensordict(endpoint, consolidated=consolidated)
                (check_same if consolidated else check_same_leaves)(got, td)
        if kind == "recv":
            time.sleep(1)
        endpoint.close()

    asyncio.run(ours())
    reference.end()


def test_the_ends_disagree_about_consolidated():
    async def ours(pipe):
        with pytest.raises(ProtocolError, match="consolidated"):
            while True:
                await pipe.arecv()

    started = []

    async def work():
        def begin(host, port):
            started.append(Reference("sends", port, False, "leaves", NOT_FROM_REFERENCE))

        pipe = await TensorDictPipe.listen(0, on_bound=begin, consolidated=True)
        await asyncio.wait_for(ours(pipe), 60)

    asyncio.run(work())
    started[0].process.kill()
    started[0].process.join()
