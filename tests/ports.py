"""Where nobody listens yet."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this machine's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
