"""Turns: one at a time, whoever asks, and nobody is forgotten."""

import asyncio
import random
import threading
import time

import pytest

from tdio.errors import PipeTimeout
from tdio.transport.tasks import Turn


class Watched:
    """What only one may be in at a time."""

    def __init__(self):
        self.turn, self.inside, self.count = Turn(), 0, 0

    def enter(self):
        self.inside += 1
        assert self.inside == 1
        self.count += 1

    def leave(self):
        self.inside -= 1
        self.turn.release()


def test_threads_and_coroutines_take_turns_and_those_that_give_up_hold_nobody():
    watched, errors = Watched(), []

    def plain(seed):
        draw = random.Random(seed)
        try:
            for _ in range(300):
                try:
                    watched.turn.acquire(draw.choice([None, 0, 1e-4]), "it")
                except PipeTimeout:
                    continue
                watched.enter()
                if draw.random() < 0.3:
                    time.sleep(1e-4)
                watched.leave()
        except BaseException as error:
            errors.append(error)

    async def one(seed):
        draw = random.Random(seed)
        for _ in range(100):
            asked = asyncio.ensure_future(
                watched.turn.acquire_async(draw.choice([None, 1e-4]), "it")
            )
            try:
                await asyncio.wait_for(asked, draw.choice([None, 1e-4]))
            except (PipeTimeout, asyncio.TimeoutError):
                continue
            watched.enter()
            if draw.random() < 0.3:
                await asyncio.sleep(0)
            watched.leave()

    async def all_of(seeds):
        await asyncio.gather(*map(one, seeds))

    def looped():
        try:
            asyncio.run(all_of(range(9, 13)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=plain, args=(seed,)) for seed in range(4)]
    threads.append(threading.Thread(target=looped))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert watched.count > 300
    # It is free again.
    watched.turn.acquire(0, "it")


def test_a_turn_goes_to_who_came_first():
    turn, order = Turn(), []

    async def take(name):
        await turn.acquire_async(5, "it")
        order.append(name)
        turn.release()

    async def main():
        await turn.acquire_async(5, "it")
        tasks = [asyncio.ensure_future(take(name)) for name in range(5)]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        await asyncio.sleep(0)
        turn.release()
        await take(5)
        await asyncio.wait(tasks)

    asyncio.run(main())
    assert order == [0, 2, 3, 4, 5]


def test_a_turn_that_does_not_come_is_named():
    turn = Turn()
    turn.acquire(None, "it")
    with pytest.raises(PipeTimeout, match=r"send\(\) waited 0\.01 s"):
        turn.acquire(0.01, "send()")
    turn.release()
    turn.acquire(0, "send()")
