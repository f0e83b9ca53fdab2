"""Settings: every fault is named by its variable, no value is ever repeated, and the reference is in step."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.errors import ConfigError
from app.settings import (
    ApiSettings,
    ClaimMode,
    Detached,
    ExecutorSettings,
    LogFormat,
    PlannerSettings,
    Role,
    Settings,
    describe,
    in_force,
    load_settings,
)
from app.settings.reference import entries
from app.settings.values import duration_text, parse_duration

URL = "postgresql://carillon:s3cret-in-url@db.internal:5432/carillon"
KEY = "an-admin-key-of-some-length"
CANARY = "CANARY-7f3a"


def load(**given: str) -> Settings:
    return load_settings(
        {"SCHEDULER_DATABASE_URL": URL, **{f"SCHEDULER_{name}": text for name, text in given.items()}}
    )


def faults(**given: str) -> list[str]:
    """The lines of the error, without its head."""
    with pytest.raises(ConfigError) as caught:
        load(**given)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def told_of(environ: dict[str, str]) -> str:
    """The error's text, or nothing when there is no error."""
    try:
        load_settings(environ)
    except ConfigError as error:
        return str(error)
    return ""


def fault(**given: str) -> str:
    [line] = faults(**given)
    return line


def test_the_database_is_all_that_must_be_said() -> None:
    settings = load()
    assert settings.database.dsn == URL
    assert settings.roles == frozenset(Role)
    assert settings.claim.mode is ClaimMode.POSTGRES
    assert settings.planner.lookahead == timedelta(seconds=5)
    assert settings.executor.slots == 400
    assert settings.retention.detached is Detached.KEEP
    assert settings.api.key is None
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,63}", settings.replica)


def test_without_the_database_the_error_names_its_variable() -> None:
    with pytest.raises(ConfigError, match="SCHEDULER_DATABASE_URL: is required"):
        load_settings({})
    with pytest.raises(ConfigError, match="SCHEDULER_DATABASE_URL: is required"):
        load_settings({"SCHEDULER_DATABASE_POOL_SIZE": "5"})


def test_values_of_every_kind_are_read() -> None:
    settings = load(
        ROLES="api, planner",
        REPLICA="pod-7",
        EXECUTOR_SLOTS="12",
        EXECUTOR_TENANT_SHARE="0.25",
        EXECUTOR_ALLOW_LOOPBACK_TARGETS="true",
        PLANNER_TICK="500ms",
        RETENTION_DETACHED="drop",
        LOG_FORMAT="text",
        API_PORT="0",
    )
    assert settings.roles == {Role.API, Role.PLANNER}
    assert settings.replica == "pod-7"
    assert settings.executor.slots == 12
    assert settings.executor.tenant_share == 0.25
    assert settings.executor.allow_loopback_targets
    assert settings.planner.tick == timedelta(milliseconds=500)
    assert settings.retention.detached is Detached.DROP
    assert settings.log.format is LogFormat.TEXT
    assert settings.api.port == 0


def test_the_environment_of_the_process_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDULER_DATABASE_URL", URL)
    monkeypatch.setenv("SCHEDULER_EXECUTOR_SLOTS", "7")
    assert load_settings().executor.slots == 7
    assert load_settings(overrides={"SCHEDULER_EXECUTOR_SLOTS": "8"}).executor.slots == 8


def test_the_environment_has_no_second_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDULER_EXECUTOR_SLOTS", "7")
    assert load().executor.slots == 400
    with pytest.raises(ValidationError):
        Settings()  # type: ignore[call-arg]


def test_white_space_around_a_value_is_ignored() -> None:
    settings = load_settings({"SCHEDULER_DATABASE_URL": f"{URL}\n", "SCHEDULER_EXECUTOR_SLOTS": " 9 "})
    assert settings.database.dsn == URL
    assert settings.executor.slots == 9


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SCHEDULER_EXECUTOR_SLOT", "SCHEDULER_EXECUTOR_SLOTS"),
        ("SCHEDULER_EXECUTR_SLOTS", "SCHEDULER_EXECUTOR_SLOTS"),
        ("SCHEDULER_EXECUTOR__SLOTS", "SCHEDULER_EXECUTOR_SLOTS"),
        ("SCHEDULER_SLOTS_EXECUTOR", None),
        ("SCHEDULER_DATABASEURL", "SCHEDULER_DATABASE_URL"),
        ("SCHEDULER_ROLE", "SCHEDULER_ROLES"),
        ("scheduler_log_level", "SCHEDULER_LOG_LEVEL"),
        ("Scheduler_Log_Level", "SCHEDULER_LOG_LEVEL"),
        ("SCHEDULER_KAFKA_ACKS", None),
        ("SCHEDULER_", None),
        ("SCHEDULER_EXECUTOR_LEASE_TTL", None),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(name: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"SCHEDULER_DATABASE_URL": URL, name: "1"})
    assert f"{name}: there is no such setting" in str(caught.value)
    if meant:
        assert f"did you mean {meant}?" in str(caught.value)


