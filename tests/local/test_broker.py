"""The embedded broker: it starts with one call, can be away for a while, and never outlives who started it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from app.errors import CarillonError, ConfigError
from app.local import broker as under_test
from app.local.broker import LOWEST_PORT, EmbeddedBroker, find_program, quiet_port
from app.local.broker_probe import serves_groups
from app.local.workspace import close_workspace, open_workspace
from tests.eventually import eventually
from tests.local.launching import finish, is_running, kill, python, read_line

START_AND_WAIT = """
import sys
from app.local.broker import EmbeddedBroker
broker = EmbeddedBroker.start()
print(broker.pid, broker.port, broker.log_path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own for everything that makes one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_gone_after_a_start(workspace: Path) -> bool:
    """Whether opening another workspace removes this one. Not while a thread of the broker is still ending."""
    close_workspace(open_workspace())
    return not workspace.exists()


def pid_of(broker: EmbeddedBroker) -> int:
    assert broker.pid is not None
    return broker.pid


def test_a_broker_that_was_started_serves_groups_and_nothing_of_it_stays(own_place: Path) -> None:
    with EmbeddedBroker.start() as broker:
        assert broker.bootstrap == f"127.0.0.1:{broker.port}"
        assert serves_groups("127.0.0.1", broker.port, cluster=broker.cluster)
        assert "tansu" in broker.log_path.read_text()
        pid = pid_of(broker)
    assert not is_running(pid)
    assert not answers(broker.port)
    assert list(own_place.iterdir()) == []
    broker.stop()


def test_its_files_are_where_they_are_wanted(tmp_path: Path) -> None:
    with EmbeddedBroker.start(temporary_in=tmp_path) as broker:
        assert broker.log_path.is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_brokers_run_at_once_and_know_each_other_apart() -> None:
    with EmbeddedBroker.start() as one, EmbeddedBroker.start() as other:
        assert one.port != other.port
        assert not serves_groups("127.0.0.1", one.port, cluster=other.cluster)


def test_a_halted_broker_is_away_until_it_is_resumed_on_the_same_port() -> None:
    with EmbeddedBroker.start() as broker:
        before = pid_of(broker)
        broker.halt()
        broker.halt()
        assert not is_running(before)
        assert not answers(broker.port)
        with pytest.raises(CarillonError, match="halted"):
            broker.wait_ready()
        broker.resume()
        broker.resume()
        assert pid_of(broker) != before
        assert serves_groups("127.0.0.1", broker.port, cluster=broker.cluster)


def test_a_broker_that_does_not_stop_by_itself_is_ended() -> None:
    with EmbeddedBroker.start() as broker:
        before = pid_of(broker)
        os.kill(before, signal.SIGSTOP)
        broker.halt(within=timedelta(0))
        assert not is_running(before)
        broker.resume()
        assert is_running(pid_of(broker))


def test_a_broker_stopped_for_good_is_not_resumed() -> None:
    broker = EmbeddedBroker.start()
    broker.stop()
    with pytest.raises(CarillonError, match="stopped for good"):
        broker.resume()


def test_settings_of_strangers_do_not_reach_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("AUTHENTICATION=true\nSILENT=true\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTHENTICATION", "true")
    with EmbeddedBroker.start(temporary_in=tmp_path) as broker:
        process = Path("/proc") / str(pid_of(broker))
        environment = (process / "environ").read_bytes()
        assert b"AUTHENTICATION" not in environment
        assert (process / "cwd").readlink() == broker.log_path.parent
        assert "listening on" in broker.log_path.read_text()


def test_a_taken_port_is_refused_by_its_number_and_nothing_is_left(own_place: Path, taken: int) -> None:
    with pytest.raises(ConfigError, match=f"at its start on port {taken}(?s:.*)AddrInUse"):
        EmbeddedBroker.start(port=taken)
    assert list(own_place.iterdir()) == []


def test_another_port_is_tried_when_the_free_one_is_taken_meanwhile(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    free = quiet_port()
    offered = iter([taken, free])
    monkeypatch.setattr(under_test, "quiet_port", lambda: next(offered))
    with EmbeddedBroker.start() as broker:
        assert broker.port == free


def test_a_broker_that_is_not_ready_in_time_is_ended_and_nothing_is_left(own_place: Path) -> None:
    with pytest.raises(CarillonError, match="was not ready after 0 s"):
        EmbeddedBroker.start(within=timedelta(0))
    assert list(own_place.iterdir()) == []


def test_another_broker_on_its_port_is_not_taken_for_it(own_place: Path) -> None:
    with (
        EmbeddedBroker.start() as other,
        pytest.raises(ConfigError, match=f"at its start on port {other.port}"),
    ):
        EmbeddedBroker.start(port=other.port)
    assert list(own_place.iterdir()) == []


def test_a_worker_thread_may_not_start_a_broker(own_place: Path) -> None:
    refused: list[RuntimeError] = []

    def start() -> None:
        try:
            EmbeddedBroker.start()
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(refused[0])
    assert list(own_place.iterdir()) == []


def test_no_program_says_what_to_install(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install the extra `carillon\[embedded\]`"):
        EmbeddedBroker.start()
    assert list(own_place.iterdir()) == []


def test_a_program_that_cannot_be_run_is_named(
    own_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "find_program", lambda: tmp_path / "missing" / "tansu")
    with pytest.raises(ConfigError, match=r"missing/tansu cannot be started: No such file"):
        EmbeddedBroker.start()
    assert list(own_place.iterdir()) == []


def test_the_program_is_run_where_it_lies() -> None:
    with EmbeddedBroker.start() as broker:
        running = (Path("/proc") / str(pid_of(broker)) / "exe").readlink()
        assert running == find_program().resolve()


def test_ports_are_not_of_those_the_kernel_gives_away() -> None:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {quiet_port() for _ in range(50)}
    assert len(ports) > 25
    assert all(LOWEST_PORT <= port < lowest_outgoing for port in ports)


def test_a_port_is_found_where_the_kernel_gives_all_of_them_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(under_test, "OUTGOING_PORTS", tmp_path / "range")
    assert LOWEST_PORT <= quiet_port() <= 60_000


async def test_a_killed_parent_leaves_no_broker_and_the_next_start_removes_its_folder() -> None:
    with python(START_AND_WAIT) as parent:
        pid, port, log = read_line(parent).split(" ", 2)
        assert answers(int(port))
        kill(parent)
    await eventually(lambda: not is_running(int(pid)))
    await eventually(
        lambda: not answers(int(port))
    )  # the kernel closes the port a moment after the process is gone
    await eventually(lambda: is_gone_after_a_start(Path(log).parent))


def test_a_parent_that_just_ends_leaves_neither_broker_nor_folder() -> None:
    with python(START_AND_WAIT) as parent:
        pid, _port, log = read_line(parent).split(" ", 2)
        assert finish(parent) == 0
    assert not is_running(int(pid))
    assert not Path(log).parent.exists()


def test_a_terminals_interrupt_does_not_reach_the_broker() -> None:
    with EmbeddedBroker.start() as broker:
        assert os.getsid(pid_of(broker)) == broker.pid != os.getsid(0)
