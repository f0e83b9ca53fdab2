"""The settings, group by group: types, defaults, bounds, meanings, and which values belong together.

Each part of Carillon receives its own group and never sees the others. Values that belong together are
derived from each other (lease, keeper) or checked together here, so that a process that has started has a
configuration that makes sense.
"""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from enum import StrEnum
from math import floor
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from app.settings.values import (
    AdminKey,
    Allowed,
    DatabaseUrl,
    Duration,
    KafkaName,
    KafkaServers,
    Password,
    PasswordFile,
    SecretFile,
    duration_text,
)

PREFIX = "SCHEDULER_"

SETTLE_MARGIN = timedelta(seconds=5)
"""What a drain needs beyond the slowest delivery: settling, and closing what is open."""


class Role(StrEnum):
    """What a replica does. By default everyone does everything."""

    API = "api"
    PLANNER = "planner"
    EXECUTOR = "executor"
    MAINTENANCE = "maintenance"


class ClaimMode(StrEnum):
    """How due runs reach the executors."""

    POSTGRES = "postgres"
    KAFKA = "kafka"


class KafkaSecurity(StrEnum):
    """How the broker is spoken to, in Kafka's own words."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


class SaslMechanism(StrEnum):
    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


class Detached(StrEnum):
    """What happens to a month of history that retention has detached."""

    KEEP = "keep"
    DROP = "drop"


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _split_roles(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(",")]


def _check_roles(value: frozenset[Role]) -> frozenset[Role]:
    if not value:
        raise ValueError("names no role")
    return value


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63] or "replica"


Roles = Annotated[
    frozenset[Role],
    NoDecode,
    BeforeValidator(_split_roles),
    AfterValidator(_check_roles),
    Allowed("a comma-separated list of `api`, `planner`, `executor`, `maintenance`"),
]


def _ms(value: float) -> timedelta:
    return timedelta(milliseconds=value)


def _s(value: float) -> timedelta:
    return timedelta(seconds=value)


def variable(*path: str) -> str:
    """The environment variable of a field: variable("executor", "slots") is SCHEDULER_EXECUTOR_SLOTS."""
    return PREFIX + "_".join(path).upper()


def _refuse(*problems: str | None) -> None:
    """Raises ValueError with every problem there is, one a line."""
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError("\n".join(found))


def _not_below(group: str, name: str, value: timedelta, than: str, bound: timedelta) -> str | None:
    if value >= bound:
        return None
    return (
        f"{variable(group, name)} ({duration_text(value)}) must be at least "
        f"{variable(group, than)} ({duration_text(bound)})"
    )


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)


class DatabaseSettings(_Group):
    """PostgreSQL, the single source of truth."""

    url: DatabaseUrl = Field(description="How to reach PostgreSQL (15 or newer).")
    pool_size: int = Field(
        default=10, ge=2, le=500, description="Connections for settling, maintenance and the API."
    )
    claim_pool_size: int = Field(default=5, ge=2, le=100, description="Connections for claims and planning.")
    statement_timeout: Duration = Field(
        default=_s(15),
        ge=_ms(100),
        le=_s(600),
        description="When PostgreSQL gives up on one of our statements.",
    )

    @property
    def dsn(self) -> str:
        """The URL with its password: for connecting, never for showing."""
        return self.url.get_secret_value()

    @property
    def shown(self) -> str:
        """Host, port and database: what a log or a person may see."""
        parts = urlsplit(self.dsn)
        return (parts.netloc.rpartition("@")[2] or "(local socket)") + parts.path


class ClaimSettings(_Group):
    """How due runs reach the executors."""

    mode: ClaimMode = Field(
        default=ClaimMode.POSTGRES,
        description="What hands out work: `postgres` claims rows with SKIP LOCKED, `kafka` hands out hints as well.",
    )
    poll_interval: Duration = Field(
        default=_ms(500), ge=_ms(10), le=_s(30), description="Pause between claims while nothing is due."
    )
    reap_interval: Duration = Field(
        default=_s(5), ge=_ms(100), le=_s(300), description="Pause between searches for expired leases."
    )


class KafkaSettings(_Group):
    """The hints of `kafka` mode. The truth stays in PostgreSQL: whatever happens here costs lateness, never a run."""

    bootstrap: KafkaServers | None = Field(
        default=None, description="Brokers to begin with. Needed in `kafka` mode, unused otherwise."
    )
    topic: KafkaName = Field(default="carillon-runs", description="Topic of the hints.")
    group: KafkaName = Field(default="carillon-executors", description="Consumer group of the executors.")
    create_topic: bool = Field(
        default=True,
        description="Make the topic when it is missing; otherwise a missing one is an error at start.",
    )
    partitions: int = Field(
        default=12,
        ge=1,
        le=1000,
        description="Partitions of a topic that is made here; at least one per replica.",
    )
    replication: int = Field(default=1, ge=1, le=9, description="Replicas of a topic that is made here.")
    retention: Duration = Field(
        default=_s(3600),
        ge=_s(60),
        le=_s(604_800),
        description="How long a topic that is made here keeps hints; they are worthless after minutes.",
    )
    shards: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Keys that one tenant's hints are spread over; more for very large tenants.",
    )
    idempotence: bool = Field(
        default=True, description="Idempotent producer. Small brokers lack it; nothing falls back by itself."
    )
    grace: Duration = Field(
        default=_s(5),
        ge=_ms(100),
        le=_s(300),
        description="How long a due run waits for its hint before the sweep takes it.",
    )
    sweep_interval: Duration = Field(
        default=_ms(500), ge=_ms(50), le=_s(30), description="Pause between sweeps for runs without a hint."
    )
    buffer: int = Field(
        default=20_000,
        ge=100,
        le=1_000_000,
        description="Hints held in memory; full, the partitions are paused.",
    )
    queue: int = Field(
        default=200_000,
        ge=100,
        le=10_000_000,
        description="Hints waiting to be sent; full, new ones are dropped.",
    )
    security: KafkaSecurity = Field(
        default=KafkaSecurity.PLAINTEXT, description="Security protocol of the brokers."
    )
    ca_file: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="CA certificates for TLS, as PEM.",
    )
    sasl_mechanism: SaslMechanism = Field(default=SaslMechanism.PLAIN, description="How to log in with SASL.")
    username: str | None = Field(
        default=None, min_length=1, max_length=256, description="User name for SASL."
    )
    password: Password | None = Field(default=None, description="Password for SASL.")
    password_file: PasswordFile | None = Field(
        default=None, description="The same from a file, read once at start."
    )

    @property
    def servers(self) -> str:
        """The brokers to begin with; only where they are needed and so have been checked to be there."""
        assert self.bootstrap is not None
        return self.bootstrap

    @property
    def secret(self) -> SecretStr | None:
        """The SASL password, wherever it came from."""
        return self.password or self.password_file

    @model_validator(mode="after")
    def _belongs_together(self) -> KafkaSettings:
        if self.password and self.password_file:
            raise ValueError(
                f"{variable('kafka', 'password')} and {variable('kafka', 'password_file')}: set only one"
            )
        if self.security.startswith("SASL") and not (self.username and self.secret):
            raise ValueError(
                f"{variable('kafka', 'username')} and {variable('kafka', 'password')} are needed "
                f"with {variable('kafka', 'security')}={self.security}"
            )
        return self


class PlannerSettings(_Group):
    """From schedules to runs."""

    tick: Duration = Field(
        default=_s(1), ge=_ms(50), le=_s(60), description="Pause between two planner turns."
    )
    lookahead: Duration = Field(
        default=_s(5),
        ge=_ms(50),
        le=_s(300),
        description="How long before its time an occurrence gets its run.",
    )
    batch: int = Field(
        default=1000, ge=1, le=5000, description="Schedules that one planner transaction locks."
    )
    rows_per_batch: int = Field(
        default=5000, ge=1, le=50_000, description="Runs that one planner transaction writes."
    )
    compute_budget: Duration = Field(
        default=_s(1),
        ge=_ms(10),
        le=_s(10),
        description="Time for computing the occurrences of one batch; the rest waits.",
    )
    misfire_grace: Duration = Field(
        default=_s(60),
        ge=_s(1),
        le=_s(86_400),
        description="How late an occurrence may be planned and still count as on time.",
    )

    @model_validator(mode="after")
    def _belongs_together(self) -> PlannerSettings:
        _refuse(
            _not_below("planner", "lookahead", self.lookahead, than="tick", bound=self.tick),
            _not_below("planner", "misfire_grace", self.misfire_grace, than="tick", bound=self.tick),
            f"{variable('planner', 'rows_per_batch')} ({self.rows_per_batch}) must be at least "
            f"{variable('planner', 'batch')} ({self.batch}): every schedule may need a row"
            if self.rows_per_batch < self.batch
            else None,
        )
        return self


class ExecutorSettings(_Group):
    """From claims to settled deliveries."""

    slots: int = Field(default=400, ge=1, le=10_000, description="Deliveries that one replica runs at once.")
    batch: int = Field(
        default=200, ge=1, le=1000, description="Runs per claim at most; idle slots bound it too."
    )
    tenant_share: float = Field(
        default=0.5,
        ge=0.01,
        le=1.0,
        allow_inf_nan=False,
        description="Share of the slots that one tenant may fill.",
    )
    delivery_timeout: Duration = Field(
        default=_s(15),
        ge=_ms(100),
        le=_s(600),
        description="One whole attempt, name look-up to last byte. A lease is twice it.",
    )
    drain_grace: Duration = Field(
        default=_s(25),
        ge=_ms(100),
        le=_s(3600),
        description="How long a stopping replica lets its deliveries finish.",
    )
    settle_batch: int = Field(
        default=400, ge=1, le=1000, description="Results written in one transaction at most."
    )
    settle_wait: Duration = Field(
        default=_ms(5),
        ge=_ms(0),
        le=_s(1),
        description="How long a result may wait for others to share its transaction.",
    )
    allow_loopback_targets: bool = Field(
        default=False,
        description="For development only: lets every tenant reach services on the replica's own machine.",
    )

    @property
    def lease_ttl(self) -> timedelta:
        """The length of a lease (ADR 0033: twice the delivery time-out)."""
        return 2 * self.delivery_timeout

    @property
    def keeper_interval(self) -> timedelta:
        """Leases are extended three times within their length, so two extends may fail."""
        return self.lease_ttl / 3

    @property
    def slots_per_tenant(self) -> int:
        """The mandatory cap: one slow target must not hold everybody's slots."""
        return max(1, floor(self.slots * self.tenant_share))

    @model_validator(mode="after")
    def _belongs_together(self) -> ExecutorSettings:
        needed = self.delivery_timeout + SETTLE_MARGIN
        if self.drain_grace < needed:
            raise ValueError(
                f"{variable('executor', 'drain_grace')} ({duration_text(self.drain_grace)}) must be at least "
                f"{variable('executor', 'delivery_timeout')} + {duration_text(SETTLE_MARGIN)} "
                f"({duration_text(needed)}): a delivery begun just before the stop has to finish"
            )
        return self