def test_a_whole_group_cannot_be_set_at_once() -> None:
    assert "there is no such setting" in fault(EXECUTOR='{"slots": 5}')


def test_an_unprintable_name_is_shown_harmlessly() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"SCHEDULER_DATABASE_URL": URL, "SCHEDULER_\x1b[2J\udcff": "1"})
    assert str(caught.value).replace("\n", "").isascii()
    assert "\x1b" not in str(caught.value)


def test_variables_of_others_are_none_of_our_business() -> None:
    settings = load_settings(
        {"SCHEDULER_DATABASE_URL": URL, "PATH": "/bin", "SCHEDULERX_SLOTS": "1", "EXECUTOR_SLOTS": "1"}
    )
    assert settings.executor.slots == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SCHEDULER_SERVICE_HOST", "10.0.0.7"),
        ("SCHEDULER_SERVICE_PORT", "8080"),
        ("SCHEDULER_SERVICE_PORT_HTTP", "8080"),
        ("SCHEDULER_PORT", "tcp://10.0.0.7:8080"),
        ("SCHEDULER_PORT_8080_TCP", "tcp://10.0.0.7:8080"),
        ("SCHEDULER_PORT_8080_TCP_ADDR", "10.0.0.7"),
        ("SCHEDULER_METRICS_SERVICE_HOST", "10.0.0.7"),
        ("SCHEDULER_METRICS_PORT", "tcp://10.0.0.7:9090"),
    ],
)
def test_what_kubernetes_adds_beside_a_service_called_scheduler_is_passed_over(name: str, value: str) -> None:
    assert load_settings({"SCHEDULER_DATABASE_URL": URL, name: value}).api.port == 8080


def test_a_service_whose_address_takes_the_name_of_a_setting_is_explained() -> None:
    assert "enableServiceLinks: false" in fault(API_PORT="tcp://10.0.0.7:8080")


def test_a_port_that_is_only_misnamed_is_not_taken_for_a_service() -> None:
    assert "there is no such setting" in fault(PORT="8080")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("EXECUTOR_SLOTS", "many", "is not a whole number. Allowed: a whole number from 1 to 10000"),
        ("EXECUTOR_SLOTS", "1.5", "is not a whole number"),
        ("EXECUTOR_SLOTS", "１２", "is not a whole number"),
        ("EXECUTOR_SLOTS", "0", "is too small"),
        ("EXECUTOR_SLOTS", "-3", "is too small"),
        ("EXECUTOR_SLOTS", "10001", "is too large"),
        ("EXECUTOR_SLOTS", "9" * 400, "is too large"),
        ("EXECUTOR_SLOTS", "9" * 5000, "is not a whole number of a sane size"),
        ("EXECUTOR_TENANT_SHARE", "half", "is not a number. Allowed: a number from 0.01 to 1.0"),
        ("EXECUTOR_TENANT_SHARE", "nan", "is not a finite number"),
        ("EXECUTOR_TENANT_SHARE", "inf", "is not a finite number"),
        ("EXECUTOR_TENANT_SHARE", "0", "is too small"),
        ("EXECUTOR_TENANT_SHARE", "1.01", "is too large"),
        ("EXECUTOR_ALLOW_LOOPBACK_TARGETS", "maybe", "is neither true nor false. Allowed: true or false"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "soon", "is not a duration. Allowed: a duration from 100ms to 10m"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "-5s", "is not a duration"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "1e3", "is not a duration"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "PT5S", "is not a duration"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "٥s", "is not a duration"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "9999999999d", "is not a duration"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "999999999d", "is too large"),
        ("EXECUTOR_DELIVERY_TIMEOUT", "99ms", "is too small"),
        ("CLAIM_MODE", "redis", "is not one of the known words. Allowed: postgres"),
        ("CLAIM_MODE", "Postgres", "is not one of the known words. Allowed: postgres"),
        ("LOG_LEVEL", "loud", "Allowed: debug, info, warning or error"),
        ("ROLES", "api,worker", "Allowed: a comma-separated list of api, planner, executor, maintenance"),
        ("ROLES", "api,,planner", "word 2 of it is not one of the known words"),
        ("ROLES", ",", "is not one of the known words"),
        ("ROLES", '["api"]', "is not one of the known words"),
        ("REPLICA", "pod 7", "Allowed: 1 to 63 letters, digits, dots, dashes and underscores"),
        ("REPLICA", "x" * 64, "Allowed: 1 to 63"),
        ("API_PORT", "65536", "is too large"),
        ("API_HOST", "h" * 256, "is too long. Allowed: 1 to 255 characters"),
        ("EXECUTOR_SLOTS", "", "is empty; unset it or give it a value"),
        ("EXECUTOR_SLOTS", " \t", "is empty"),
        ("API_ADMIN_KEY", "", "is empty"),
        ("LOG_LEVEL", "info\udcff", "is not UTF-8 text"),
        ("LOG_LEVEL", "in\x00fo", "has a NUL character in it"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: str, told: str) -> None:
    line = fault(**{name: value})
    assert line.startswith(f"SCHEDULER_{name}: ")
    assert told in line


