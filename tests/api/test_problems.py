"""Whatever is sent, the answer is a problem that says what is wrong; nothing is a 500, and nothing changes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api import reading
from app.api.problems import KINDS
from app.errors import CarillonError, PartitionMissing, RowRefused, StoreUnavailable
from app.store import schedules
from app.store.pool import Pool
from tests.api.conftest import Tenancy, assert_problem, created, schedule_body

JSON = {"Content-Type": "application/json"}


async def test_an_unknown_path_is_a_problem(stranger: httpx.AsyncClient) -> None:
    for path in (
        "/",
        "/v1",
        "/v1/",
        "/v1/schedules/",
        "/v2/schedules",
        "/%00",
        "/" + "a" * 5_000,
        "/v1//runs",
    ):
        assert_problem(await stranger.get(path), 404, "not-found")


async def test_a_wrong_method_names_all_that_exist(stranger: httpx.AsyncClient) -> None:
    for path, allowed in (
        ("/v1/schedules", "GET, POST"),
        (f"/v1/schedules/{UUID(int=7)}", "DELETE, GET, PATCH"),
        ("/livez", "GET, HEAD"),
    ):
        response = await stranger.request("PUT", path)
        assert_problem(response, 405, "method-not-allowed")
        assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "line 1, column 2"),
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b'"text"', None),
        (b"{} {}", "Extra data"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"name": "a", "name": "b"}', "'name' is there twice"),
        (b'{"target": {"url": 1, "url": 2}}', "'url' is there twice"),
        (b'{"expires_after_seconds": NaN}', "NaN"),
        (b'{"expires_after_seconds": -Infinity}', "-Infinity"),
        (b'{"expires_after_seconds": 1e999}', "outside"),
        (b'{"expires_after_seconds": ' + b"9" * 50_000 + b"}", "outside"),
        (b'{"expires_after_seconds": 9007199254740993}', "outside"),
        (b"[" * 2_000, "nested"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "nested"),
        (b"[" * 17 + b"]" * 17, "nested"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(tenant: Tenancy, body: bytes, says: str | None) -> None:
    response = await tenant.client.post("/v1/schedules", content=body, headers=JSON)
    if says is None:
        assert_problem(response, 422, "invalid-input")
    else:
        assert says in assert_problem(response, 400, "malformed-request")["detail"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": [' + b"{}," * 20_000 + b"{}]}",
        b'{"name": [' + b"0," * 30_000 + b"0]}",
        b'{"name": [' + b'"",' * 20_000 + b"0]}",
        b'{"name": [' + rb'"\u0000",' * 6_000 + b"0]}",
        b"{" + b",".join(b'"%d":1' % key for key in range(6_000)) + b"}",
        b"{" + b",".join(b'"%d":1' % key for key in range(6_000)) + b',"0":1}',
        b'{"recurrence": {' + b",".join(b'"%d":1' % key for key in range(6_000)) + b"}}",
        b"[" * 60_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[ " + b"0 " * 30_000 + b"]",
    ],
)
async def test_a_body_of_too_many_values_is_refused(tenant: Tenancy, body: bytes) -> None:
    response = await tenant.client.post("/v1/schedules", content=body, headers=JSON)
    problem = assert_problem(response, 400, "malformed-request")
    assert problem["detail"] == "the body has more than 2000 values and names"
    assert len(response.content) < 1_000


async def test_the_bound_on_values_is_exact(tenant: Tenancy) -> None:
    # The object, the name and the list are three of them.
    for texts, status in ((1_997, 422), (1_998, 400)):
        body = json.dumps({"name": ["a"] * texts}).encode()
        assert (await tenant.client.post("/v1/schedules", content=body, headers=JSON)).status_code == status


@pytest.mark.parametrize("end", [b"", b'"', b"\\"])
async def test_a_text_that_never_ends_is_gone_through_once(tenant: Tenancy, end: bytes) -> None:
    """Were each quotation mark in it a new beginning, this would take minutes."""
    body = (b'"' + rb"\"" * 32_000 + end)[:65_536]
    response = await tenant.client.post("/v1/schedules", content=body, headers=JSON)
    assert response.status_code in (400, 422)


async def test_what_stands_inside_a_text_is_not_counted(tenant: Tenancy) -> None:
    sent = json.dumps([{"a": [0, "\\"]}] * 2_000)
    target = {"url": "https://example.com/", "body": sent}
    assert (await created(tenant, target=target))["target"]["body"] == sent


@pytest.mark.parametrize("path", ["/v1/schedules", "/v1/cron/preview"])
async def test_of_many_faults_the_first_are_listed(tenant: Tenancy, path: str) -> None:
    response = await tenant.client.post(path, json={f"{key:05}": 1 for key in range(900)})
    problem = assert_problem(response, 422, "invalid-input")
    assert len(problem["errors"]) == 20
    assert problem["detail"].endswith("; errors has the first 20 faults, there are more")
    assert len(response.content) < 4_000


async def test_just_as_many_faults_as_are_listed_are_all(tenant: Tenancy) -> None:
    path = "/v1/cron/preview"
    response = await tenant.client.post(
        path, json={"cron": "* * * * *", **{f"{key}": 1 for key in range(20)}}
    )
    problem = assert_problem(response, 422, "invalid-input")
    assert len(problem["errors"]) == 20
    assert problem["detail"].endswith("(and 19 more, see errors)")


async def test_of_many_unstorable_texts_the_first_are_listed(tenant: Tenancy) -> None:
    key = "k" * 30_000
    response = await tenant.client.post("/v1/schedules", json={key: ["\0"] * 900})
    problem = assert_problem(response, 422, "invalid-input")
    assert len(problem["errors"]) == 20
    assert "there are more" in problem["detail"]
    assert len(response.content) < 20_000


LONG_KEY = "k" * 50_000


@pytest.mark.parametrize(
    "body",
    [
        {LONG_KEY: 1},
        schedule_body(recurrence={"kind": "every", LONG_KEY: 1}),
        schedule_body(recurrence={"kind": "cron", "cron": "* * * * *", "timezone": LONG_KEY}),
        schedule_body(recurrence={"kind": "cron", "cron": LONG_KEY}),
        schedule_body(recurrence={"kind": LONG_KEY}),
        schedule_body(retry={LONG_KEY: 1}),
        schedule_body(target={"url": "https://example.com/", LONG_KEY: 1}),
        schedule_body(target={"url": "https://example.com/", "headers": {LONG_KEY: "a"}}),
        schedule_body(target={"url": "https://example.com/", "headers": {"X-A": LONG_KEY}}),
        schedule_body(target={"url": "https://example.com/" + LONG_KEY}),
        schedule_body(name=LONG_KEY),
        schedule_body(misfire=LONG_KEY),
        {LONG_KEY: {LONG_KEY[:10_000]: "\0"}},
    ],
)
async def test_a_refusal_repeats_little_of_a_long_text(tenant: Tenancy, body: dict[str, Any]) -> None:
    response = await tenant.client.post("/v1/schedules", json=body)
    assert_problem(response, 422, "invalid-input")
    assert len(response.content) < 2_000


async def test_a_long_key_is_cut_in_every_refusal(tenant: Tenancy) -> None:
    made = await created(tenant)
    for verb in ("resume", "pause"):
        response = await tenant.client.post(f"/v1/schedules/{made['id']}/{verb}", json={LONG_KEY: 1})
        [error] = assert_problem(response, 422, "invalid-input")["errors"]
        assert error["field"] == "k" * 150 + "…"
        assert len(response.content) < 2_000
    key = LONG_KEY[:30_000]
    twice = f'{{"{key}": 1, "{key}": 2}}'.encode()
    response = await tenant.client.post("/v1/schedules", content=twice, headers=JSON)
    assert_problem(response, 400, "malformed-request")
    assert len(response.content) < 1_000


async def test_the_longest_field_that_can_be_right_is_shown_whole(tenant: Tenancy) -> None:
    name = "X-" + "a" * 126
    target = {"url": "https://example.com/", "headers": {name: 1}}
    response = await tenant.client.post("/v1/schedules", json=schedule_body(target=target))
    [error] = assert_problem(response, 422, "invalid-input")["errors"]
    assert error["pointer"] == f"/target/headers/{name}"


@pytest.mark.parametrize("path", ["/v1/schedules", "/v1/runs"])
async def test_a_query_of_too_many_parameters_is_refused(tenant: Tenancy, path: str) -> None:
    response = await tenant.client.get(f"{path}?{'&'.join(f'p{number}' for number in range(101))}")
    assert "more than 100 parameters" in assert_problem(response, 400, "malformed-request")["detail"]
    response = await tenant.client.get(f"{path}?{'&'.join(f'p{number}' for number in range(100))}")
    assert len(assert_problem(response, 422, "invalid-input")["errors"]) == 20


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (rb'{"name": "a\u0000b"}', "/name"),
        (rb'{"name": "\ud800"}', "/name"),
        (rb'{"target": {"headers": {"X-A": "\udfff"}}}', "/target/headers/X-A"),
        (rb'{"target": {"headers": {"\ud800": "a"}}}', "/target/headers"),
        (rb'{"\u0000": 1}', ""),
    ],
)
async def test_text_that_cannot_be_stored_is_refused_where_it_is(
    tenant: Tenancy, body: bytes, pointer: str
) -> None:
    response = await tenant.client.post("/v1/schedules", content=body, headers=JSON)
    assert assert_problem(response, 422, "invalid-input")["errors"][0]["pointer"] == pointer


async def test_paired_surrogates_are_one_character(tenant: Tenancy) -> None:
    body = json.dumps(schedule_body(name="bell \N{BELL}")).encode("ascii")
    assert rb"\ud83d" in body
    response = await tenant.client.post("/v1/schedules", content=body, headers=JSON)
    assert response.json()["name"] == "bell \N{BELL}"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "application/jsonx"},
        {"Content-Type": "\x7f"},
    ],
)
async def test_a_body_of_another_media_type_is_refused(tenant: Tenancy, headers: dict[str, str]) -> None:
    response = await tenant.client.post("/v1/schedules", content=b"{}", headers=headers)
    assert_problem(response, 415, "unsupported-media-type")


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=UTF-8"])
async def test_json_may_say_its_charset(tenant: Tenancy, media_type: str) -> None:
    body = json.dumps(schedule_body()).encode()
    response = await tenant.client.post("/v1/schedules", content=body, headers={"Content-Type": media_type})
    assert response.status_code == 201


async def test_too_large_a_body_is_refused_announced_or_not(tenant: Tenancy) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1_000

    for content in (b" " * 65_537, chunks()):
        response = await tenant.client.post("/v1/schedules", content=content, headers=JSON)
        assert_problem(response, 413, "body-too-large")
        assert response.headers["connection"] == "close"
    fits = json.dumps(schedule_body()).encode().ljust(65_536)
    assert (await tenant.client.post("/v1/schedules", content=fits, headers=JSON)).status_code == 201


async def test_a_body_that_never_ends_is_given_up(tenant: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_DEADLINE", reading.BODY_DEADLINE / 1_000)
    waiting = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await waiting.wait()

    response = await tenant.client.post("/v1/schedules", content=endless(), headers=JSON)
    assert_problem(response, 408, "body-timeout")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(codec=None))
    | st.sampled_from(
        ["cron", "every", "once", "* * * * *", "UTC", "http://[", "\0", "9" * 400, "../../etc"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PARTS = ("name", "recurrence", "target", "retry", "misfire", "overlap", "expires_after_seconds", "extra")
INNER = (
    ("recurrence", ("kind", "cron", "timezone", "every_seconds", "anchor", "at")),
    ("target", ("method", "url", "headers", "body")),
    ("retry", ("max_attempts", "base_seconds", "factor", "cap_seconds")),
)


@st.composite
def hostile_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A good body with one or two places spoiled, on the surface or inside a part."""
    body = schedule_body(retry={"max_attempts": 3})
    for _ in range(draw(st.integers(1, 2))):
        if draw(st.booleans()):
            body[draw(st.sampled_from(PARTS))] = draw(JSON_VALUES)
        else:
            part, names = draw(st.sampled_from(INNER))
            inner = body[part] if isinstance(body.get(part), dict) else {}
            body[part] = {**inner, draw(st.sampled_from(names)): draw(JSON_VALUES)}
    return body


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=hostile_bodies())
async def test_no_body_is_a_500_or_changes_anything_when_refused(
    tenant: Tenancy, pool: Pool, body: dict[str, Any]
) -> None:
    before = await pool.fetchval("SELECT count(*) FROM schedule")
    response = await tenant.client.post("/v1/schedules", content=json.dumps(body).encode(), headers=JSON)
    if response.status_code == 201:
        path = response.headers["location"]
        assert (await tenant.client.get(path)).json() == response.json()
        assert (await tenant.client.delete(path)).status_code == 204
    else:
        assert response.status_code in (400, 422), response.text
        assert response.headers["content-type"] == "application/problem+json"
        assert await pool.fetchval("SELECT count(*) FROM schedule") == before


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=hostile_bodies(), keep=st.sets(st.sampled_from(PARTS)))
async def test_no_change_is_a_500(tenant: Tenancy, body: dict[str, Any], keep: set[str]) -> None:
    made = await created(tenant)
    path = f"/v1/schedules/{made['id']}"
    change = {name: value for name, value in body.items() if name in keep}
    response = await tenant.client.patch(path, content=json.dumps(change).encode(), headers=JSON)
    assert response.status_code in (200, 400, 422), response.text
    if response.status_code != 200:
        assert (await tenant.client.get(path)).json() == made
    assert (await tenant.client.delete(path)).status_code == 204