class RetentionSettings(_Group):
    """How long the history stays."""

    months: int = Field(
        default=13, ge=1, le=120, description="Whole months of history that stay, besides the current one."
    )
    detached: Detached = Field(
        default=Detached.KEEP,
        description="Older months are detached, then kept as plain tables or dropped with their runs.",
    )
    check_interval: Duration = Field(
        default=_s(3600), ge=_s(1), le=_s(86_400), description="Pause between two looks for months to detach."
    )


class PartitionSettings(_Group):
    """The monthly partitions of runs and attempts."""

    ahead: int = Field(
        default=3, ge=1, le=24, description="Months after the current one that are ready in advance."
    )
    check_interval: Duration = Field(
        default=_s(600), ge=_s(1), le=_s(86_400), description="Pause between two looks for months to add."
    )


class ApiSettings(_Group):
    """The HTTP API, health and metrics."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255, description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=65_535, description="Port to listen on; 0 takes any free one.")
    admin_key: AdminKey | None = Field(
        default=None, description="Key that may administer tenants and their keys. Without one nobody may."
    )
    admin_key_file: SecretFile | None = Field(
        default=None, description="The same from a file, read once at start."
    )
    max_body_bytes: int = Field(
        default=1_048_576, ge=1024, le=67_108_864, description="Largest request body in bytes that is read."
    )

    @property
    def key(self) -> SecretStr | None:
        """The administrator's key, wherever it came from; None switches administration off."""
        return self.admin_key or self.admin_key_file

    @model_validator(mode="after")
    def _belongs_together(self) -> ApiSettings:
        if self.admin_key and self.admin_key_file:
            raise ValueError(
                f"{variable('api', 'admin_key')} and {variable('api', 'admin_key_file')}: set only one"
            )
        return self


