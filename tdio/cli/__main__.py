"""``python -m tdio.cli``."""

from tdio.cli import main

main(prog_name="tdio")