def test_every_fault_is_told_at_once() -> None:
    lines = faults(
        EXECUTOR_SLOTS="x",
        PLANNER_TICK="",
        LOG_LEVEL="loud",
        API_PROT="1",
        RETENTION_MONTHS="0",
        ROLES="a,b,api",
    )
    assert [re.split(r"[: ]", line)[0] for line in lines] == [
        "SCHEDULER_API_PROT",
        "SCHEDULER_EXECUTOR_SLOTS",
        "SCHEDULER_LOG_LEVEL",
        "SCHEDULER_PLANNER_TICK",
        "SCHEDULER_RETENTION_MONTHS",
        "SCHEDULER_ROLES",
    ]


def test_one_fault_is_not_called_several() -> None:
    with pytest.raises(ConfigError, match=r"^the configuration has one fault:\n  SCHEDULER_LOG_LEVEL"):
        load(LOG_LEVEL="loud")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost/carillon",
        "postgres://localhost",
        "postgresql://u:p%40ss@[::1]:5432/db?sslmode=require",
        "postgresql://u@one:5432,two:5433/db?target_session_attrs=read-write",
        "postgresql:///carillon?host=/var/run/postgresql",
    ],
)
def test_the_usual_forms_of_a_database_url_are_accepted(url: str) -> None:
    assert load_settings({"SCHEDULER_DATABASE_URL": url}).database.dsn == url


@pytest.mark.parametrize(
    "url",
    [
        "localhost:5432/carillon",
        "mysql://u:CANARY-7f3a@h/db",
        "postgresql://u:CANARY-7f3a@h:port/db",
        "postgresql://u:CANARY-7f3a@h:70000/db",
        "postgresql://u:CANARY-7f3a/x@h/db",
        "postgresql://u:12?CANARY-7f3a@h/db",
        "postgresql://u:12#CANARY-7f3a@h/db",
        "postgresql://u:CANARY-7f3a pass@h/db",
        "postgresql://u:CANARY-7f3a@[::1/db",
    ],
)
def test_a_database_url_that_cannot_be_meant_is_refused_without_repeating_it(url: str) -> None:
    line = fault(DATABASE_URL=url)
    assert line.startswith("SCHEDULER_DATABASE_URL: ")
    assert CANARY not in line
    assert "postgresql://user:password@host:port/database" in line


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "db.internal:5432/carillon"),
        ("postgresql://u:a%40b@[::1]:5/db?password=hidden", "[::1]:5/db"),
        ("postgresql:///db?host=/run/pg", "(local socket)/db"),
    ],
)
def test_a_person_sees_where_the_database_is_and_nothing_more(url: str, shown: str) -> None:
    assert load_settings({"SCHEDULER_DATABASE_URL": url}).database.shown == shown


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.variable)
def test_no_value_of_any_setting_is_repeated_in_an_error(entry: object) -> None:
    name = getattr(entry, "variable", "")
    for value in (
        f"{CANARY} x",
        f"postgres://{CANARY}@@",
        CANARY + "\x00",
        CANARY + "\udcff",
        f"{CANARY}é",
        CANARY,
    ):
        text = told_of({"SCHEDULER_DATABASE_URL": URL, name: value})
        assert CANARY not in text
        assert "s3cret" not in text


def test_secrets_are_in_no_representation() -> None:
    settings = load(API_ADMIN_KEY=KEY)
    texts = [
        repr(settings),
        str(settings),
        repr(settings.api),
        repr(settings.database),
        repr(in_force(settings)),
    ]
    texts.append(settings.model_dump_json())
    assert not [text for text in texts if KEY in text or "s3cret" in text]


def test_what_is_in_force_can_be_set_again() -> None:
    settings = load(
        EXECUTOR_SETTLE_WAIT="0.0015",
        EXECUTOR_TENANT_SHARE="0.3",
        PLANNER_LOOKAHEAD="150s",
        PLANNER_MISFIRE_GRACE="1h",
        ROLES="planner,api",
    )
    again = load_settings(
        {"SCHEDULER_DATABASE_URL": URL}
        | {name: value for name, value in in_force(settings) if not value.startswith("(")}
    )
    assert again == settings


