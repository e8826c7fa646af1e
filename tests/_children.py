"""Processes of the pipe tests: forked from a server that has the imports and never uses UCX."""

import multiprocessing

import pytest

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["torch", "tensordict", "tdio", "tdio.transport.ucx"])


@pytest.fixture(name="child")
def children():
    """Start functions as processes; what is left of them is killed at the end."""
    started = []

    def start(work, *args, context=CHILDREN):
        process = context.Process(target=work, args=args)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()
