"""Ports for children that will listen on them later."""

from __future__ import annotations

import contextlib
import errno
import socket

from app.errors import ConfigError

HOST = "127.0.0.1"


def reserve_port(wanted: int, held: contextlib.ExitStack) -> int | None:
    """The port (a free one for 0), or None when it is taken.

    Replicas listen only seconds after their ports were chosen, and until then another `carillon dev` would find them
    free too. So a choice is announced in the kernel's abstract namespace (unix(7)): no file stands for such a name, and
    it goes when we go, however we end.
    """
    with contextlib.ExitStack() as trying:
        try:
            probe = trying.enter_context(socket.create_server((HOST, wanted)))
            port: int = probe.getsockname()[1]
            name = trying.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0carillon dev {port}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise ConfigError(
                f"--port: cannot listen on {wanted} ({error.strerror}); choose another"
            ) from None
        probe.close()
        held.enter_context(trying.pop_all())
    return port