def test_related_values_are_checked_together_and_both_are_named() -> None:
    lines = faults(
        EXECUTOR_DELIVERY_TIMEOUT="30s",
        PLANNER_TICK="10s",
        PLANNER_LOOKAHEAD="9s",
        PLANNER_BATCH="100",
        PLANNER_ROWS_PER_BATCH="99",
    )
    assert [line.split(":")[0] for line in lines] == [
        "SCHEDULER_EXECUTOR_DRAIN_GRACE (25s) must be at least SCHEDULER_EXECUTOR_DELIVERY_TIMEOUT + 5s (35s)",
        "SCHEDULER_PLANNER_LOOKAHEAD (9s) must be at least SCHEDULER_PLANNER_TICK (10s)",
        "SCHEDULER_PLANNER_ROWS_PER_BATCH (99) must be at least SCHEDULER_PLANNER_BATCH (100)",
    ]


def test_related_values_at_their_edge_are_accepted() -> None:
    settings = load(EXECUTOR_DELIVERY_TIMEOUT="30s", EXECUTOR_DRAIN_GRACE="35s", PLANNER_TICK="5s")
    assert settings.executor.drain_grace == timedelta(seconds=35)


def test_the_lease_follows_from_the_delivery_timeout() -> None:
    executor = ExecutorSettings(delivery_timeout=timedelta(seconds=12))
    assert executor.lease_ttl == timedelta(seconds=24)
    assert executor.keeper_interval == timedelta(seconds=8)


@pytest.mark.parametrize(
    ("slots", "share", "cap"), [(200, 0.5, 100), (3, 0.5, 1), (1, 0.5, 1), (1, 0.01, 1), (7, 1, 7)]
)
def test_one_tenant_gets_its_share_of_the_slots_and_one_at_least(slots: int, share: float, cap: int) -> None:
    assert ExecutorSettings(slots=slots, tenant_share=share).slots_per_tenant == cap


def test_groups_made_in_code_obey_the_same_rules() -> None:
    with pytest.raises(ValidationError):
        PlannerSettings(lookahead=timedelta(milliseconds=500))
    with pytest.raises(ValidationError):
        ExecutorSettings(slot=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        PlannerSettings().batch = 3


def test_the_admin_key_comes_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    for settings in (load(API_ADMIN_KEY=KEY), load(API_ADMIN_KEY_FILE=str(file))):
        assert settings.api.key is not None
        assert settings.api.key.get_secret_value() == KEY


def test_two_admin_keys_are_one_too_many(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    line = fault(API_ADMIN_KEY=KEY, API_ADMIN_KEY_FILE=str(file))
    assert line == "SCHEDULER_API_ADMIN_KEY and SCHEDULER_API_ADMIN_KEY_FILE: set only one"


@pytest.mark.parametrize(
    "key", ["short", "k" * 15, "k" * 513, "sixteen letters and spaces", "schlüssel-schlüssel"]
)
def test_a_weak_or_unusable_admin_key_is_refused_wherever_it_is(key: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(key)
    for name, value in (("API_ADMIN_KEY", key), ("API_ADMIN_KEY_FILE", str(file))):
        line = fault(**{name: value})
        assert line.startswith(f"SCHEDULER_{name}: ")
        assert "16 to 512 printable ASCII characters" in line
        assert key not in line


def test_an_admin_key_file_that_cannot_be_read_is_told_without_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" * 20)
    for path, told in (
        (tmp_path / CANARY, "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "not UTF-8 text"),
        (Path("x" * 5000), "File name too long"),
    ):
        line = fault(API_ADMIN_KEY_FILE=str(path))
        assert told in line
        assert str(tmp_path) not in line


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("5s", 5),
        ("5 s", 5),
        ("2m", 120),
        ("1h", 3600),
        ("30d", 2_592_000),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@given(st.timedeltas(timedelta(), timedelta(days=10_000)))
def test_a_duration_as_shown_reads_back_as_itself(value: timedelta) -> None:
    assert parse_duration(duration_text(value)) == value


@given(st.text(max_size=40))
def test_any_text_is_a_duration_or_a_clear_refusal(text: str) -> None:
    try:
        value = parse_duration(text)
    except ValueError as error:
        value = str(error)
    assert value == "is not a duration" or (isinstance(value, timedelta) and value >= timedelta())


def test_the_reference_page_is_in_step_with_the_settings() -> None:
    page = Path(__file__).parents[1] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == describe(), (
        "run: carillon check-config --reference > docs/configuration.md"
    )


def test_every_setting_says_what_it_is_for() -> None:
    for entry in entries():
        assert entry.meaning.endswith("."), entry.variable
        assert entry.allowed, entry.variable
        assert f"`{entry.variable}`" in describe()


def test_an_api_of_one_key_needs_nothing_else() -> None:
    assert ApiSettings().key is None
