"""The names of TensorDictBase that talk to another process of torch.distributed: a real pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _surface_gaps import RANK_GAPS
from _surface_ranks import PAIRS

from tdio.server import EmbeddedServer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def differences(
    server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """Run both ranks once; return what each found to differ, by case."""
    where = tmp_path_factory.mktemp("ranks")
    connection = json.dumps(server.connection_kwargs)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks: list[Any] = []
    try:
        for rank in (0, 1):
            arguments = [str(rank), str(where / "meet"), str(where / str(rank)), connection]
            command = [sys.executable, str(HERE / "_surface_ranks.py"), *arguments]
            ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
        for process in ranks:
            _, errors = process.communicate(timeout=110)
            assert process.returncode == 0, errors.decode()[-2000:]
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((where / str(rank)).read_text()) for rank in (0, 1)]


def _parameters() -> list[Any]:
    out = []
    for kind, name in PAIRS:
        gap = RANK_GAPS.get((kind, name))
        marks = [pytest.mark.xfail(strict=True, reason=gap)] if gap else []
        out.append(pytest.param(f"{name}-{kind}", id=f"{name}-{kind}", marks=marks))
    return out


@pytest.mark.parametrize("case", _parameters())
def test_a_store_exchanges_like_the_local_one(case: str, differences: list[dict[str, str]]) -> None:
    assert [found[case] for found in differences] == ["", ""]
