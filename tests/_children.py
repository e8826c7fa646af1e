"""Processes of the pipe tests: forked from a server that has the imports and never uses UCX."""

import multiprocessing
import subprocess
import sys

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


def assert_ends_silently(code, limit_s):
    """Run a program that leaves things open: the interpreter's end says nothing of them."""
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=limit_s)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
