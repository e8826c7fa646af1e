"""The suite over UCX, between two processes."""

import asyncio

import pytest

pytest.importorskip("ucxx")

from tdio import TensorDictPipe
from tdio.testing.pipes import LIMIT_S, PeerProcess, PipeTests


async def opener(address, **options):
    return await TensorDictPipe.connect(*address, **options)


@pytest.fixture(scope="module")
def peer():
    process = PeerProcess(opener)
    yield process
    process.close()


class TestUcx(PipeTests):
    @pytest.fixture(autouse=True)
    def with_peer(self, peer):
        self.peer = peer

    def both(self, left, right, left_options, right_options):
        async def work():
            def begin(host, port):
                self.peer.begin(right, ("127.0.0.1", port), right_options)

            pipe = await TensorDictPipe.listen(0, on_bound=begin, **left_options)
            await asyncio.wait_for(left(pipe), LIMIT_S)

        asyncio.run(work())
        self.peer.end()

    # A listener refuses a client without the key and waits for the next: test_pipe_server.
    test_a_wrong_key = None
