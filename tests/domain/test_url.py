"""A URL has one normal spelling, or is refused with a sentence that helps and repeats no secret."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.url import MAX_URL, normal_host, parse_url


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("https://example.com", "https://example.com/"),
        ("HTTPS://Example.COM/Path", "https://example.com/Path"),
        ("http://example.com:80/a", "http://example.com/a"),
        ("http://example.com:0080/a", "http://example.com/a"),
        ("https://example.com:80/a", "https://example.com:80/a"),
        ("https://example.com:8443?a=1", "https://example.com:8443/?a=1"),
        ("https://example.com./", "https://example.com/"),
        ("https://münchen.de/straße?q=ü", "https://xn--mnchen-3ya.de/stra%C3%9Fe?q=%C3%BC"),
        ("https://ＥＸＡＭＰＬＥ。com/", "https://example.com/"),
        ("https://faß.de/", "https://xn--fa-hia.de/"),
        ("https://my_service.example/", "https://my_service.example/"),
        ("https://example.com/a/../b//c;d", "https://example.com/a/../b//c;d"),
        ("https://example.com/?a[]=1&b={x}|y", "https://example.com/?a[]=1&b=%7Bx%7D%7Cy"),
        ("https://example.com/%2f%2F?x=%41", "https://example.com/%2f%2F?x=%41"),
        ("https://example.com/a?b?c/d", "https://example.com/a?b?c/d"),
        ("https://1.1.1.1/", "https://1.1.1.1/"),
        ("https://[2606:4700:0::1111]:8443/", "https://[2606:4700::1111]:8443/"),
        ("https://[::FFFF:1.1.1.1]/", "https://[::ffff:101:101]/"),
        ("http://１２７.0.0.1/", "http://127.0.0.1/"),
    ],
)
def test_a_url_is_read_into_its_normal_spelling(written: str, normal: str) -> None:
    assert str(parse_url(written)) == normal
    assert str(parse_url(normal)) == normal


@pytest.mark.parametrize(
    ("written", "about"),
    [
        ("", "absolute"),
        ("example.com/hook", "absolute"),
        ("//example.com/hook", "absolute"),
        ("https:/example.com", "absolute"),
        ("https:example.com", "absolute"),
        ("ftp://example.com/", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("javascript://example.com/", "scheme"),
        ("https://", "no host"),
        ("https:///path", "no host"),
        ("https://:443/", "no host"),
        ("https://?q", "no host"),
        ("https://user@example.com/", "user name"),
        ("https://user:canary@example.com/", "user name"),
        ("https://example.com@10.0.0.1/", "user name"),
        ("https://example.com/#part", "fragment"),
        ("https://example.com/a b", "space"),
        (" https://example.com/", "space"),
        ("https://example.com/\r\nX: y", "control"),
        ("https://example.com/\x00", "control"),
        ("https://example.com/\x7f", "control"),
        ("https://example.com\\@10.0.0.1/", "backslash"),
        ("https://example.com/\ud800", "surrogate"),
        ("https://example.com:0/", "port"),
        ("https://example.com:65536/", "port"),
        ("https://example.com:-1/", "port"),
        ("https://example.com:/", "port"),
        ("https://example.com:8o/", "port"),
        ("https://example.com:８０/", "port"),
        ("https://example.com:80:80/", "port"),
        ("https://[::1]:x/", "port"),
        ("https://[::1/", "brackets"),
        ("https://[::1]x/", "brackets"),
        ("https://[fe80::1%25eth0]/", "zone"),
        ("https://[::1%lo]/", "zone"),
        ("https://[::1%25%0d%0aX:1]/", "zone"),
        ("https://[not:an:address]/", "IPv6"),
        ("https://[1.1.1.1]/", "IPv6"),
        ("https://2130706433/", "four decimal"),
        ("https://127.1/", "four decimal"),
        ("https://127.0.1/", "four decimal"),
        ("https://0x7f.1/", "four decimal"),
        ("https://0x7f000001/", "four decimal"),
        ("https://0177.0.0.1/", "four decimal"),
        ("https://127.0.0.01/", "four decimal"),
        ("https://0/", "four decimal"),
        ("https://256.1.1.1/", "four decimal"),
        ("https://1.1.1.1.1/", "four decimal"),
        ("https://example.0x/", "four decimal"),
        ("https://ex%61mple.com/", "domain name"),
        ("https://exa mple.com/", "space"),
        ("https://-bad.example/", "domain name"),
        ("https://bad-.example/", "domain name"),
        ("https://a..b/", "domain name"),
        ("https://example.com../", "domain name"),
        (f"https://{'a' * 64}.example/", "domain name"),
        (f"https://{'a.' * 130}example/", "domain name"),
        ("https://exam\u202eple.com/", "internationalised"),
        ("https://\u00ad.com/", "internationalised"),
        ("https://example.com/100%", "%25"),
        ("https://example.com/?q=%zz", "%25"),
        ("https://example.com/" + "a" * MAX_URL, "longer"),
        ("https://example.com/" + "é" * (MAX_URL // 3), "longer"),
    ],
)
def test_what_is_not_a_usable_url_is_refused_and_told_why(written: str, about: str) -> None:
    with pytest.raises(ValueError, match=about) as refusal:
        parse_url(written)
    assert "canary" not in str(refusal.value)


def test_the_longest_url_is_accepted() -> None:
    url = "https://example.com/" + "a" * (MAX_URL - len("https://example.com/"))
    assert str(parse_url(url)) == url


def test_the_origin_always_names_the_port() -> None:
    assert parse_url("https://Example.com/a").origin == "https://example.com:443"
    assert parse_url("http://[::1]:8080/").origin == "http://[::1]:8080"


@given(st.text(max_size=60))
def test_every_text_is_a_url_or_a_sentence(text: str) -> None:
    for written in (text, f"https://{text}/", f"https://example.com/{text}"):
        try:
            url = parse_url(written)
        except ValueError:
            continue
        normal = str(url)
        assert normal.isascii()
        assert parse_url(normal) == url
        # An independent reader sees the same host and port.
        parts = urlsplit(normal)
        assert (parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]) == (
            url.host,
            url.port,
        )
        assert not any(character.isspace() for character in normal)


@given(st.text(alphabet="0123456789abcdefxX.。１0-_:[]%@", max_size=20))
def test_a_host_of_digits_and_dots_is_a_canonical_address_or_refused(text: str) -> None:
    try:
        host = normal_host(text)
    except ValueError:
        return
    assert host.isascii()
    assert normal_host(host) == host
    if host.rsplit(".", 1)[-1].isdigit():
        assert [str(int(part)) for part in host.split(".")] == host.split(".")
        assert len(host.split(".")) == 4