async def test_a_lost_database_is_503_with_a_time_to_come_back(tenant: Tenancy, pool: Pool) -> None:
    await pool.close()
    response = await tenant.client.get("/v1/schedules")
    assert_problem(response, 503, "unavailable")
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("error", "status", "slug"),
    [
        (StoreUnavailable("canary-31f host=10.0.0.7 password=hunter2"), 503, "unavailable"),
        (PartitionMissing("canary-31f"), 503, "partition-missing"),
        (RowRefused("canary-31f"), 422, "invalid-input"),
        (CarillonError("canary-31f"), 500, "internal-error"),
        (asyncpg.UndefinedColumnError("canary-31f"), 500, "internal-error"),
        (RuntimeError("canary-31f"), 500, "internal-error"),
        (RecursionError("canary-31f"), 500, "internal-error"),
    ],
)
async def test_our_own_failures_are_logged_and_not_told(
    tenant: Tenancy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    slug: str,
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(schedules, "get", fails)
    caplog.set_level(logging.INFO)
    response = await tenant.client.get(f"/v1/schedules/{uuid4()}", headers={"X-Request-Id": "request-77"})
    body = assert_problem(response, status, slug)
    assert "canary" not in response.text
    assert body["request_id"] == "request-77"
    if status >= 500 and slug != "partition-missing":
        assert any(getattr(record, "request_id", "") == "request-77" for record in caplog.records)
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("offered", ["short", "a" * 65, "with space in it", 'quote"-and-more', "line\tbreak"])
async def test_an_odd_request_id_is_replaced(stranger: httpx.AsyncClient, offered: str) -> None:
    response = await stranger.get("/v1/schedules", headers={"X-Request-Id": offered})
    assert response.headers["x-request-id"] != offered
    assert len(response.headers["x-request-id"]) == 32


async def test_every_kind_of_problem_has_its_page(stranger: httpx.AsyncClient) -> None:
    index = (await stranger.get("/problems")).text
    for kind in KINDS.values():
        page = await stranger.get(f"/problems/{kind.slug}")
        assert page.status_code == 200
        assert kind.title in page.text
        assert f"/problems/{kind.slug} " in index
    assert_problem(await stranger.get("/problems/nonsense"), 404, "not-found")


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"name": 7}, "must be text"),
        ({"name": "a" * 201}, "must have at most 200 characters"),
        ({"target": "https://example.com/"}, "must be a JSON object"),
        ({"misfire": "later"}, "must be 'fire_once', 'fire_all' or 'skip'"),
        ({"expires_after_seconds": "60"}, "must be a number"),
        ({"expires_after_seconds": 0}, "must be at least 1"),
        ({"expires_after_seconds": 10**9}, "must be at most 2592000"),
        ({"nickname": "a"}, "there is no such field"),
    ],
)
async def test_a_refusal_says_in_plain_words_what_is_allowed(
    tenant: Tenancy, change: dict[str, Any], detail: str
) -> None:
    response = await tenant.client.post("/v1/schedules", json=schedule_body(**change))
    (error,) = assert_problem(response, 422, "invalid-input")["errors"]
    assert error["detail"] == detail


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/v1/tenants", {}, "is required"),
        ("/v1/tenants", [], "must be a JSON object"),
        ("/v1/tenants", {"name": ""}, "must not be empty"),
        ("/v1/tenants", {"name": " "}, "must not be blank"),
        (f"/v1/tenants/{UUID(int=7)}/keys", {"name": "a", "scopes": []}, "must have at least 1 of them"),
        (f"/v1/tenants/{UUID(int=7)}/keys", {"name": "a", "scopes": "read"}, "must be a list"),
        (f"/v1/tenants/{UUID(int=7)}/keys", {"name": "a", "scopes": ["all"]}, "must be 'read' or 'write'"),
    ],
)
async def test_the_administrator_is_told_as_plainly(
    admin: httpx.AsyncClient, path: str, body: object, detail: str
) -> None:
    (error,) = assert_problem(await admin.post(path, json=body), 422, "invalid-input")["errors"]
    assert error["detail"] == detail


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("limit=many", "must be a whole number"),
        ("limit=1.5", "must be a whole number"),
        ("limit=" + "9" * 5_000, "must be a whole number"),
        ("limit=201", "must be at most 200"),
        ("schedule_id=7", "must be a UUID"),
        ("page=2", "there is no such parameter"),
    ],
)
async def test_a_faulty_parameter_is_told_as_plainly(tenant: Tenancy, query: str, detail: str) -> None:
    (error,) = assert_problem(await tenant.client.get(f"/v1/runs?{query}"), 422, "invalid-input")["errors"]
    assert error["detail"] == detail


