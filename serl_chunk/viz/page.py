"""HTML pages that open from disk: no script, no network, images embedded. Every text is escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence


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
        "head", element("meta", charset="utf-8"), viewport, element("title", title), element("style", Html(_CSS))
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


def figure(picture: bytes, alt: str, caption: object, under: Html | None = None) -> Html:
    """Build a figure of an embedded SVG, PNG or JPEG file; `under` stands directly below it."""
    kind = {b"\x89P": "png", b"\xff\xd8": "jpeg"}.get(picture[:2], "svg+xml")
    source = f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    image = element("img", src=source, alt=alt, class_=None if kind == "svg+xml" else "paper")
    return element("figure", element("div", image, under or Html(), class_="wide"), element("figcaption", caption))


def film(source: str, caption: object) -> Html:
    """Build a player for the mp4 file at `source`, an address relative to the page."""
    video = element("video", src=source, controls=True, loop=True, muted=True, preload="metadata", width=480)
    return element("figure", video, element("figcaption", caption))


_VOID = ("meta", "img")
_CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --line: #d0d7de;
  --bad: #b3261e; --warn: #8a5a00; --human: #d55e00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a2abb6; --paper: #14171c; --line: #363c45; --bad: #ff8a80; --warn: #e3b341; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h1, h2, dd, li, td, .note { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: .8rem 1.5rem; margin: 0; }
dt, figcaption, .note { color: var(--soft); font-size: .87rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
dl > .large { grid-column: span 2; }
.large dd { font-size: 1.3rem; font-weight: 600; }
p { margin: .3rem 0; }
ul { padding-left: 1.2rem; margin: .3rem 0; }
.fault { color: var(--bad); }
.remark { color: var(--warn); }
figure { margin: .8rem 0; }
.wide { overflow-x: auto; }
img { width: 100%; min-width: 760px; height: auto; display: block; }
img.paper { background: #fff; border-radius: 4px; }
.ticks { display: grid; grid-template-columns: repeat(8, 1fr); min-width: 760px; color: var(--soft); font-size: .8rem; }
.films { display: flex; flex-wrap: wrap; gap: 0 1.2rem; }
video { max-width: 100%; background: #000; display: block; }
.human { border: 3px solid var(--human); padding: 0 .3rem; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child { white-space: nowrap; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: .87rem; }
a { color: inherit; }
"""
