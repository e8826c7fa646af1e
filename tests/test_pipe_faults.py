"""What a pipe does when the other end, or the connection, misbehaves: over a pair in memory."""

import asyncio
import contextlib
import gc
import json
import logging
import threading
import warnings

import pytest
import torch
from tensordict import TensorDict

from tdio import TensorDictPipe, TensorDictServer, recv_tensordict
from tdio.errors import (
    AuthenticationFailed,
    EndOfStream,
    PeerLost,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
)
from tdio.transport.memory import memory_pair
from tdio.wire.frames import LENGTH, Kind, encode_frame
from tests._children import assert_ends_silently

ONE = TensorDict(a=torch.arange(6), b=torch.ones(3))


def pair(tdio_peer=True, **options):
    a, b = memory_pair(tdio_peer=tdio_peer)
    return TensorDictPipe(a, **options), TensorDictPipe(b, **options), a, b


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


def drop(*pipes):
    for pipe in pipes:
        pipe._drop()


@pytest.mark.parametrize("tdio_peer", [True, False])
@pytest.mark.parametrize("consolidated", [True, False])
def test_a_stream_cut_after_each_message(tdio_peer, consolidated):
    """Every phase: before the first message, in the metadata, in the data, between tensordicts."""
    a, b, end, _ = pair(tdio_peer, consolidated=consolidated)
    for _ in range(3):
        a.send(ONE)
    messages = list(end._outbox[0])
    drop(a, b)
    for cut in range(len(messages) + 1):
        one, two = memory_pair(tdio_peer=tdio_peer)
        for message in messages[:cut]:
            one.inject(message)
        one.cut()
        pipe = TensorDictPipe(two, consolidated=consolidated)
        with pytest.raises(PeerLost):
            for td in pipe:
                assert torch.equal(td["a"], ONE["a"])
        assert pipe.closed
        assert isinstance(pipe.error, PeerLost)


