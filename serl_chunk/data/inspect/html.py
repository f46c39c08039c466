"""An inspection as one HTML page that contains its pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from serl_chunk.data.inspect import plots
from serl_chunk.data.inspect.results import EpisodeInfo, InspectionReport, summary_lines
from serl_chunk.data.source import Source
from serl_chunk.data.validate import cameras_of
from serl_chunk.io import atomic_write, os_reason, plural
from serl_chunk.types import DataError, Episode
from serl_chunk.viz.page import Html, element, facts, figure, note, page, section

RANDOM = 2  # episodes drawn at random, in addition to the first, the shortest and the longest ...
NAMED = 3  # ... and those that a finding names, as far as they can be read
MAX_LISTED = 50  # findings on the page


def write_page(
    path: Path,
    source: Source,
    findings: InspectionReport,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the page to `path`, whole or not at all: facts, findings, overview, and a few episodes, read again.

    `seed` chooses the random ones; `progress` is called with (episodes drawn, to draw). Raises DataError where an
    episode cannot be read any more, or the page cannot be written.
    """
    picked = pick(findings, seed)
    sections = []
    for done, (why, episode) in enumerate(picked, 1):
        sections.append(_episode(findings, episode, why, source.read(episode.key)))
        progress(done, len(picked))
    try:
        atomic_write(path, _render(findings, sections))
    except OSError as error:
        raise DataError(f"{path}: cannot write the page: {os_reason(error)}") from error


def pick(findings: InspectionReport, seed: int) -> list[tuple[str, EpisodeInfo]]:
    """Choose the episodes to draw, each once, with why: first, shortest, longest, some with findings, some random."""
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


def _render(findings: InspectionReport, episodes: Sequence[Html]) -> str:
    listed = [
        element("li", element("strong", f"{f.severity} ({f.kind})", class_=f.severity), " ", f.text)
        for f in findings.findings[:MAX_LISTED]
    ]
    if len(findings.findings) > MAX_LISTED:
        listed.append(element("li", f"and {len(findings.findings) - MAX_LISTED} more"))
    summary = f"{plural(len(findings.faults), 'fault')}, {plural(len(findings.remarks), 'remark')}"
    content = [
        facts(summary_lines(findings)),
        *map(note, findings.notes),
        section(f"Findings: {summary}", element("ul", *listed) if listed else note("Nothing was found.")),
    ]
    if findings.episodes:
        alt = "Histograms of the episodes' lengths and of the sums of their rewards, and the changes of each action."
        caption = (
            "Changes: how far each action dimension moves from one step to the next; median, 90 %, 99 % and the "
            "largest of all steps, on a logarithmic scale. A largest change far above the 99 % is a jump."
        )
        content.append(section("Overview", figure(plots.draw_overview(findings), alt, caption)))
    return page(f"Episodes of {findings.path}", *content, *episodes)


def _episode(findings: InspectionReport, episode: EpisodeInfo, why: str, content: Episode) -> Html:
    own = [f for f in findings.findings if f.episode == episode.key]
    drawn, left = plots.draw_trajectories(content, findings.spec, [f.tick for f in own if f.tick is not None])
    seconds = f"{episode.length} steps" + ("" if episode.seconds is None else f" ({episode.seconds:.1f} s)")
    about = f"{why}; {seconds}, {episode.outcome}, rewards {episode.reward:g}"
    if episode.task:
        about += f", task {episode.task!r}"
    caption = "State and action over the ticks." + (f" {left} further values are not shown." if left else "")
    alt = f"Line charts of the state and action values of episode {episode.key}"
    parts = [note(about), *(element("p", f.text) for f in own), figure(drawn, alt, caption)]
    for camera, rows in cameras_of(content).items():
        try:
            strip, ticks = plots.draw_strip(rows)
        except DataError as error:
            parts.append(element("p", f"camera {camera}: {error}"))
            continue
        under = element("div", *(element("span", f"tick {tick}") for tick in ticks), class_="ticks")
        parts.append(figure(strip, f"Frames of camera {camera}", f"camera {camera}", under))
    return section(episode.key, *parts)
