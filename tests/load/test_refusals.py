"""Where a load run may happen: on a disk, and never against a stranger's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import ConfigError
from app.load.refusals import file_system_of, is_loopback, require_owned

MOUNTS = """/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/vdb /tmp/on\\040disk xfs rw 0 0
tmpfs /twice tmpfs rw 0 0
/dev/vdc /twice ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/lib", "ext4"),
        ("/tmp", "tmpfs"),
        ("/tmp/x/y", "tmpfs"),
        ("/tmpfile", "ext4"),
        ("/tmp/on disk/pg", "xfs"),
        ("/twice/x", "ext4"),
    ],
)
def test_the_deepest_and_latest_mount_tells_the_file_system(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST."])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)
    require_owned(f"http://{f'[{host}]' if ':' in host else host}:8000/x", is_owned=False)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "128.0.0.1", "example.com", "localhost.example.com", "127.0.0.1.nip.io", "0.0.0.0"]
)
def test_any_other_host_must_be_owned(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="--i-own-this-target"):
        require_owned(f"http://{host}:8000", is_owned=False)
    require_owned(f"http://{host}:8000", is_owned=True)


@pytest.mark.parametrize("url", ["", "ftp://127.0.0.1", "127.0.0.1:80", "http://"])
def test_a_target_is_an_http_url(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        require_owned(url, is_owned=True)
