"""The code of the README, the docs and the docstrings runs."""

import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tdio import StoreBatchSampler, TensorDictStore
from tests._ports import free_port

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LOOPS = ROOT / "docs" / "loops.md"
DATA = ROOT / "docs" / "data.md"
PIPES = ROOT / "docs" / "pipes.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
#: A block that is a file of its own says so in its first line.
FILE = re.compile(r"# (\w+\.py)\b")
MODULES = [
    "tdio.store.plain",
    "tdio.store.lazy",
    "tdio.store.opening",
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


def blocks(page):
    return [code for code in BLOCK.findall(page.read_text()) if not FILE.match(code)]


def pieces():
    """What runs by itself: a page, its blocks one after the other; each loop after the beginning."""
    for page in PAGES:
        codes = blocks(page)
        if page == LOOPS:
            for number, code in enumerate(codes[1:]):
                yield pytest.param(f"{codes[0]}\n{code}", id=f"{page.name}-{number}")
        elif codes:
            yield pytest.param("\n".join(codes), id=page.name)


@pytest.mark.parametrize("code", [*pieces()])
def test_the_code_of_a_page_runs(code, tmp_path):
    # -c: workers that are not forked (Python 3.14) would run a script file again.
    run([sys.executable, "-c", code], tmp_path)


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_files(page, folder):
    """Write the blocks of a page that are files."""
    for code in BLOCK.findall(page.read_text()):
        if name := FILE.match(code):
            compile(code, name[1], "exec")  # Some are not run.
            (folder / name[1]).write_text(code)


@pytest.mark.timeout(300)
def test_training_with_ddp_stops_and_resumes(server, tmp_path):
    """Two ranks, stopped and resumed, end with the weights of one that took their rows together."""
    write_files(LOOPS, tmp_path)
    address = ["127.0.0.1", str(server.port), f"ddp-{tmp_path.name}"]
    run([sys.executable, "upload.py", *address], tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def train(*steps):
        run([*torchrun, "train.py", *address, *steps], tmp_path)
        saved = torch.load(tmp_path / "checkpoint.pt")
        return (
            saved["step"],
            saved["sampler"]["epoch"],
            saved["sampler"]["position"],
            saved["model"],
        )

    store = TensorDictStore.from_store(td_id=address[2], **server.tcp_kwargs)
    expected = weights_of_one(store[:])
    *at, weights = train("6")
    assert at == [4, 0, 512]
    assert not torch.allclose(weights["module.weight"], expected)
    *at, weights = train()
    assert at == [16, 1, 1000]
    torch.testing.assert_close(weights["module.weight"], expected)
    store.clear_redis()


def weights_of_one(rows):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimiser = torch.optim.Adam(model.parameters())
    sampler = StoreBatchSampler(1000, 128, shuffle=True, seed=1)
    for batch in [*sampler, *sampler]:
        loss = torch.nn.functional.mse_loss(model(rows["x"][batch]), rows["y"][batch])
        optimiser.zero_grad(), loss.backward(), optimiser.step()
    return model.weight


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
@pytest.mark.parametrize(
    ("page", "listens", "connects"),
    [
        (LOOPS, "learn.py", ["producer.py"] * 2),
        (PIPES, "reader.py", ["writer.py"]),
        (DATA, "produce.py", ["consume.py"]),
    ],
)
def test_the_programs_of_a_page_find_each_other(page, listens, connects, tmp_path):
    write_files(page, tmp_path)
    port = str(free_port())
    programs = [[listens, port], *([name, "127.0.0.1", port] for name in connects)]
    running = [
        subprocess.Popen([sys.executable, *program], cwd=tmp_path, stderr=subprocess.PIPE)
        for program in programs
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_run(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
