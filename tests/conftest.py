"""One real server for the whole test session."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import torch

from tdio.server import EmbeddedServer, embedded_server

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """The embedded server of the test session. Tests share it: use a prefix of your own."""
    with embedded_server() as running:
        yield running


@pytest.fixture
def conn(server: EmbeddedServer) -> dict[str, Any]:
    """Arguments that connect over the unix socket."""
    return server.connection_kwargs


@pytest.fixture(scope="session")
def tcp(server: EmbeddedServer) -> dict[str, Any]:
    """Arguments that connect over TCP."""
    return server.tcp_kwargs


@pytest.fixture
def raw(conn: dict[str, Any]) -> Iterator[redis.Redis]:
    """A plain client, to look at the server around what is tested."""
    with redis.Redis(**conn) as client:
        yield client


@pytest.fixture
def prefix(raw: redis.Redis) -> Iterator[str]:
    """A namespace of this test alone; what is left in it is deleted."""
    prefix = f"test-{uuid.uuid4().hex}"
    yield prefix
    left = raw.keys(f"{prefix}:*")
    if left:
        raw.delete(*left)


@pytest.fixture
def clean_server(server: EmbeddedServer, raw: redis.Redis) -> EmbeddedServer:
    """The same server, emptied first."""
    raw.flushall()
    return server
