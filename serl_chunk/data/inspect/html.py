"""An inspection as one HTML page that needs nothing but itself: no script, no link, no file beside it."""

from __future__ import annotations

import base64
import html
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from serl_chunk.data.inspect import plots as plots
from serl_chunk.data.inspect.results import EpisodeInfo, InspectionReport
from serl_chunk.data.inspect.summary import summary_lines
from serl_chunk.data.source import Source
from serl_chunk.data.validate import plural
from serl_chunk.types import IMAGE_PREFIX, DataError, Episode

RANDOM = 2  # episodes drawn at random, beside the first, the shortest and the longest ...
NAMED = 3  # ... and those that a finding names, as far as they can be read
MAX_LISTED = 50  # findings on the page


def write_page(
    path: Path,
    source: Source,
    findings: InspectionReport,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the page to `path`, whole or not at all: facts, findings, overview, and a few episodes of `source`.

    Reads these episodes again. `seed` draws the random ones; `progress` is called with (episodes drawn, to draw).
    Raises DataError where an episode cannot be read any more, or the page not be written.
    """
    picked = pick(findings, seed)
    sections = []
    for done, (why, episode) in enumerate(picked, 1):
        sections.append(_episode(findings, episode, why, source.read(episode.key)))
        if progress is not None:
            progress(done, len(picked))
    content = _render(findings, sections)
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        try:
            part.write_text(content, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot write the page: {error}") from error


def pick(findings: InspectionReport, seed: int) -> list[tuple[str, EpisodeInfo]]:
    """The episodes to draw, each once, with why: the first, shortest, longest, some with findings, some at random."""
    episodes = findings.episodes
    if not episodes:
        return []
    numbers = range(len(episodes))
    why: dict[int, list[str]] = {0: ["the first"]}
    why.setdefault(min(numbers, key=lambda i: episodes[i].length), []).append("the shortest")
    why.setdefault(max(numbers, key=lambda i: episodes[i].length), []).append("the longest")
    ticks = {f.episode for f in findings.findings if f.tick is not None}  # there is something to see in these
    for i in [i for i in numbers if episodes[i].key in ticks][:NAMED]:
        why.setdefault(i, []).append("named in a finding")
    rest = [i for i in numbers if i not in why]
    for i in np.random.default_rng(seed).permutation(rest)[:RANDOM]:
        why[int(i)] = ["drawn at random"]
    return [(", ".join(reasons), episodes[i]) for i, reasons in why.items()]


def _render(findings: InspectionReport, episodes: Sequence[str]) -> str:
    title = f"Episodes of {findings.path}"
    rows = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in summary_lines(findings)
    )
    notes = "".join(f'<p class="soft">{_text(note)}</p>' for note in findings.notes)
    summary = f"{plural(len(findings.faults), 'fault')}, {plural(len(findings.remarks), 'remark')}"
    listed = "".join(
        f'<li><strong class="{f.severity}">{f.severity} ({_text(f.kind)})</strong> {_text(f.text)}</li>'
        for f in findings.findings[:MAX_LISTED]
    )
    if len(findings.findings) > MAX_LISTED:
        listed += f"<li>and {len(findings.findings) - MAX_LISTED} more</li>"
    overview = ""
    if findings.episodes:
        alt = "Histograms of the episodes' lengths and of the sums of their rewards, and the changes of each action."
        caption = (
            "Changes: how far each action dimension moves from one step to the next; median, 90 %, 99 % and the "
            "largest of all steps, on a logarithmic scale. A largest change far above the 99 % is a jump."
        )
        overview = f"<section><h2>Overview</h2>{_figure('png', plots.draw_overview(findings), alt, caption)}</section>"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>",
            f"<h1>{_text(title)}</h1>",
            f"<dl>{rows}</dl>{notes}",
            f"<section><h2>Findings: {summary}</h2>",
            f"<ul>{listed}</ul></section>" if listed else '<p class="soft">Nothing was found.</p></section>',
            overview,
            *episodes,
            "</main>\n</body>\n</html>\n",
        ]
    )


def _episode(findings: InspectionReport, episode: EpisodeInfo, why: str, content: Episode) -> str:
    own = [f for f in findings.findings if f.episode == episode.key]
    drawn, left = plots.draw_trajectories(content, findings.spec, [f.tick for f in own if f.tick is not None])
    seconds = f"{episode.length} steps" + ("" if episode.seconds is None else f" ({episode.seconds:.1f} s)")
    about = f"{why}; {seconds}, {episode.outcome}, rewards {episode.reward:g}"
    if episode.task:
        about += f", task {episode.task!r}"
    caption = "State and action over the ticks." + (f" {left} further values are not shown." if left else "")
    alt = f"Line charts of the state and action values of episode {episode.key}"
    parts = [
        f'<section>\n<h2>{_text(episode.key)}</h2>\n<p class="soft">{_text(about)}</p>',
        *(f'<p class="note">{_text(f.text)}</p>' for f in own),
        _figure("png", drawn, alt, caption),
    ]
    for key, rows in sorted(content.steps.sparse.items()):
        if key.startswith(IMAGE_PREFIX) and len(rows.index):
            name = key.removeprefix(IMAGE_PREFIX)
            try:
                strip, ticks = plots.draw_strip(rows)
            except DataError as error:
                parts.append(f'<p class="note">camera {_text(name)}: {_text(str(error))}</p>')
                continue
            under = "".join(f"<span>tick {tick}</span>" for tick in ticks)
            parts.append(
                f'<figure><div class="wide"><img src="{_uri("jpeg", strip)}" alt="{_text(f"Frames of camera {name}")}">'
                f'<div class="ticks">{under}</div></div><figcaption>camera {_text(name)}</figcaption></figure>'
            )
    return "\n".join([*parts, "</section>"])


def _figure(kind: str, picture: bytes, alt: str, caption: str) -> str:
    return (
        f'<figure><div class="wide"><img src="{_uri(kind, picture)}" alt="{_text(alt)}"></div>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _uri(kind: str, picture: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def _text(value: str) -> str:
    return html.escape(value, quote=True)


_CSS = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #fff; color: #1b1f24; font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1160px; margin: 0 auto; padding: 1.5rem; }}
h1 {{ font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #d0d7de; overflow-wrap: anywhere; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: .8rem 1.5rem; margin: 0; }}
dt, figcaption, .soft {{ color: #57606a; font-size: .87rem; }}
dd {{ margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
p {{ margin: .3rem 0; }}
ul {{ padding-left: 1.2rem; margin: .3rem 0; }}
li, .note {{ overflow-wrap: anywhere; }}
.fault {{ color: #b3261e; }}
.remark {{ color: #8a5a00; }}
figure {{ margin: .8rem 0; }}
.wide {{ overflow-x: auto; }}
img {{ width: 100%; min-width: 760px; height: auto; display: block; }}
.ticks {{ display: grid; grid-template-columns: repeat({plots.FRAMES}, 1fr); min-width: 760px; }}
.ticks span {{ color: #57606a; font-size: .8rem; }}
"""