class LogSettings(_Group):
    """What is written to standard error."""

    level: LogLevel = Field(
        default=LogLevel.INFO, description="The least important messages that are written."
    )
    format: LogFormat = Field(
        default=LogFormat.JSON, description="One JSON object a line, or text for people."
    )


class Settings(BaseSettings):
    """Everything. Made by `load_settings` at start and taken apart by the composition root."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        validate_default=True,
    )

    roles: Roles = Field(default=frozenset(Role), description="What this replica does.")
    replica: Annotated[str, Allowed("1 to 63 letters, digits, dots, dashes and underscores")] = Field(
        default_factory=_host_name,
        pattern=r"^[A-Za-z0-9._-]{1,63}$",
        description="Name of this replica in leases, evidence and logs.",
    )
    database: DatabaseSettings
    claim: ClaimSettings = ClaimSettings()
    kafka: KafkaSettings = KafkaSettings()
    planner: PlannerSettings = PlannerSettings()
    executor: ExecutorSettings = ExecutorSettings()
    retention: RetentionSettings = RetentionSettings()
    partitions: PartitionSettings = PartitionSettings()
    api: ApiSettings = ApiSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _belongs_together(self) -> Settings:
        if self.claim.mode is ClaimMode.KAFKA and self.kafka.bootstrap is None:
            raise ValueError(
                f"{variable('kafka', 'bootstrap')} is required with {variable('claim', 'mode')}=kafka; "
                "allowed: `host:port`, several separated by commas"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is passed in: the environment has one door, `load_settings`."""
        return (init_settings,)
