"""Targets are refused at create when they could not be sent, stored or told apart from ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.address import PUBLIC_ONLY, REFUSED, WITH_LOOPBACK
from app.domain.target import (
    MASK,
    MAX_BODY_BYTES,
    MAX_HEADER_VALUE,
    MAX_HEADERS,
    METHODS,
    RESERVED_NAMES,
    Target,
    check_allowed,
    from_json,
    masked,
    origin_of,
    parse,
    to_json,
    url_problem,
)
from app.errors import InvalidInput

URL = "https://example.com/hook"


def refusal(**data: object) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        parse({"url": URL} | data)
    return caught.value


def test_a_target_is_read_with_its_defaults() -> None:
    assert parse({"url": URL}) == Target("POST", URL, (), None)


def test_a_whole_target_is_read_in_order() -> None:
    given_target = {
        "method": "put",
        "url": "https://Example.com",
        "headers": {"B": "2", "a": "1"},
        "body": "",
    }
    assert parse(given_target) == Target(
        "PUT",
        "https://example.com/",
        (("B", "2"), ("a", "1"), ("Content-Type", "text/plain; charset=utf-8")),
        "",
    )


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ('{"a": [1, null]}', "application/json"),
        ("12", "application/json"),
        ("plain", "text/plain; charset=utf-8"),
        ("NaN", "text/plain; charset=utf-8"),
        ("[" * 100_000, "text/plain; charset=utf-8"),
        ("1" * 10_000, "text/plain; charset=utf-8"),
    ],
)
def test_a_body_without_a_type_gets_one_where_its_owner_sees_it(body: str, content_type: str) -> None:
    assert dict(parse({"url": URL, "body": body}).headers) == {"Content-Type": content_type}


def test_a_given_content_type_is_left_alone() -> None:
    assert parse({"url": URL, "body": "{}", "headers": {"content-type": "x/y"}}).headers == (
        ("content-type", "x/y"),
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_accepted_in_any_case(method: str) -> None:
    assert parse({"url": URL, "method": method.lower()}).method == method


@pytest.mark.parametrize("method", ["", "OPTIONS", "CONNECT", "TRACE", "GET ", "GET\r\n", "ſET", 1, None])
def test_other_methods_are_refused(method: object) -> None:
    error = refusal(method=method)
    assert error.field == "target.method"
    assert "DELETE" in error.problem


@pytest.mark.parametrize("url", [None, 1, b"https://example.com", ["https://example.com"]])
def test_a_url_that_is_not_text_is_refused(url: object) -> None:
    assert refusal(url=url).field == "target.url"


def test_a_bad_url_names_its_field_and_not_its_secrets() -> None:
    error = refusal(url="https://user:canary@example.com/")
    assert error.field == "target.url"
    assert "canary" not in str(error)


def test_a_missing_url_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse({"method": "GET"})
    assert caught.value.field == "target.url"


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    error = refusal(timeout=5)
    assert error.field == "target"
    assert "'timeout'" in error.problem
    assert "method, url, headers, body" in error.problem


@pytest.mark.parametrize(
    "name",
    [
        *sorted(RESERVED_NAMES),
        *(
            "Webhook-Id",
            "webhook-ID",
            "WEBHOOK-SIGNATURE",
            "webhook-anything",
            "Carillon-Run-Id",
            "carillon-x",
        ),
        *("Proxy-Authorization", "proxy-connection", "Host", "Content-LENGTH", "Transfer-Encoding"),
    ],
)
def test_reserved_header_names_are_refused_in_any_case(name: str) -> None:
    assert refusal(headers={name: "x"}).field == f"target.headers.{name}"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\r\nb", "a\x00", "é", "(a)", 'a"', "x" * 129, 1, None])
def test_a_header_name_that_is_no_token_is_refused(name: Any) -> None:
    error = refusal(headers={name: "x"})
    assert error.field == "target.headers"
    assert len(error.problem) < 250
    assert error.problem.isprintable()


@pytest.mark.parametrize(
    "value",
    [
        *("a\r\nX: y", "a\nb", "a\rb", "a\x00b", "a\x1bb", "a\x7fb", "é", "日本", "\ud800"),
        *(" a", "a ", "\ta", 1, None, ["a"]),
    ],
)
def test_a_header_value_that_could_smuggle_or_change_is_refused(value: object) -> None:
    error = refusal(headers={"X-Foo": value})
    assert error.field == "target.headers.X-Foo"


@pytest.mark.parametrize("value", ["", "a", "a b\tc", "~!@#$%^&*()", "x" * MAX_HEADER_VALUE])
def test_a_printable_value_is_accepted(value: str) -> None:
    assert parse({"url": URL, "headers": {"X-Foo": value}}).headers == (("X-Foo", value),)


def test_headers_are_bounded_in_length_number_and_sum() -> None:
    assert refusal(headers={"X-Foo": "x" * (MAX_HEADER_VALUE + 1)}).field == "target.headers.X-Foo"
    assert refusal(headers={f"X-{n}": "x" for n in range(MAX_HEADERS + 1)}).field == "target.headers"
    assert refusal(headers={f"X-{n}": "x" * MAX_HEADER_VALUE for n in range(5)}).field == "target.headers"
    most = {f"X-{n}": "x" for n in range(MAX_HEADERS)}
    assert len(parse({"url": URL, "headers": most}).headers) == MAX_HEADERS


def test_a_header_given_twice_is_refused() -> None:
    assert refusal(headers={"X-Foo": "1", "x-foo": "2"}).field == "target.headers.x-foo"


@pytest.mark.parametrize("headers", ["X: y", [["X", "y"]], 1])
def test_headers_that_are_no_object_are_refused(headers: object) -> None:
    assert refusal(headers=headers).field == "target.headers"


@pytest.mark.parametrize(
    "body",
    [b"x", {"a": 1}, 1, "a\x00b", "\ud800", "x" * (MAX_BODY_BYTES + 1), "é" * (MAX_BODY_BYTES // 2 + 1)],
)
def test_a_body_that_cannot_be_stored_or_sent_as_it_is_is_refused(body: object) -> None:
    assert refusal(body=body).field == "target.body"


def test_the_largest_body_is_accepted() -> None:
    assert parse({"url": URL, "body": "é" * (MAX_BODY_BYTES // 2)}).body is not None


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_body_without_meaning_is_refused(method: str) -> None:
    assert refusal(method=method, body="x").field == "target.body"


def test_an_address_is_judged_at_create_by_the_same_policy() -> None:
    inner = parse({"url": "http://169.254.169.254/latest/meta-data/"})
    with pytest.raises(InvalidInput) as caught:
        check_allowed(inner, PUBLIC_ONLY)
    assert (caught.value.field, caught.value.problem) == ("target.url", REFUSED)
    check_allowed(parse({"url": URL}), PUBLIC_ONLY)
    local = parse({"url": "http://localhost:8080/"})
    check_allowed(local, WITH_LOOPBACK)
    with pytest.raises(InvalidInput):
        check_allowed(local, PUBLIC_ONLY)


def test_a_stored_url_of_bad_form_is_a_problem_not_an_exception() -> None:
    assert url_problem("http://127.1/", WITH_LOOPBACK) is not None
    assert url_problem("http://h:99999/", WITH_LOOPBACK) is not None


def test_the_origin_is_scheme_host_and_port() -> None:
    assert origin_of(parse({"url": "https://Example.com/a?b"})) == "https://example.com:443"


@pytest.mark.parametrize(
    "name",
    [
        *("Authorization", "cookie", "X-Api-Key", "x-apikey", "api_key", "X-Auth-Token", "webhook-signature"),
        *("X-Hub-Signature-256", "client-secret", "X-Password", "AWS-Access-Key-Id", "X-Amz-Security-Token"),
        *(
            "X-Functions-Key",
            "Ocp-Apim-Subscription-Key",
            "Private-Key",
            "X-Session",
            "X-Jwt",
            "X-Bearer",
            "X-Pwd",
        ),
        *("X-Api-Pass", "X-Signing-Key"),
    ],
)
def test_the_value_of_a_secret_header_is_masked(name: str) -> None:
    assert masked(name, "canary") == MASK


@pytest.mark.parametrize(
    "name", ["X-Foo", "content-type", "webhook-id", "carillon-run-id", "traceparent", "user-agent"]
)
def test_other_values_are_shown(name: str) -> None:
    assert masked(name, "value") == "value"


safe_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=50)


@given(
    st.sampled_from(METHODS),
    st.dictionaries(
        st.from_regex(r"x-[a-z0-9]{1,8}", fullmatch=True),
        st.from_regex(r"[!-~]{0,9}", fullmatch=True),
        max_size=5,
    ),
    safe_text,
)
def test_what_is_stored_comes_back(method: str, headers: dict[str, str], body: str) -> None:
    data: dict[str, object] = {"method": method, "url": URL, "headers": headers}
    if method not in ("GET", "HEAD"):
        data["body"] = body
    target = parse(data)
    text = to_json(target)
    assert from_json(text) == target
    assert set(json.loads(text)) == {"method", "url", "headers", "body"}
    assert "\\u0000" not in text


@pytest.mark.parametrize("text", ["", "[]", "{}", "1", '{"method":"GET","url":"x","headers":1,"body":null}'])
def test_what_is_no_stored_target_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_json(text)
