"""deploy/compose.yaml and deploy/prometheus.yml: do their parts fit each other, and Carillon?"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.main import LEAVE_WITHIN, SETTLE_WITHIN
from app.settings import Settings, load_settings
from app.settings.values import parse_duration
from tests.deploy.repository import DEPLOY, read_yaml
from tests.deploy.test_image import image_environment

COMPOSE: dict[str, Any] = read_yaml(DEPLOY / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("carillon", "migrate")
CONNECTIONS_OF_POSTGRES = 100
"""The image's max_connections, PostgreSQL's own default."""
SECRET = "0123456789abcdef0123456789abcdef"


def seconds(text: str) -> timedelta:
    found = parse_duration(text)
    assert isinstance(found, timedelta)
    return found


def filled_in(text: str, given: dict[str, str]) -> str:
    """As the engine does: ${NAME:-default} and $$."""
    text = re.sub(r"(?<!\$)\$\{(\w+):-([^}]*)\}", lambda found: given.get(found[1]) or found[2], str(text))
    assert not re.search(r"(?<!\$)\$(?!\$)", text), text
    return text.replace("$$", "$")


def environment_of(service: str, secrets: Path, given: dict[str, str]) -> dict[str, str]:
    """What the process in the container sees; secrets are in a folder of the test's."""
    listed = {name: filled_in(value, given) for name, value in SERVICES[service]["environment"].items()}
    listed = {name: value.replace("/run/secrets", str(secrets)) for name, value in listed.items()}
    return {**image_environment(), **listed}


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The files of secrets, as the head of the file has them made."""
    for name in COMPOSE["secrets"]:
        (tmp_path / name).write_text(SECRET + "\n")
    return tmp_path


def start(service: str, secrets: Path, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the service's own entrypoint, with `check-config` in place of its command."""
    entrypoint = [
        filled_in(part, given).replace("/run/secrets", str(secrets))
        for part in SERVICES[service]["entrypoint"]
    ]
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, *entrypoint[1:], "check-config"],
        env={
            **environment_of(service, secrets, given),
            "PATH": f"{Path(sys.executable).parent}:{Path(shell).parent}:/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("service", OURS)
@pytest.mark.parametrize(("profiles", "mode"), [("", "postgres"), ("kafka", "kafka")])
def test_our_services_start_with_a_configuration_that_is_right_in_both_modes(
    secrets: Path, service: str, profiles: str, mode: str
) -> None:
    done = start(service, secrets, {"COMPOSE_PROFILES": profiles})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"SCHEDULER_CLAIM_MODE={mode}\n" in done.stdout
    assert "SCHEDULER_API_HOST=0.0.0.0\n" in done.stdout
    assert SECRET not in done.stdout


def test_a_missing_password_stops_the_start(secrets: Path) -> None:
    (secrets / "postgres_password").unlink()
    done = start("carillon", secrets, {})
    assert done.returncode != 0
    assert "SCHEDULER" not in done.stdout


def test_the_database_is_the_one_that_is_made() -> None:
    [url] = re.findall(r'"(postgresql://[^"]+)"', SERVICES["carillon"]["entrypoint"][2])
    made = SERVICES["postgres"]["environment"]
    assert url == f"postgresql://{made['POSTGRES_USER']}:$$password@postgres:5432/{made['POSTGRES_DB']}"


def settings(secrets: Path) -> Settings:
    """Those of a replica in `kafka` mode."""
    environment = environment_of("carillon", secrets, {"COMPOSE_PROFILES": "kafka"})
    return load_settings({**environment, "SCHEDULER_DATABASE_URL": "postgresql://carillon@postgres/carillon"})


def test_a_replica_is_given_the_time_that_its_drain_takes(secrets: Path) -> None:
    drain = settings(secrets).executor.drain_grace + 2 * LEAVE_WITHIN + 2 * SETTLE_WITHIN
    assert seconds(SERVICES["carillon"]["stop_grace_period"]) >= drain
    guide = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert f"({drain.seconds} s with the\ndefaults" in guide


def test_the_database_has_connections_for_two_generations_of_replicas(secrets: Path) -> None:
    database = settings(secrets).database
    each = database.pool_size + database.claim_pool_size + 1
    assert 2 * SERVICES["carillon"]["deploy"]["replicas"] * each < CONNECTIONS_OF_POSTGRES


def test_the_broker_is_where_the_replicas_look_for_it(secrets: Path) -> None:
    kafka = SERVICES["kafka"]["environment"]
    assert f"PLAINTEXT://{settings(secrets).kafka.bootstrap}" == kafka["KAFKA_ADVERTISED_LISTENERS"]
    assert SERVICES["kafka"]["profiles"] == ["kafka"]


def test_replicas_start_after_the_schema_and_nothing_waits_for_the_broker() -> None:
    assert SERVICES["carillon"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert SERVICES["migrate"]["command"] == ["migrate"]
    assert SERVICES["migrate"]["restart"] == "no"


def test_one_service_builds_the_image_and_the_others_never_ask_a_registry_for_it() -> None:
    assert [name for name, service in SERVICES.items() if "build" in service] == ["migrate"]
    assert SERVICES["carillon"]["image"] == SERVICES["migrate"]["image"]
    assert SERVICES["carillon"]["pull_policy"] == "never"
    build = SERVICES["migrate"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_locked_in(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "pid", "network_mode"}
    if name != "kafka":
        assert service["read_only"] is True
        assert "/tmp" in service["tmpfs"]
    if name not in OURS:
        assert re.search(r":v?\d+(\.\d+)*$", service["image"]), (
            "an image without a version is another one tomorrow"
        )


def test_only_this_machine_reaches_what_is_published() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"carillon", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert COMPOSE["networks"]["inner"]["internal"] is True
    inside = [name for name, service in SERVICES.items() if service["networks"] == ["inner"]]
    assert set(inside) == {"migrate", "postgres", "kafka"}


def test_every_replica_gets_a_port_of_its_own(secrets: Path) -> None:
    [mapping] = SERVICES["carillon"]["ports"]
    first, last, port = map(int, re.findall(r"\d+", mapping)[-3:])
    assert last - first + 1 >= SERVICES["carillon"]["deploy"]["replicas"]
    assert port == settings(secrets).api.port


def test_what_is_named_is_there() -> None:
    for service in SERVICES.values():
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), mount


def test_prometheus_reads_our_rules_and_every_replica(secrets: Path) -> None:
    config = read_yaml(DEPLOY / "prometheus.yml")
    mounted = [mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]]
    assert "/etc/prometheus/prometheus.yml" in mounted
    assert [f"/etc/prometheus/{name}" for name in config["rule_files"]] == ["/etc/prometheus/alerts.yaml"]
    assert "/etc/prometheus/alerts.yaml" in mounted
    [job] = config["scrape_configs"]
    [found] = job["dns_sd_configs"]
    assert found["names"] == ["carillon"]
    assert set(found["names"]) <= set(SERVICES)
    assert found["port"] == settings(secrets).api.port
    assert set(SERVICES["prometheus"]["networks"]) & set(SERVICES["carillon"]["networks"])


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False)])
async def test_a_replica_is_healthy_when_it_is_ready(
    receiver: Receiver, status: int, is_healthy: bool
) -> None:
    receiver.answer("/readyz", Reply(status=status))
    kind, program, *arguments = SERVICES["carillon"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    asked = [argument.replace("http://127.0.0.1:8080", receiver.url) for argument in arguments]
    assert asked != arguments
    check = await asyncio.create_subprocess_exec(sys.executable, *asked, stderr=asyncio.subprocess.DEVNULL)
    assert (await check.wait() == 0) is is_healthy
    assert [one.path for one in receiver.received] == ["/readyz"]
