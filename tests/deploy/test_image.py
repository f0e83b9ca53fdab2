"""The image as far as it can be tried without an engine: its recipe, and the wheel that it installs.

What a container engine alone can show (that the base image has what the recipe relies on) is not shown here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.settings import load_settings
from tests.deploy.repository import DEPLOY, ROOT
from tests.system.replicas import plain_environment

DOCKERFILE = DEPLOY / "Dockerfile"


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a Dockerfile."""

    word: str
    rest: str


def stages() -> list[list[Step]]:
    """The steps of each stage, FROM first."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    steps = [Step(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]
    begins = [number for number, step in enumerate(steps) if step.word == "FROM"]
    ends = [*begins[1:], len(steps)]
    return [steps[begin:end] for begin, end in zip(begins, ends, strict=True)]


def image_environment() -> dict[str, str]:
    """What the image's last stage sets."""
    found = [step.rest for step in stages()[-1] if step.word == "ENV"]
    return dict(pair.split("=", 1) for rest in found for pair in rest.split())


def copied() -> set[str]:
    """What the recipe takes from the repository."""
    sources: set[str] = set()
    for step in (step for stage in stages() for step in stage):
        if step.word == "COPY" and "--from" not in step.rest:
            sources.update(step.rest.split()[:-1])
    return sources


def test_only_what_is_copied_is_sent_to_the_engine() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    assert {pattern[1:] for pattern in patterns if pattern.startswith("!")} == copied()
    assert all((ROOT / source).exists() for source in copied())


def test_everything_from_a_registry_is_checked_by_its_hash() -> None:
    runs = " && ".join(step.rest for step in stages()[0] if step.word == "RUN").split("&&")
    installs = [command for command in runs if "pip" in command and " install " in command]
    assert len(installs) == 3
    for command in installs:
        is_checked = "--require-hashes" in command and "--only-binary :all:" in command
        assert is_checked or ("--no-index" in command and "--no-deps" in command), command
    assert all("pip" not in step.rest for step in stages()[1] if step.word == "RUN")


def test_the_image_runs_one_replica_as_nobody_in_particular() -> None:
    last = {step.word: step.rest for step in stages()[-1]}
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", last["USER"])
    assert (last["ENTRYPOINT"], last["CMD"]) == ('["carillon"]', '["serve"]')
    assert "HEALTHCHECK" not in last


def test_the_python_of_the_image_is_the_one_that_is_locked_for() -> None:
    [version] = re.findall(r"^ARG PYTHON=(3\.\d+)", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for lock in ("runtime.lock", "build.lock"):
        assert f"--python-version {version} " in (DEPLOY / lock).read_text()
    assert f'requires-python = ">={version}"' in (ROOT / "pyproject.toml").read_text()


def test_the_settings_of_the_image_are_settings() -> None:
    given = {name: value for name, value in image_environment().items() if name.startswith("SCHEDULER_")}
    assert given
    settings = load_settings({**given, "SCHEDULER_DATABASE_URL": "postgresql://carillon@postgres/carillon"})
    assert settings.api.host == "0.0.0.0"
    assert f"EXPOSE {settings.api.port}\n" in DOCKERFILE.read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the image builds it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    assert any(" ".join(build[1:5]) in step.rest for step in stages()[0] if step.word == "RUN")
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_code_and_the_migrations_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        migrations = {
            name: archive.read(name).decode() for name in inside if name.startswith("app/migrations/")
        }
    code = {str(path.relative_to(ROOT)) for kind in ("*.py", "*.css") for path in (ROOT / "app").rglob(kind)}
    assert inside - set(migrations) == code
    assert migrations == {
        f"app/migrations/{path.name}": path.read_text() for path in (ROOT / "migrations").glob("*.sql")
    }


def test_the_installed_wheel_migrates_a_database_from_anywhere(
    wheel: Path, tmp_path: Path, empty_dsn: str
) -> None:
    place = tmp_path / "opt"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel],
        check=True,
        capture_output=True,
        env={**plain_environment(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    # The packages that Carillon needs are borrowed from here; a folder on the path is not searched for other paths,
    # so the source tree is not found by this.
    [site] = place.glob("lib/python3*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str | Path) -> str:
        return subprocess.run(
            command,
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
            env={**plain_environment(), "SCHEDULER_DATABASE_URL": empty_dsn},
        ).stdout

    carillon = place / "bin" / "carillon"
    assert run(python, "-c", "import app; print(app.__file__)").startswith(str(site))
    assert "applied" in run(carillon, "migrate")
    assert "up to date" in run(carillon, "migrate")
    assert "FAIL" not in run(carillon, "doctor")
