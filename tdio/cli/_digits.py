"""The first half of the demo: a classifier trained on the scikit-learn digits."""

from __future__ import annotations

import time
from typing import Any

import click
import torch
from sklearn.datasets import load_digits
from tensordict import TensorDict
from torch import nn

from tdio import StoreDataset, TensorDictStore
from tdio.cli._loading import shuffled

_TEST_ROWS = 360
_EPOCHS = 25


def run(connection: dict[str, Any], workers: int) -> float:
    """Upload, train from a loader, and return the accuracy on the test rows, 0 to 1."""
    train, test = _upload(connection)
    dataset = StoreDataset(td_id=train, **connection)
    loader = shuffled(dataset, 64, workers)
    click.echo(f"  opened {train} in a DataLoader with {workers} workers")
    model = _model()
    rows, seconds = _train(model, loader)
    click.echo(f"  trained {_EPOCHS} epochs: {rows:,} rows, {rows / seconds:,.0f} rows/s")
    batch = StoreDataset(td_id=test, **connection)[:]
    with torch.no_grad():
        guess = model.eval()(batch["image"].float() / 16).argmax(-1)
    return float((guess == batch["label"]).float().mean())


def _upload(connection: dict[str, Any]) -> tuple[str, str]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    rows = TensorDict(
        image=torch.from_numpy(digits.images).to(torch.uint8)[order],
        label=torch.from_numpy(digits.target)[order],
        batch_size=[len(order)],
    )
    began = time.monotonic()
    parts = rows[:-_TEST_ROWS], rows[-_TEST_ROWS:]
    ids = [TensorDictStore.from_tensordict(part, **connection).td_id for part in parts]
    seconds = time.monotonic() - began
    click.echo(
        f"  uploaded {len(order) - _TEST_ROWS:,} rows to train on and {_TEST_ROWS} to test: "
        f"{len(order) / seconds:,.0f} rows/s"
    )
    return ids[0], ids[1]


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(512, 10),
    )


def _train(model: nn.Module, loader: Any) -> tuple[int, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows, began = 0, time.monotonic()
    for epoch in range(_EPOCHS):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["image"].float() / 16), batch["label"])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            rows += len(batch)
        if epoch % 8 == 0:
            click.echo(f"  epoch {epoch}: loss {loss.item():.3f}")
    return rows, time.monotonic() - began
