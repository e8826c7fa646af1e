"""Ports for servers of other processes."""

import random
import socket


def free_port():
    """Return a port that nobody has now, nor gets by asking for any: below those of the system."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        return port