@pytest.mark.parametrize("tdio_peer", [True, False])
@pytest.mark.parametrize("consolidated", [True, False])
def test_each_message_cut_short(tdio_peer, consolidated):
    a, b, end, _ = pair(tdio_peer, consolidated=consolidated)
    for _ in range(2):
        a.send(ONE)
    messages = list(end._outbox[0])
    drop(a, b)
    for short in range(len(messages)):
        for size in {0, len(messages[short]) // 2, len(messages[short]) - 1}:
            one, two = memory_pair(tdio_peer=tdio_peer)
            for i, message in enumerate(messages):
                one.inject(message[:size] if i == short else message)
            pipe = TensorDictPipe(two, consolidated=consolidated)
            with pytest.raises(ProtocolError):
                for _ in range(2):
                    pipe.recv()
            assert pipe.closed
            with pytest.raises(PipeClosed):
                pipe.recv()


@pytest.mark.parametrize("tdio_peer", [True, False])
def test_a_message_that_is_missing_or_twice(tdio_peer):
    a, b, end, _ = pair(tdio_peer)
    for i in range(4):
        a.send(ONE if i % 2 else TensorDict(x=torch.ones(i + 1)))
    messages = list(end._outbox[0])
    drop(a, b)
    for change in range(len(messages) - 1):
        for kept in (messages[:change] + messages[change + 1 :], messages[: change + 1] * 2):
            one, two = memory_pair(tdio_peer=tdio_peer)
            for message in kept:
                one.inject(message)
            one.cut()
            pipe = TensorDictPipe(two)
            # tensordict's format has no numbers: there, what is missing may go unnoticed.
            with pytest.raises((ProtocolError, PeerLost)):
                for _ in pipe:
                    pass


def test_a_receive_cancelled_in_the_middle_closes_the_pipe():
    async def work():
        a, b, _, end = pair()
        await a.asend(ONE)
        end.stall()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(b.arecv(), 0.05)
        assert b.closed
        with pytest.raises(PipeClosed, match="interrupted"):
            await b.arecv()
        with pytest.raises(PeerLost):
            await a.asend(ONE)
        drop(a)

    run(work())


def test_a_receive_that_runs_out_of_time():
    a, b, _, end = pair(timeout=0.05)
    with pytest.raises(PipeTimeout):
        b.recv()
    a.send(ONE)
    assert torch.equal(b.recv()["a"], ONE["a"])
    end.stall()
    a.send(ONE)
    with pytest.raises(PipeTimeout):
        b.recv()
    assert b.closed
    drop(a)


def test_a_reader_that_never_reads():
    a, b, _, _ = pair(timeout=0.05)
    sent = 0
    with pytest.raises(PipeTimeout):
        while True:
            a.send(ONE)
            sent += 1
    assert sent == 1024
    assert not a.closed
    with pytest.raises(PipeTimeout, match="0 of the 1024"):
        a.close(timeout=0.05)
    assert a.closed
    for _ in range(1024):
        b.recv()
    with pytest.raises(EndOfStream):
        b.recv()
    drop(b)


def test_large_tensordicts_wait_for_their_reader():
    a, b, _, _ = pair(timeout=0.05)
    big = TensorDict(a=torch.zeros(8 << 20, dtype=torch.uint8))
    sent = 0
    with pytest.raises(PipeTimeout):
        while True:
            a.send(big)
            sent += 1
    assert sent == 4
    drop(a, b)


def test_the_schema_counts_as_sent_only_once_it_was():
    class Fails(Exception):
        pass

    a, b, end, _ = pair(False)
    send = end.send

    def fail(*args):
        raise PipeTimeout("no room")

    end.send = fail
    with pytest.raises(PipeTimeout):
        a.send(ONE)
    assert a._protocol._identity is None
    assert a.closed
    end.send = send
    drop(b)


def test_loss_while_sending_leaves_what_has_arrived():
    a, b, _, _ = pair()
    for _ in range(3):
        a.send(ONE)
    drop(a)
    with pytest.raises(PeerLost):
        b.send(ONE)
    with pytest.raises(PeerLost):
        b.send(ONE)
    for _ in range(3):
        b.recv()
    with pytest.raises(PeerLost):
        b.recv()
    b.close()


def test_a_block_that_fails_gives_no_clean_end():
    a, b, _, _ = pair()
    with pytest.raises(KeyError), a:
        a.send(ONE)
        raise KeyError
    b.recv()
    with pytest.raises(PeerLost):
        b.recv()


def test_on_error_stop_warns_and_keeps_the_error(caplog):
    a, b, _, _ = pair(on_error="stop")
    a.send(ONE)
    drop(a)
    with caplog.at_level(logging.WARNING, "tdio"):
        assert len(list(b)) == 1
    assert isinstance(b.error, PeerLost)
    assert "stops at an error" in caplog.text
    assert list(b) == []


def test_on_error_is_checked():
    with pytest.raises(ValueError, match="on_error"):
        TensorDictPipe(memory_pair()[0], on_error="ignore")


def test_an_unclosed_pipe_warns_and_drops_the_connection():
    a, b, _, _ = pair()
    with pytest.warns(ResourceWarning, match="not closed"):
        a.__del__()
    with pytest.raises(PeerLost):
        b.recv()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del b
        gc.collect()


GARBAGE = [
    b"",
    b"\x00",
    b"\x07",
    b"x" * 31,
    b"x" * 500,
    encode_frame(Kind.ACK),
    encode_frame(Kind.SCHEMA, body=b"{}"),
    encode_frame(Kind.SCHEMA, body=b"\xff"),
    encode_frame(Kind.LEAVES, body=b"[]"),
    encode_frame(Kind.SCHEMA, body=b"[" * 100_000),
    encode_frame(Kind.END, count=5),
    encode_frame(Kind.END)[:4] + b"\x09" + encode_frame(Kind.END)[5:],
    encode_frame(Kind.END)[:5] + b"\x63" + encode_frame(Kind.END)[6:],
]


@pytest.mark.parametrize("tdio_peer", [True, False])
@pytest.mark.parametrize("message", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_closes_the_pipe(tdio_peer, message):
    one, two = memory_pair(tdio_peer=tdio_peer)
    one.inject(message)
    one.cut()
    pipe = TensorDictPipe(two)
    with pytest.raises((ProtocolError, PeerLost)):
        pipe.recv()
    assert pipe.closed


def test_garbage_among_the_acknowledgements():
    for message in (b"x", encode_frame(Kind.ACK, 5000), encode_frame(Kind.END)):
        a, b, _, end = pair(timeout=1)
        end.inject(message, channel=1)
        with pytest.raises(ProtocolError):
            for _ in range(600):
                a.send(ONE)
        assert a.closed
        drop(b)


def test_lengths_are_checked_before_memory_is_taken():
    one, two = memory_pair(tdio_peer=False)
    one.inject(b"\x00")
    one.inject(LENGTH.pack(1 << 60))
    with pytest.raises(ProtocolError, match="announces"):
        TensorDictPipe(two).recv()
    one, two = memory_pair(tdio_peer=False)
    level = {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": {"a": ["torch.uint8", [1 << 50], 0, 1 << 50, 0]},
        "cls_metadata": {"device": None, "names": [], "batch_size": [], "is_locked": False},
    }
    text = json.dumps({**level, "_total_bytes": 1 << 50, "_device": "cpu"}).encode()
    for message in (b"\x00", LENGTH.pack(len(text)), text):
        one.inject(message)
    with pytest.raises(ProtocolError, match="max_message_bytes"):
        TensorDictPipe(two).recv()
    one, two = memory_pair(tdio_peer=False)
    for message in (LENGTH.pack(len(text)), text):
        one.inject(message)
    with pytest.raises(ProtocolError, match="max_message_bytes"):
        run(recv_tensordict(two))
    one, two = memory_pair(tdio_peer=False)
    text = b'{"keys": ["a"], "dtypes": ["torch.uint8"], "shapes": [[1125899906842624]]}'
    for message in (LENGTH.pack(len(text)), text):
        one.inject(message)
    with pytest.raises(ProtocolError, match="limit"):
        TensorDictPipe(two, consolidated=False).recv()


def test_offsets_of_a_jagged_leaf_stay_inside_its_values():
    a, b, end, _ = pair()
    jagged = torch.nested.nested_tensor([torch.rand(2), torch.rand(5)], layout=torch.jagged)
    a.send(TensorDict(j=jagged, batch_size=[2]))
    b.recv()
    a.send(TensorDict(j=jagged, batch_size=[2]))
    storage = torch.frombuffer(bytearray(end._outbox[0].pop()), dtype=torch.uint8)
    storage[-24:].view(torch.int64)[2] = 1 << 40
    end._outbox[0].append(storage.numpy().tobytes())
    with pytest.raises(ProtocolError, match="offsets"):
        b.recv()
    drop(a)


def test_keys_in_files_and_bytes(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"secret\n")
    ends = memory_pair()
    a, b = TensorDictPipe(ends[0], auth_key=path), TensorDictPipe(ends[1], auth_key=b"secret")

    async def work():
        await asyncio.gather(a.asend(ONE), b.arecv())
        await asyncio.gather(a.aclose(), b.aclose())

    run(work())
    path.write_bytes(b"\n")
    with pytest.raises(ValueError, match="empty"):
        TensorDictPipe(memory_pair()[0], auth_key=path)


def test_a_proof_cannot_be_played_back():
    """Who has no key and sends back what it gets is refused."""
    one, two = memory_pair()
    pipe = TensorDictPipe(two, auth_key=b"secret", timeout=5)

    def mirror():
        for _ in range(2):
            one.wait(lambda: one.probe() is not None, 5)
            message = bytearray(one.probe())
            one.recv(message).result()
            one.send(message)

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(AuthenticationFailed):
        pipe.recv()
    thread.join()
    assert pipe.closed


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensordicts_pack_and_unpack_on_the_device():
    from tdio.pipe.incoming import Incoming
    from tdio.pipe.outgoing import Packer

    td = TensorDict(a=torch.arange(9, device="cuda"), n=TensorDict(b=torch.ones(3, device="cuda")))
    for sent in (td, td.consolidate(metadata=True)):
        parcel = Packer(True, True).pack(sent)
        assert parcel.buffers[0].is_cuda
        for device in (None, torch.device("cpu")):
            incoming = Incoming("test", 1 << 30)
            incoming.want(None, device)
            incoming.announce(parcel.schema.text, parcel.schema.flags)
            incoming.target().copy_(parcel.buffers[0])
            got = incoming.finish()
            assert got["a"].is_cuda is (device is None)
            assert torch.equal(got["a"].cpu(), td["a"].cpu())


def test_a_cancelled_receive_loses_nothing():
    """Whatever its call does besides: nothing is awaited once the tensordict is there."""

    async def work():
        a, b, _, _ = pair()
        for i in range(200):
            await a.asend(TensorDict(i=torch.tensor(i)))
        got = []
        while len(got) < 200:
            task = asyncio.ensure_future(b.arecv())
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                got.append(int((await task)["i"]))
        assert got == list(range(200))
        drop(a, b)

    run(work())


def test_a_cancelled_send_was_not_sent():
    async def work():
        a, b, _, _ = pair()
        sent = []
        for i in range(200):
            task = asyncio.ensure_future(a.asend(TensorDict(i=torch.tensor(i))))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
                sent.append(i)
        got = [int((await b.arecv())["i"]) for _ in sent]
        assert got == sent
        drop(a, b)

    run(work())


def test_options_are_checked_before_anybody_is_waited_for():
    for make in (
        lambda **options: TensorDictPipe.listen_sync(0, timeout=20, **options),
        lambda **options: TensorDictPipe.connect_sync("127.0.0.1", 9, timeout=20, **options),
        lambda **options: run(TensorDictPipe.listen(0, timeout=60, **options)),
        lambda **options: run(TensorDictPipe.connect("127.0.0.1", 9, timeout=60, **options)),
        lambda **options: TensorDictServer(0, **options),
    ):
        with pytest.raises(TypeError, match="nonsense"):
            make(nonsense=1)
        with pytest.raises(ValueError, match="on_error"):
            make(on_error="ignore")
        with pytest.raises(ValueError, match="empty"):
            make(auth_key=b"")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_pipe_whose_arguments_were_refused_is_no_open_one():
    with pytest.raises(TypeError):
        TensorDictPipe(memory_pair()[0], nonsense=1)
    gc.collect()


def test_an_interpreter_that_ends_with_an_open_pipe_says_nothing():
    code = (
        "from tdio import TensorDictPipe\n"
        "from tdio.transport.memory import memory_pair\n"
        "a, b = map(TensorDictPipe, memory_pair())\n"
        "import builtins; builtins.kept = a, b\n"
    )
    assert_ends_silently(code, 60)
