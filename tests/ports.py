"""Ports for tests that need the same one twice."""

from __future__ import annotations

import random
import socket

QUIET = range(20_000, 30_000)
"""Below the range from which the system picks ports by itself (32768 and up), so nobody gets one of these by chance."""


def quiet_port() -> int:
    """A loopback port that is free now and that no program is given unless it asks for it by number."""
    while True:
        port = random.choice(QUIET)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
