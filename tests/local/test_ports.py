"""Reserving ports for children that listen on them later."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from app.local.ports import HOST, reserve_port
from tests.ports import quiet_port


def test_a_reserved_port_is_taken_for_others_until_it_is_let_go_though_nobody_listens_yet() -> None:
    port = quiet_port()
    with ExitStack() as held:
        assert reserve_port(port, held) == port
        with ExitStack() as other:
            assert reserve_port(port, other) is None
        with socket.create_server((HOST, port)):
            pass  # whoever it is reserved for can listen
    with ExitStack() as held:
        assert reserve_port(port, held) == port


def test_a_port_that_somebody_listens_on_is_taken() -> None:
    with socket.create_server((HOST, 0)) as listening, ExitStack() as held:
        assert reserve_port(listening.getsockname()[1], held) is None


def test_zero_takes_a_free_port_each_time_another_one() -> None:
    with ExitStack() as held:
        ports = [reserve_port(0, held) for _ in range(20)]
        assert None not in ports
        assert len(set(ports)) == len(ports)
