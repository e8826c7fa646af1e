"""``tdio demo``: the main job, end to end, on real data."""

from __future__ import annotations

import time

import click
import torch

from tdio.cli import _cartpole, _digits
from tdio.server import embedded_server

#: Below these the demo has failed: something it was fed was wrong.
MIN_ACCURACY = 0.97
MIN_RETURN = 300.0


def run(workers: int) -> None:
    """Run both halves of the demo against an embedded server of its own.

    Args:
        workers: worker processes of each ``DataLoader``.

    Raises:
        click.ClickException: the classifier or the policy learned too little.
        EmbeddedServerError: the server could not be started.
    """
    began = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    click.echo("Starting an embedded server (Valkey, unix socket and loopback only)")
    with embedded_server() as server:
        click.echo("\nDigits: a store of 1,797 images")
        accuracy = _digits.run(server.connection_kwargs, workers)
        click.echo(f"  test accuracy: {accuracy:.1%}")
        click.echo("\nCartPole: a ragged store of whole episodes")
        mean = _cartpole.run(server.connection_kwargs, workers)
        click.echo(f"  mean return of the cloned policy over 10 episodes: {mean:.0f} of 500")
    click.echo(f"\nDone in {time.monotonic() - began:.0f} s; the server is gone with its data")
    if accuracy < MIN_ACCURACY or mean < MIN_RETURN:
        raise click.ClickException(
            f"expected an accuracy of {MIN_ACCURACY:.0%} and a return of {MIN_RETURN:.0f}"
        )
