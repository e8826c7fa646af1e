"""The code of the README, the docs and the docstrings runs."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
MODULES = [
    "tdio.store.plain",
    "tdio.store.lazy",
    "tdio.data.dataset",
    "tdio.data.collate",
    "tdio.data.nodes",
    "tdio.data.pipe_reader",
    "tdio.data.sampler",
    "tdio.data.stream",
    "tdio.server",
    "tdio.testing.reads",
    "tdio.testing.stores",
    "tdio.pipe.pipe",
    "tdio.pipe.server",
    "tdio.pipe.messages",
    "tdio.transport.fake",
    "tdio.transport.memory",
]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name
)
def test_the_code_of_a_page_runs(page):
    code = "\n".join(BLOCK.findall(page.read_text()))
    # -c: workers that are not forked (Python 3.14) would run a script file again.
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_run(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
