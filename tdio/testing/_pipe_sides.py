"""What each end of a pipe does in the suite: plain functions, so that one can run elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, UnbatchedTensor

from tdio import TensorDictPipe
from tdio.errors import (
    AuthenticationFailed,
    EndOfStream,
    EventLoopRunning,
    PeerLost,
    PipeClosed,
    ProtocolError,
    UnsupportedValue,
)
from tdio.testing._pipe_kinds import check_same, check_same_bits, kinds, leaf_kinds

_EMPTY: Any = TensorDict()


async def send_stream(pipe: TensorDictPipe) -> None:
    """Send, then close at once."""
    for i in range(300):
        await pipe.asend(TensorDict(a=torch.full((64,), i), b=torch.full((3,), float(i))))
    await pipe.aclose()


async def recv_stream(pipe: TensorDictPipe) -> None:
    """The same schema comes into the same buffer, and nothing is lost at the end."""
    first, count = None, 0
    async for td in pipe:
        assert td["a"].eq(count).all()
        assert td["b"].eq(count).all()
        first = first if first is not None else td
        assert td is first
        assert td.is_consolidated()
        count += 1
    assert count == 300
    with pytest.raises(EndOfStream):
        await pipe.arecv()
    await pipe.aclose()
    assert pipe.closed


async def send_kinds(pipe: TensorDictPipe) -> None:
    """Each kind twice, so that each schema is new and known, and all of them once more."""
    torch.manual_seed(0)
    everything = kinds()
    for td in everything.values():
        await pipe.asend(td)
        await pipe.asend(td)
    for td in everything.values():
        await td.asend(pipe)
    await pipe.aclose()


async def recv_kinds(pipe: TensorDictPipe) -> None:
    """What comes is what was sent."""
    torch.manual_seed(0)
    everything = kinds()
    for name in [n for n in everything for _ in range(2)] + list(everything):
        check_same(await _EMPTY.arecv(pipe), everything[name])
    with pytest.raises(EndOfStream):
        await pipe.arecv()
    await pipe.aclose()


async def send_leaves(pipe: TensorDictPipe) -> None:
    """The same leaf by leaf."""
    torch.manual_seed(0)
    for td in leaf_kinds().values():
        await pipe.asend(td)
    await pipe.aclose()


async def recv_leaves(pipe: TensorDictPipe) -> None:
    """What comes is what was sent."""
    torch.manual_seed(0)
    for want in leaf_kinds().values():
        got = await pipe.arecv()
        for key, value in want.items(True, True):
            if isinstance(value, torch.Tensor) and not isinstance(value, UnbatchedTensor):
                check_same_bits(got.get(key), value, str(key))
        assert set(got.keys(True, True)) == set(want.keys(True, True))
        assert got.batch_size == want.batch_size
        if "each" in want:
            check_same(got, want)
    await pipe.aclose()


async def send_numbers(pipe: TensorDictPipe) -> None:
    """Numbered tensordicts with a value beside the tensor."""
    for i in range(12):
        await pipe.asend(TensorDict(a=torch.full((4,), i), n=TensorDict(b=torch.ones(2)), s="v"))
    await pipe.aclose()


async def recv_and_edit(pipe: TensorDictPipe) -> None:
    """Whatever is done to a received tensordict, the next one is whole."""

    def set_value(td: Any) -> None:
        td["s"] = "other"

    def grow(td: Any) -> None:
        td["new"] = torch.ones(3)

    def batch(td: Any) -> None:
        td["n"].batch_size = [2]

    edits: list[Callable[[Any], Any]] = [
        lambda td: td.lock_().unlock_(),
        lambda td: td.__setitem__("a", torch.zeros(9)),
        lambda td: td["n"].__setitem__("b", torch.zeros(1)),
        lambda td: td.pop("a"),
        lambda td: td["n"].clear(),
        lambda td: td.rename_key_("a", "z"),
        set_value,
        grow,
        batch,
        lambda td: td.zero_(),
        lambda td: td.clear(),
    ]
    for i, edit in enumerate([*edits, lambda td: None]):
        td = await pipe.arecv()
        assert set(td.keys(True, True)) == {"a", ("n", "b")}
        assert td["a"].tolist() == [i] * 4
        assert td["n", "b"].tolist() == [1, 1]
        assert td["n"].batch_size == torch.Size([])
        assert td["s"] == "v"
        edit(td)
        del td
    await pipe.aclose()


async def recv_into(pipe: TensorDictPipe) -> None:
    """A tensordict that fits is filled; one that does not is left alone."""
    fits = TensorDict(a=torch.zeros(4, dtype=torch.int64), n=TensorDict(b=torch.ones(2)), s="v")
    fits = fits.consolidate(metadata=True)
    other = TensorDict(a=torch.zeros(4)).consolidate(metadata=True)
    first = await pipe.arecv()
    assert await pipe.arecv(fits) is fits
    assert fits["a"].tolist() == [1] * 4
    assert first["a"].tolist() == [0] * 4
    assert await pipe.arecv(other) is first
    assert other["a"].tolist() == [0.0] * 4
    assert await pipe.arecv(device="cpu") is first
    async for td in pipe:
        assert td is first
    await pipe.aclose()


async def ping(pipe: TensorDictPipe) -> None:
    """Both ends send and receive at once, more than one window each."""

    async def send() -> None:
        for i in range(1500):
            await pipe.asend(TensorDict(a=torch.tensor([i])))

    sending = asyncio.ensure_future(send())
    for i in range(1500):
        assert (await pipe.arecv())["a"].item() == i
    await sending
    await pipe.aclose()


async def send_at_once(pipe: TensorDictPipe) -> None:
    """Sends that overlap are serialised, also of different schemas."""
    await asyncio.gather(
        *(pipe.asend(TensorDict(a=torch.full((50 + i % 3,), i))) for i in range(40))
    )
    await pipe.aclose()


async def recv_at_once(pipe: TensorDictPipe) -> None:
    """All of them come, in order."""
    got = [td["a"][0].item() async for td in pipe]
    assert got == list(range(40))
    await pipe.aclose()


async def send_to_slow(pipe: TensorDictPipe) -> None:
    """A reader that does not read makes its sender wait."""
    sent = 0

    async def send() -> None:
        nonlocal sent
        for i in range(4000):
            await pipe.asend(TensorDict(a=torch.full((128,), i)))
            sent += 1

    sending = asyncio.ensure_future(send())
    while True:
        before = sent
        await asyncio.sleep(0.3)
        if sent == before and sent:
            break
    assert sent <= 1100, f"{sent} tensordicts were sent to a reader that reads none"
    await pipe.arecv()
    await sending
    await pipe.aclose()


async def recv_slow(pipe: TensorDictPipe) -> None:
    """Sleep first; then everything comes."""
    await asyncio.sleep(3)
    await pipe.asend(TensorDict())
    count = 0
    async for td in pipe:
        assert td["a"][0].item() == count
        count += 1
    assert count == 4000
    await pipe.aclose()


async def send_late(pipe: TensorDictPipe) -> None:
    """Send when the other end has given up once."""
    await pipe.arecv()
    await pipe.asend(TensorDict(a=torch.ones(3)))
    await pipe.aclose()


async def recv_cancelled(pipe: TensorDictPipe) -> None:
    """A receive that is cancelled before anything came has lost nothing."""
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(pipe.arecv(), 0.1)
    assert not pipe.closed
    await pipe.asend(TensorDict())
    assert (await pipe.arecv())["a"].tolist() == [1, 1, 1]
    await pipe.aclose()


async def send_refused(pipe: TensorDictPipe) -> None:
    """What cannot be sent is refused before anything is; blocking calls in a loop are too."""
    for bad in (
        TensorDict(a=NonTensorData(object())),
        TensorDict(a=torch.eye(3).to_sparse()),
        TensorDict(a=UnbatchedTensor(torch.ones(2))),
    ):
        with pytest.raises(UnsupportedValue):
            await pipe.asend(bad)
    with pytest.raises(EventLoopRunning, match=r"await pipe\.asend"):
        pipe.send(TensorDict())
    with pytest.raises(EventLoopRunning, match=r"await pipe\.arecv"):
        pipe.recv()
    with pytest.raises(EventLoopRunning, match=r"await pipe\.aclose"):
        pipe.close()
    await pipe.asend(TensorDict(a=torch.ones(2)))
    await pipe.aclose()
    with pytest.raises(PipeClosed):
        await pipe.asend(TensorDict())
    with pytest.raises(PipeClosed):
        await pipe.arecv()


async def recv_one(pipe: TensorDictPipe) -> None:
    """One comes, then the end."""
    assert (await pipe.arecv())["a"].tolist() == [1, 1]
    assert [td async for td in pipe] == []
    await pipe.aclose()


async def send_sync(pipe: TensorDictPipe) -> None:
    """Plain calls from a thread."""

    def work() -> None:
        for i in range(1500):
            pipe.send(TensorDict(a=torch.full((8,), i)))
        pipe.close()

    await asyncio.to_thread(work)


async def recv_sync(pipe: TensorDictPipe) -> None:
    """Plain calls from a thread."""

    def work() -> None:
        assert [td["a"][0].item() for td in pipe] == list(range(1500))
        with pytest.raises(EndOfStream):
            pipe.recv()
        pipe.close()

    await asyncio.to_thread(work)


async def vanish(pipe: TensorDictPipe) -> None:
    """Send two, then go without a word."""
    for i in range(2):
        await pipe.asend(TensorDict(a=torch.full((3,), i)))
    await pipe.arecv()
    pipe._drop()


async def recv_until_lost(pipe: TensorDictPipe) -> None:
    """What came before is received; then the loss is an error that is told and kept."""
    got = 0
    with pytest.raises(PeerLost):
        async for td in pipe:
            assert td["a"][0].item() == got
            got += 1
            if got == 2:
                await pipe.asend(TensorDict())
    assert got == 2
    assert pipe.closed
    assert isinstance(pipe.error, PeerLost)
    with pytest.raises(PipeClosed, match=r"lost|reset|closed"):
        await pipe.arecv()


async def recv_until_stop(pipe: TensorDictPipe) -> None:
    """With ``on_error="stop"`` the iteration ends, and the exception is kept."""
    got = 0
    async for _ in pipe:
        got += 1
        if got == 2:
            await pipe.asend(TensorDict())
    assert got == 2
    assert isinstance(pipe.error, PeerLost)


async def send_too_much(pipe: TensorDictPipe) -> None:
    """Send more than the other end accepts, and hear of it."""
    with pytest.raises(PeerLost):
        for _ in range(100):
            await pipe.asend(TensorDict(a=torch.zeros(1 << 18)))
            await asyncio.sleep(0.05)
    with pytest.raises((PeerLost, PipeClosed, ProtocolError)):
        await pipe.arecv()


async def refuse_too_much(pipe: TensorDictPipe) -> None:
    """A size above the limit closes the pipe before memory is taken."""
    with pytest.raises(ProtocolError, match="max_message_bytes"):
        await pipe.arecv()
    assert pipe.closed
    with pytest.raises(PipeClosed, match="max_message_bytes"):
        await pipe.arecv()


async def send_until_told(pipe: TensorDictPipe) -> None:
    """A reader that leaves early is an error at the sender, which lost data."""
    with pytest.raises(PeerLost, match=r"did not read|has read|lost|closed"):
        for i in range(100_000):
            await pipe.asend(TensorDict(a=torch.full((4,), i)))
    with pytest.raises((PeerLost, PipeClosed)):
        await pipe.asend(TensorDict())
    await pipe.aclose()


async def leave_early(pipe: TensorDictPipe) -> None:
    """Read a little and close."""
    for _ in range(5):
        await pipe.arecv()
    await pipe.aclose()


async def close_while_receiving(pipe: TensorDictPipe) -> None:
    """A receive that waits when another task closes the pipe ends with ``PipeClosed``."""
    waiting = asyncio.ensure_future(pipe.arecv())
    await asyncio.sleep(0.2)
    await pipe.aclose(timeout=5)
    with pytest.raises((PipeClosed, EndOfStream)):
        await waiting


async def fail_to_authenticate(pipe: TensorDictPipe) -> None:
    """Another key, or none, ends in an error before any tensordict."""
    with pytest.raises((AuthenticationFailed, PeerLost)):
        await pipe.arecv()
    assert pipe.closed


async def recv_stream_of_1500(pipe: TensorDictPipe) -> None:
    """The async face reads what the sync one sent."""
    assert [td["a"][0].item() async for td in pipe] == list(range(1500))
    await pipe.aclose()