async def test_a_verb_that_takes_no_body_refuses_one_and_does_nothing(tenant: Tenancy) -> None:
    schedule = f"/v1/schedules/{(await created(tenant))['id']}"
    run = f"/v1/runs/{(await tenant.client.post(f'{schedule}/run')).json()['id']}"
    await tenant.client.post(f"{schedule}/pause")
    runs_before = (await tenant.client.get("/v1/runs")).json()
    for verb in (f"{schedule}/run", f"{schedule}/resume", f"{run}/cancel"):
        for body, pointer in (({"reason": "a"}, "/reason"), ([], ""), (None, "")):
            response = await tenant.client.post(verb, content=json.dumps(body), headers=JSON)
            (error,) = assert_problem(response, 422, "invalid-input")["errors"]
            assert error["pointer"] == pointer
        assert_problem(await tenant.client.post(verb, content=b"{", headers=JSON), 400, "malformed-request")
        assert_problem(await tenant.client.post(verb, content=b"a"), 415, "unsupported-media-type")
    assert (await tenant.client.get("/v1/runs")).json() == runs_before
    assert (await tenant.client.get(schedule)).json()["status"] == "paused"
    for verb in (f"{schedule}/run", f"{schedule}/resume", f"{run}/cancel"):
        assert (await tenant.client.post(verb, json={})).is_success
