"""Pieces of HTML that cannot be written unescaped by mistake."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is HTML already. Everything else that is put into an element gets escaped."""

    __slots__ = ()


Content = str | float | None
"""What may stand in an element; None stands for nothing."""

VOID = frozenset({"meta", "line", "path", "rect", "circle", "br"})


def tag(element: str, /, *content: Content, **attributes: Content) -> Html:
    """An element. An attribute's underscores become hyphens, one at its end is dropped (`class_`); None leaves it out.

    >>> tag("td", "a < b", class_="n")
    '<td class="n">a &lt; b</td>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in VOID and not content:
        return Html(f"<{element}{told}>" if element in ("meta", "br") else f"<{element}{told}/>")
    return Html(f"<{element}{told}>{join(*content)}</{element}>")


def join(*content: Content) -> Html:
    """Several pieces one after the other, each escaped unless it is HTML."""
    return Html("".join(piece if isinstance(piece, Html) else escape(_text(piece)) for piece in content))


def _text(value: Content) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.2f}".rstrip("0").rstrip(".")
        case _:
            return str(value)
