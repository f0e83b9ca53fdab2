"""`carillon dev`: one command from nothing to a delivery in the history, and one signal back to nothing."""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.local.answers import Hang, Reply
from app.local.receiver import Receiver
from app.store.migrations import require_current
from app.store.pool import close, connect
from tests.eventually import eventually
from tests.ports import quiet_port
from tests.servers import memory
from tests.system.devs import SAMPLES, Dev, delivered_samples, left_in, run_now
from tests.system.replicas import probe

Launch = Callable[..., Dev]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary folder of the commands under test; any user may enter it, as PostgreSQL's account must."""
    folder = Path(tempfile.mkdtemp(prefix="carillon-tests-", dir=memory()))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a killed one's server may just be ending in it


@pytest.fixture
def launch(temporary: Path, tmp_path: Path) -> Iterator[Launch]:
    """Starts `carillon dev` with arguments; whatever still runs at the test's end is killed."""
    started: list[Dev] = []

    def start(*arguments: str) -> Dev:
        dev = Dev(*arguments, temporary=temporary, log_path=tmp_path / f"dev-{len(started)}.log")
        started.append(dev)
        return dev

    yield start
    for dev in started:
        dev.kill()


async def test_dev_delivers_both_samples_from_a_taken_port_and_sigint_leaves_nothing(
    launch: Launch, temporary: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        dev = launch("--port", str(port), "--replicas", "2")
        await dev.ready()
        assert f"port {port} is taken" in dev.output
        urls = dev.replica_urls()
        assert len(set(urls)) == 2
        assert f"http://127.0.0.1:{port}" not in urls
        async with probe() as prober:
            for url in urls:
                assert (await prober.get(f"{url}/readyz")).status_code == 200
        async with dev.client() as client:
            runs = await delivered_samples(client)
        for name in SAMPLES:
            assert [attempt["outcome"] for attempt in runs[name]["attempts"]] == ["delivered"]
            assert runs[name]["attempts"][0]["request"]["url"].startswith(dev.exported("ECHO"))
            assert runs[name]["attempts"][0]["worker"] in {"dev-1", "dev-2"}
        assert "replica.ready" in dev.told_log()
        conn = await connect(dev.told("database"), application_name="carillon tests")
        try:
            await require_current(conn)
        finally:
            await close(conn)
        assert len(dev.family()) >= 5, "itself, PostgreSQL, the receiver and two replicas"
        assert await dev.ended_by(signal.SIGINT) == 0
    assert left_in(temporary) == []
    assert "Traceback" not in dev.output


async def test_a_kept_data_folder_keeps_tenant_key_and_history_over_two_starts(
    launch: Launch, temporary: Path, open_folder: Path, receiver: Receiver
) -> None:
    receiver.answer("/", Hang(), Reply())
    data = open_folder / "data"
    first = launch("--port", "0", "--data-dir", str(data))
    await first.ready()
    async with first.client() as client:
        before = await delivered_samples(client)
        hanging = await run_now(client, f"{receiver.url}/hang")
    await receiver.wait_for(1)
    # The second signal does not wait for the hanging request.
    first.process.send_signal(signal.SIGTERM)
    await eventually(lambda: "drain.begun" in first.log_of("replica-1"))
    assert await first.ended_by(signal.SIGTERM) == 0
    assert left_in(temporary) == []

    second = launch("--port", "0", "--data-dir", str(data))
    await second.ready()
    for name in ("KEY", "ADMIN", "ECHO"):
        assert second.exported(name) == first.exported(name)
    await eventually(lambda: second.output.count("delivered: ") == len(SAMPLES))
    for run in before.values():
        assert run["id"] not in second.output, "what an earlier start delivered proves nothing now"
    async with second.client() as client:
        for run in before.values():
            answer = await client.get(f"/v1/runs/{run['id']}")
            assert answer.json()["attempts"] == run["attempts"]
        cut_off = (await client.get(f"/v1/runs/{hanging}")).json()
        assert cut_off["attempts"][0]["outcome"] == "abandoned"
        listed = (await client.get("/v1/schedules?limit=200")).json()["schedules"]
        for name in SAMPLES:
            assert [schedule["name"] for schedule in listed].count(name) == 1, "used again"
    assert await second.ended_by(signal.SIGTERM) == 0
    assert left_in(temporary) == []
    assert left_in(open_folder) == ["data"]


async def test_two_at_once_get_ports_of_their_own_and_a_killed_one_takes_its_children_along(
    launch: Launch, temporary: Path, open_folder: Path
) -> None:
    port = str(quiet_port())
    data = str(open_folder / "data")
    killed, other = launch("--port", port, "--data-dir", data), launch("--port", port)
    for dev in (killed, other):
        await dev.ready()
    assert killed.exported("CARILLON") != other.exported("CARILLON")
    for dev in (killed, other):
        async with dev.client() as client:
            runs = await delivered_samples(client)
            assert {run["attempts"][0]["request"]["url"].rpartition("/")[0] for run in runs.values()} == {
                dev.exported("ECHO")
            }
    assert await killed.ended_by(signal.SIGKILL) == -signal.SIGKILL
    async with other.client() as client:
        assert (await client.get("/readyz")).status_code == 200, "the other goes on"
    left_by_killed = left_in(temporary)
    assert await other.ended_by(signal.SIGINT) == 0

    # A killed one could not tidy up, so the next start does; and what was to be kept is kept.
    assert left_by_killed
    echo_port = int(killed.exported("ECHO").rpartition(":")[2])
    with socket.create_server(("127.0.0.1", echo_port)):
        after = launch("--port", port, "--data-dir", data)
        await after.ready()
        assert f"port {echo_port}, where the receiver was, is taken" in after.output
        assert after.exported("ECHO") != killed.exported("ECHO")
        assert after.exported("KEY") == killed.exported("KEY")
        assert await after.ended_by(signal.SIGTERM) == 0
    assert left_in(temporary) == []


async def test_a_signal_during_the_start_leaves_nothing(launch: Launch, temporary: Path) -> None:
    async def leaves_nothing(dev: Dev, number: signal.Signals, *, when: Callable[[], bool]) -> None:
        await eventually(when)
        assert await dev.ended_by(number) == 0, dev.output
        assert left_in(temporary) == []
        assert "Traceback" not in dev.output

    number, other = signal.SIGINT, signal.SIGTERM
    for file in ("carillon-local-*", "*/data/postgres.new/*", "*/data/postgres.log", "*/replica-2.log"):
        dev = launch("--port", "0", "--replicas", "2")
        await leaves_nothing(dev, number, when=lambda file=file: any(temporary.glob(file)))  # type: ignore[misc]
        number, other = other, number
    dev = launch("--port", "0")
    await leaves_nothing(dev, number, when=lambda: "is up" in dev.output)
