"""Apache Kafka as a child of the tests: the reference broker, a single node in KRaft mode, run by `java`.

The programs come from Maven Central, once, into `~/.cache/carillon` (or XDG_CACHE_HOME); after that nothing is asked.

    python -m tests.apache_kafka resolve      fetch them now, outside of any test's time limit, and make starts quick
    python -m tests.apache_kafka              run a broker until Ctrl-C, for measurements by hand
"""

# ruff: noqa: T201 - as a program it says where it listens

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from app.errors import CarillonError, ConfigError
from app.local.broker import FIXED_ENVIRONMENT, HOST, LocalBroker, quiet_port

VERSION = "4.4.0"
SCALA = "2.13"
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.11.0"
RESOLVE_LIMIT = timedelta(minutes=15)

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>carillon</groupId>
  <artifactId>apache-kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_{SCALA}</artifactId>
      <version>{VERSION}</version>
    </dependency>
    <dependency> <!-- without a binding Kafka logs nothing, not even why it does not start -->
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
"""

JVM = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # half the time to start; a broker for tests is never hot enough for the second compiler
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)

ARCHIVE = "classes.jsa"
"""Beside the programs: the classes of a start as the JVM wants them in memory. A start with it takes half the time."""
ARCHIVE_LIMIT = timedelta(minutes=2)


class ApacheKafka(LocalBroker):
    """A single node, broker and controller in one; topics are made only by asking for them. Data outlasts `halt`."""

    def _prepare(self) -> Sequence[str | Path]:
        programs = resolve()
        run = [_find("java"), *JVM, self._archive(programs), "-cp", f"{programs}/*"]
        properties = self._workspace.path / "server.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in self._settings().items()))
        format_storage: list[str | Path] = [
            *run,
            "kafka.tools.StorageTool",
            "format",
            "-t",
            self.cluster,
            "-c",
            properties,
        ]
        done = subprocess.run(
            format_storage,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=FIXED_ENVIRONMENT,
            check=False,
        )
        if done.returncode != 0:
            said = done.stdout.decode(errors="replace").strip()
            raise ConfigError(f"Kafka's storage could not be formatted:\n{said[-4000:]}")
        return [*run, "kafka.Kafka", properties]

    def _archive(self, programs: Path) -> str:
        return (
            f"-XX:SharedArchiveFile={programs / ARCHIVE}"  # one that is missing or of another Java is ignored
        )

    def _settings(self) -> dict[str, object]:
        controller = f"{HOST}:{quiet_port()}"
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": self._workspace.path / "data",
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": 0,
            # One node, so one copy of everything.
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            # Many topics with little in them, and little memory.
            "log.index.size.max.bytes": 1024 * 1024,
            "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        }


class _Rehearsal(ApacheKafka):
    """A start whose classes are written down when it is halted."""

    def _archive(self, programs: Path) -> str:
        return f"-XX:ArchiveClassesAtExit={programs / ARCHIVE}.{os.getpid()}"


def archive_classes() -> None:
    """Make later starts quick, by one start and a clean stop. Does nothing the second time."""
    archive = resolve() / ARCHIVE
    if archive.exists():
        return
    with _Rehearsal.start() as broker:
        broker.halt(within=ARCHIVE_LIMIT)
    archive.with_name(f"{ARCHIVE}.{os.getpid()}").rename(archive)


def is_installed() -> bool:
    """Whether the programs are here, or can be fetched, and can be run."""
    return shutil.which("java") is not None and (_programs().exists() or shutil.which("mvn") is not None)


def resolve() -> Path:
    """The folder of Kafka's programs, fetched by Maven unless an earlier run did; others who want it wait meanwhile.

    Raises ConfigError when Maven is missing or cannot get them.
    """
    programs = _programs()
    if programs.exists():
        return programs
    with _alone(programs):
        if not programs.exists():
            _fetch(programs)
    return programs


def _programs() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "carillon" / f"kafka_{SCALA}-{VERSION}"


@contextlib.contextmanager
def _alone(programs: Path) -> Iterator[None]:
    programs.parent.mkdir(parents=True, exist_ok=True)
    with programs.with_name(f"{programs.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(programs: Path) -> None:
    """Into a folder beside it that is renamed when complete: an interrupted fetch leaves nothing that looks whole."""
    maven = _find("mvn")
    with tempfile.TemporaryDirectory(dir=programs.parent, prefix="fetching-") as folder:
        pom = Path(folder) / "pom.xml"
        pom.write_text(POM)
        fetched = Path(folder) / "programs"
        goal = [f"{PLUGIN}:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={fetched}"]
        try:
            done = subprocess.run(
                [maven, "-B", "-ntp", "-q", "--strict-checksums", "-f", pom, *goal],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=RESOLVE_LIMIT.total_seconds(),
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"Maven did not fetch Apache Kafka {VERSION} in {RESOLVE_LIMIT}") from error
        if done.returncode != 0:
            said = done.stdout.decode(errors="replace").strip()
            raise ConfigError(f"Maven could not fetch Apache Kafka {VERSION}:\n{said[-4000:]}")
        fetched.rename(programs)


def _find(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"Apache Kafka needs `{program}`, which is not installed")
    return found


def main(arguments: Sequence[str]) -> int:
    try:
        if list(arguments) == ["resolve"]:
            archive_classes()
            print(resolve())
            return 0
        if arguments:
            print(__doc__, file=sys.stderr)
            return 2
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt), ApacheKafka.start() as broker:
            print(f"Apache Kafka {VERSION} on {broker.bootstrap}, log in {broker.log_path}", flush=True)
            signal.pause()
    except CarillonError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
