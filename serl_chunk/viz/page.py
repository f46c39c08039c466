"""HTML pages that open from disk: no script, no network, images embedded. Every text is escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

STYLE = Path(__file__).with_suffix(".css")
_VOID = ("meta", "img")


class Html(str):
    """Markup. Any other string is text, and is escaped."""


def element(tag: str, *content: object, **attributes: object) -> Html:
    """Build one element. Content that is not `Html` is text.

    Attributes are named `class_` for `class`; True has no value, None and False are left out.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    written = "".join(
        f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
        for name, value in named.items()
        if value is not None and value is not False
    )
    inner = "" if tag in _VOID else join(content) + f"</{tag}>"
    return Html(f"<{tag}{written}>{inner}")


def join(content: Iterable[object]) -> Html:
    """Concatenate markup and text."""
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part)) for part in content))


def page(title: str, *content: Html) -> str:
    """Build a whole document with the one style sheet of the project, for light and dark screens."""
    viewport = element("meta", name="viewport", content="width=device-width, initial-scale=1")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        viewport,
        element("title", title),
        element("style", Html(STYLE.read_text())),
    )
    body = element("body", element("main", element("h1", title), *content))
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def section(title: str, *content: Html, key: str | None = None) -> Html:
    """Build a section with a heading; `key` is its id."""
    return join([Html("\n"), element("section", element("h2", title), *content, id=key)])


def facts(rows: Iterable[tuple[str, object]], *, large: int = 0) -> Html:
    """Build a list of names and values; the first `large` values are printed in large type."""
    rows_ = [
        element("div", element("dt", name), element("dd", value), class_="large" if i < large else None)
        for i, (name, value) in enumerate(rows)
    ]
    return element("dl", *rows_)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], missing: str = "") -> Html:
    """Build a table, or the sentence `missing` where there is no row."""
    body = [element("tr", *(element("td", cell) for cell in row), Html("\n")) for row in rows]
    if not body:
        return note(missing)
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in columns)))
    return element("div", element("table", head, element("tbody", *body)), class_="wide")


def fold(summary: str, *content: Html) -> Html:
    """Build content that is hidden until the reader clicks on `summary`."""
    return element("details", element("summary", summary), *content)


def note(text: object) -> Html:
    """Build a paragraph in small type."""
    return element("p", text, class_="note")


def figure(picture: bytes, alt: str, caption: object) -> Html:
    """Build a figure of an embedded SVG, PNG or JPEG file."""
    kind = {b"\x89P": "png", b"\xff\xd8": "jpeg"}.get(picture[:2], "svg+xml")
    source = f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    image = element("img", src=source, alt=alt, class_=None if kind == "svg+xml" else "paper")
    return element("figure", element("div", image, class_="wide"), element("figcaption", caption))


def film(source: str, caption: object) -> Html:
    """Build a player for the mp4 file at `source`, an address relative to the page."""
    video = element("video", src=source, controls=True, loop=True, muted=True, preload="metadata", width=480)
    return element("figure", video, element("figcaption", caption))
