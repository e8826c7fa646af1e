"""Imports go downward only: the design's layers, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "tdio"
ORDER = ["errors", "layout", "_td", "wire", "transport", "store", "pipe", "data", "server", "cli"]
ORDER += ["testing"]
#: What only the transport may import.
FOREIGN = {"redis", "hiredis", "socket", "ssl", "ucxx"}


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


SOURCES = [p for p in sorted(ROOT.rglob("*.py")) if layer(p) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path):
    here = ORDER.index(layer(path))
    for name in imported(path):
        if name.startswith("tdio."):
            there = name.split(".")[1]
            assert ORDER.index(there) <= here, f"{path} imports {name}"
            # Stores and pipes stand side by side.
            assert (layer(path), there) != ("pipe", "store"), f"{path} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_transport_knows_the_network(path):
    # The server starts a process and pings it; nothing else may.
    if layer(path) in ("transport", "server"):
        return
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & FOREIGN, f"{path} imports {roots & FOREIGN}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_tensordict_is_imported_in_one_file(path):
    if path.name == "_td.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensordict"):
            private = [a.name for a in node.names if a.name.startswith("_")]
            assert node.module == "tensordict" and not private, f"{path}: {node.module} {private}"
            assert "store" not in node.module and "_ucxx" not in node.module
