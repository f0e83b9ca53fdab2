"""The reference: the committed document, what it says of problems, and that its shapes are the domain's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import errors
from app.api import openapi
from app.api.app import blank_app
from app.api.problems import KINDS
from app.domain import recurrence as recurrences
from app.domain import retry as retries
from app.domain import target as targets
from app.domain.run import Reason
from app.domain.schedule import SkipReason

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"
DOCUMENT = openapi.document(blank_app())
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_committed_document_is_the_present_one() -> None:
    assert COMMITTED.read_text() == openapi.render(blank_app()), (
        "run: python -m app.api.openapi > docs/openapi.json"
    )


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_it_is_openapi_3_1_with_named_operations() -> None:
    assert DOCUMENT["openapi"].startswith("3.1.")
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch("[a-z_]+", one) for one in ids)


def test_every_operation_of_v1_names_its_key_and_its_problems() -> None:
    for path, method, operation in operations():
        if not path.startswith("/v1/"):
            continue
        assert operation["security"], (path, method)
        assert operation["description"], (path, method)
        for status, answer in operation["responses"].items():
            if status >= "400":
                assert answer["content"] == {
                    "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                }
        assert {"401", "500", "503"} <= set(operation["responses"]), (path, method)


def test_all_references_lead_somewhere() -> None:
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)):
        assert name in DOCUMENT["components"]["schemas"]


def shape(part: str) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["components"]["schemas"]["ScheduleBody"]["properties"][part]
    return found


@pytest.mark.parametrize("kind", shape("recurrence")["oneOf"], ids=lambda kind: kind["title"])
def test_the_shape_of_a_recurrence_is_what_the_domain_reads(kind: dict[str, Any]) -> None:
    samples = {
        "kind": kind["properties"]["kind"]["const"],
        "cron": "* * * * *",
        "timezone": "UTC",
        "every_seconds": 31_622_400,
        "anchor": "2026-01-01T00:00:00Z",
        "at": "2027-01-01T00:00:00Z",
    }
    full = {name: samples[name] for name in kind["properties"]}
    recurrences.parse(full, now=NOW)
    for name in kind["required"]:
        without = {key: value for key, value in full.items() if key != name}
        with pytest.raises(errors.InvalidInput):
            recurrences.parse(without, now=NOW)
    recurrences.parse({name: full[name] for name in kind["required"]}, now=NOW)
    with pytest.raises(errors.InvalidInput):
        recurrences.parse({**full, "unknown": 1}, now=NOW)


def test_the_shape_of_a_retry_policy_is_what_the_domain_reads() -> None:
    properties = shape("retry")["properties"]
    default = json.loads(retries.to_json(retries.parse({})))
    assert default == {name: limits["default"] for name, limits in properties.items()}
    for name, limits in properties.items():
        number = int if limits["type"] == "integer" else float
        for bound, beyond in ((number(limits["minimum"]), -1), (number(limits["maximum"]), 1)):
            others = {"base_seconds": 1, "cap_seconds": 86_400}
            retries.parse({**others, name: bound})
            with pytest.raises(errors.InvalidInput):
                retries.parse({**others, name: bound + beyond})


def test_the_shape_of_a_target_is_what_the_domain_reads() -> None:
    properties = shape("target")["properties"]
    samples = {"method": "PUT", "url": "https://example.com/", "headers": {"X-A": "b"}, "body": "text"}
    assert set(samples) == set(properties)
    targets.parse(samples)
    for method in properties["method"]["enum"]:
        targets.parse({"method": method, "url": "https://example.com/"})
    assert targets.parse({"url": "https://example.com/"}).method == properties["method"]["default"]
    long = "https://example.com/".ljust(properties["url"]["maxLength"], "a")
    targets.parse({"url": long})
    with pytest.raises(errors.InvalidInput):
        targets.parse({"url": long + "a"})


async def test_the_reference_shows_every_operation_and_loads_nothing(stranger: httpx.AsyncClient) -> None:
    page = await stranger.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for path, method, _ in operations():
        assert f"<code>{method.upper()} {path}</code>" in page.text
    assert not re.search(r"<script|src=|https?://(?!www\.rfc)", page.text)
    served = (await stranger.get("/openapi.json")).json()
    assert served["paths"] == DOCUMENT["paths"]


def test_the_guide_names_every_kind_of_problem_and_every_path() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for kind in KINDS.values():
        assert f"`{kind.slug}`" in guide
    for path, method, _ in operations():
        assert f"`{method.upper()} {path}`" in guide


def test_the_guide_names_every_reason_and_every_field_of_a_body() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for reason in (*Reason, *SkipReason):
        assert f"`{reason}`" in guide
    schemas = DOCUMENT["components"]["schemas"]
    for body in ("PauseBody", "PreviewBody", "TenantBody", "KeyBody"):
        for field in schemas[body]["properties"]:
            assert f"`{field}`" in guide
    for field in schemas["ScheduleBody"]["properties"]:
        assert f'"{field}"' in guide


def test_the_delivery_guide_names_every_identity_header() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "delivery.md").read_text()
    source = (Path(__file__).parents[2] / "app" / "executor" / "headers.py").read_text()
    names = re.findall(r'^        \("([a-z-]+)", ', source, re.MULTILINE)
    assert len(names) == 6
    for name in names:
        assert f"\n| `{name}` |" in guide
