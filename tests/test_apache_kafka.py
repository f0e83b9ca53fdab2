"""The reference broker's programs are fetched once, whole or not at all, and one that is required is not left out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import ConfigError
from tests import apache_kafka, brokers
from tests.apache_kafka import VERSION, ApacheKafka, is_installed, resolve
from tests.local.launching import ROOT

FETCHING = """#!/bin/sh
echo "$@" >> "{calls}"
for argument; do case "$argument" in -DoutputDirectory=*) folder="${{argument#*=}}" ;; esac; done
mkdir -p "$folder"
echo half > "$folder/half.jar"
{then}
"""

MakeMaven = Callable[[str], Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "carillon"


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMaven:
    """Put a Maven of our own in front that fetches one file and then does what it is told; returns its call list."""

    def make(then: str) -> Path:
        calls = tmp_path / "calls"
        calls.touch()
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "mvn").write_text(FETCHING.format(calls=calls, then=then))
        (programs / "mvn").chmod(0o755)
        (programs / "java").symlink_to("/bin/false")
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.defpath}")
        return calls

    return make


def test_the_programs_are_fetched_once_and_then_found_without_maven(
    cache: Path, maven: MakeMaven, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = maven("exit 0")
    assert is_installed()
    programs = resolve()
    assert [path.name for path in programs.iterdir()] == ["half.jar"]
    assert VERSION in programs.name
    monkeypatch.setenv("PATH", "")
    assert resolve() == programs
    (call,) = calls.read_text().splitlines()
    assert "--strict-checksums" in call


def test_a_fetch_that_fails_says_why_and_leaves_nothing_that_looks_whole(
    cache: Path, maven: MakeMaven
) -> None:
    calls = maven("echo 'no route to the repository'; exit 1")
    with pytest.raises(
        ConfigError, match=r"could not fetch Apache Kafka [\d.]+:\nno route to the repository"
    ):
        resolve()
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
    with pytest.raises(ConfigError):
        resolve()
    assert len(calls.read_text().splitlines()) == 2


def test_those_who_want_it_at_the_same_time_fetch_it_once(cache: Path, maven: MakeMaven) -> None:
    calls = maven("exit 0")
    want = "from tests.apache_kafka import resolve; print(resolve())"
    wanting = [
        subprocess.Popen([sys.executable, "-c", want], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    found = {process.communicate()[0].strip() for process in wanting}
    assert found == {str(resolve())}
    assert len(calls.read_text().splitlines()) == 1


def test_without_java_or_maven_there_is_no_apache_kafka(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_installed()
    with pytest.raises(ConfigError, match="needs `mvn`"):
        resolve()
    (cache / f"kafka_{apache_kafka.SCALA}-{VERSION}").mkdir(parents=True)
    with pytest.raises(ConfigError, match="needs `java`"):
        ApacheKafka.start()


def test_storage_that_cannot_be_formatted_says_why(cache: Path, maven: MakeMaven, tmp_path: Path) -> None:
    maven("exit 0")
    java = tmp_path / "bin" / "java"
    java.unlink()
    java.write_text("#!/bin/sh\necho 'class file version 61.0'; exit 1\n")
    java.chmod(0o755)
    with pytest.raises(ConfigError, match=r"could not be formatted:\nclass file version 61\.0"):
        ApacheKafka.start()


def test_a_required_apache_kafka_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apache_kafka, "is_installed", lambda: False)
    monkeypatch.setattr("tests.servers._engine_answers", lambda: False)
    monkeypatch.delenv("TEST_KAFKA_BOOTSTRAP", raising=False)
    monkeypatch.delenv("REQUIRE_APACHE_KAFKA", raising=False)
    assert brokers.names() == [brokers.TANSU]
    monkeypatch.setenv("REQUIRE_APACHE_KAFKA", "1")
    with pytest.raises(LookupError, match="install java and mvn, set TEST_KAFKA_BOOTSTRAP"):
        brokers.names()
    monkeypatch.setenv("TEST_KAFKA_BOOTSTRAP", "127.0.0.1:9")
    assert brokers.names() == [brokers.TANSU, brokers.APACHE]
    assert brokers.describe(brokers.APACHE) == "apache at 127.0.0.1:9"
    assert brokers.Brokers().get(brokers.APACHE).bootstrap == "127.0.0.1:9"
