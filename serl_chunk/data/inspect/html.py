"""An inspection as one HTML page that contains its pictures: plots as PNG files, frames as JPEG files."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from serl_chunk.data.inspect.results import EpisodeInfo, InspectionReport, summary_lines
from serl_chunk.data.source import Source
from serl_chunk.data.validate import cameras_of
from serl_chunk.io import atomic_write, os_reason, plural
from serl_chunk.types import STATE, DataError, Episode, RobotSpec, SparseRows
from serl_chunk.types import Source as Actor
from serl_chunk.viz import plots
from serl_chunk.viz.page import Html, element, facts, figure, note, page, section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANDOM = 2  # episodes drawn at random, in addition to the first, the shortest and the longest ...
NAMED = 3  # ... and those that a finding names, as far as they can be read
MAX_LISTED = 50  # findings on the page
COLUMNS = 4
MAX_PANELS = 48
DENSE = 0.1  # share of steps with a reward from which on it is drawn as a curve
FRAMES = 8  # of each camera and episode on a strip
THUMBNAIL = 144  # pixels, width of a frame on a strip


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
        content.append(section("Overview", figure(draw_overview(findings), alt, caption)))
    return page(f"Episodes of {findings.path}", *content, *episodes)


def _episode(findings: InspectionReport, episode: EpisodeInfo, why: str, content: Episode) -> Html:
    own = [f for f in findings.findings if f.episode == episode.key]
    drawn, left = draw_trajectories(content, findings.spec, [f.tick for f in own if f.tick is not None])
    seconds = f"{episode.length} steps" + ("" if episode.seconds is None else f" ({episode.seconds:.1f} s)")
    about = f"{why}; {seconds}, {episode.outcome}, rewards {episode.reward:g}"
    if episode.task:
        about += f", task {episode.task!r}"
    caption = "State and action over the ticks." + (f" {left} further values are not shown." if left else "")
    alt = f"Line charts of the state and action values of episode {episode.key}"
    parts = [note(about), *(element("p", f.text) for f in own), figure(drawn, alt, caption)]
    for camera, rows in cameras_of(content).items():
        try:
            strip, ticks = draw_strip(rows)
        except DataError as error:
            parts.append(element("p", f"camera {camera}: {error}"))
            continue
        under = element("div", *(element("span", f"tick {tick}") for tick in ticks), class_="ticks")
        parts.append(figure(strip, f"Frames of camera {camera}", f"camera {camera}", under))
    return section(episode.key, *parts)


def draw_overview(findings: InspectionReport) -> bytes:
    """Draw lengths, rewards, and the changes of each action dimension from step to step, as PNG."""
    with plots.new_figure(11, 3.0) as drawing:
        lengths, rewards, changes = drawing.subplots(1, 3)
        _histogram(lengths, [e.length for e in findings.episodes], "steps of an episode", plots.BLUE)
        _histogram(rewards, [e.reward for e in findings.episodes], "sum of an episode's rewards", plots.GREEN)
        _changes(changes, findings.changes)
        return plots.to_png(drawing)


def draw_trajectories(episode: Episode, spec: RobotSpec | None, marks: Sequence[int]) -> tuple[bytes, int]:
    """Draw state and action of one episode over its ticks, with `marks` at the ticks that a finding names.

    Returns a PNG file, and how many values found no place.
    """
    steps = episode.steps
    state, action, ticks = steps.observation[STATE], steps.action, np.arange(steps.n)
    dimensions = state.shape[1], action.shape[1]
    panels = value_panels(*dimensions, joints_of(spec, *dimensions))
    shown = panels[:MAX_PANELS]
    rewarded = np.flatnonzero(steps.reward)
    dense = len(rewarded) > max(1, DENSE * steps.n)
    n = len(shown) + dense
    rows = math.ceil(n / COLUMNS)
    human = true_runs(steps.source == Actor.HUMAN)
    with plots.new_figure(11, 1.35 * rows + 0.75) as drawing:
        axes = list(drawing.subplots(rows, COLUMNS, squeeze=False, sharex=True).flat)
        for ax, (title, i, j) in zip(axes, shown, strict=False):
            if i is not None:
                ax.plot(ticks, state[:, i], color=plots.BLUE)
            if j is not None:
                ax.plot(ticks, action[:, j], "--", color=plots.VERMILLION)
            ax.set_title(title, fontsize=8, pad=4)
        if dense:
            axes[len(shown)].plot(ticks, steps.reward, color=plots.GREEN)
            axes[len(shown)].set_title("reward", fontsize=8, pad=4)
        for ax in axes[n:]:
            ax.remove()
        for i, ax in enumerate(axes[:n]):
            for first, past in human:
                ax.axvspan(first, past, color=plots.PURPLE, alpha=0.2, lw=0)
            for tick in [] if dense else rewarded.tolist():
                ax.axvline(tick, color=plots.GREEN, lw=1.2, ls=":")
            for tick in marks:
                ax.axvline(tick, color=plots.INK, lw=1.0, ls="-.", zorder=0.5)  # beneath what it points at
            ax.margins(x=0.01)
            ax.tick_params(labelsize=7, length=2)
            ax.locator_params(nbins=4, min_n_ticks=2)
            _widen(ax)
            if i + COLUMNS >= n:  # nothing below it
                ax.tick_params(labelbottom=True)
                ax.set_xlabel("tick", fontsize=7, labelpad=1)
        entries = [("state", plots.BLUE, "-"), ("action", plots.VERMILLION, "--")]
        entries += [("a human acts", plots.PURPLE, "area")] * bool(human)
        entries += [("reward", plots.GREEN, ":")] * bool(len(rewarded) and not dense)
        entries += [("see the findings", plots.INK, "-.")] * bool(marks)
        plots.legend_above(drawing, entries)
        return plots.to_png(drawing), len(panels) - len(shown)


def draw_strip(rows: SparseRows) -> tuple[bytes, list[int]]:
    """Draw up to `FRAMES` frames of one camera side by side; returns a JPEG file, and the frames' ticks."""
    from PIL import Image

    chosen = np.unique(np.linspace(0, len(rows.index) - 1, FRAMES).round().astype(int))
    frames = [Image.fromarray(np.asarray(rows.values[int(i)])) for i in chosen]
    height = max(1, round(THUMBNAIL * frames[0].height / frames[0].width))
    strip = Image.new("RGB", (THUMBNAIL * FRAMES, height), "white")
    for k, frame in enumerate(frames):
        strip.paste(frame.resize((THUMBNAIL - 2, height), Image.Resampling.LANCZOS), (k * THUMBNAIL, 0))
    buffer = io.BytesIO()
    strip.save(buffer, "JPEG", quality=88)
    return buffer.getvalue(), [int(rows.index[i]) for i in chosen]


def joints_of(spec: RobotSpec | None, s: int, a: int) -> Sequence[int] | None:
    """Return the state value that each of `a` actions commands, by a specification of these dimensions."""
    return spec.joint_of_action if spec is not None and (spec.state_dim, spec.action_dim) == (s, a) else None


def value_panels(s: int, a: int, joints: Sequence[int] | None) -> list[tuple[str, int | None, int | None]]:
    """List actions over the joints they command, then the other state values: title, state value and action value.

    `joints`: the state value of each action, -1 for none; None where they are unknown.
    """
    if joints is None:
        joints = range(a) if s == a else [-1] * a
    panels: list[tuple[str, int | None, int | None]] = []
    for j, joint in enumerate(joints):
        both = f"state and action {j}" if joint == j else f"state {joint}, action {j}"
        panels.append((f"action {j}", None, j) if joint < 0 else (both, joint, j))
    return panels + [(f"state {i}", i, None) for i in range(s) if i not in joints]


def _histogram(ax: Axes, values: Sequence[float], label: str, colour: str) -> None:
    different, counts = np.unique(values, return_counts=True)
    if len(different) <= 12:  # a bar for each, not bins between them
        ax.bar(range(len(different)), counts, color=colour, width=0.7 if len(different) > 1 else 0.25)
        ax.set_xticks(range(len(different)), [f"{v:.4g}" for v in different], rotation=45 if len(different) > 6 else 0)
        ax.set_xlim(-0.6, len(different) - 0.4)
        ax.grid(visible=False, axis="x")
    else:
        ax.hist(values, bins=min(40, 2 * math.ceil(math.sqrt(len(values)))), color=colour)
    ax.set_xlabel(label)
    ax.set_ylabel("episodes")
    plots.whole_numbers(ax.yaxis, 5)


def _changes(ax: Axes, changes: np.ndarray | None) -> None:
    if changes is None or not (changes[3] > 0).any():
        plots.draw_no_data(ax, "the actions never change" if changes is not None else "no two steps to compare")
        return
    at = np.arange(changes.shape[1])
    labels, colours = ("median", "90 %", "99 %", "largest"), (plots.BLUE, plots.GREEN, plots.PURPLE, plots.VERMILLION)
    for values, label, marker, colour in zip(changes, labels, "os^x", colours, strict=True):
        moving = values > 0  # a logarithm has no place for those that stand still
        ax.plot(at[moving], values[moving], marker, color=colour, ms=4, label=label)
    ax.set_yscale("log")
    ax.set_xlim(-0.6, len(at) - 0.4)
    ax.set_xlabel("action dimension")
    ax.set_ylabel("change from step to step")
    plots.whole_numbers(ax.xaxis, 8)
    ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1.0), columnspacing=0.8, handletextpad=0.2)


def _widen(ax: Axes) -> None:
    """Draw a value that hardly moves as a line, not as its own rounding."""
    low, high = ax.get_ylim()
    least = 1e-3 * max(1.0, abs(low), abs(high))
    if high - low < least:
        ax.set_ylim((low + high) / 2 - least, (low + high) / 2 + least)


def true_runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, past-last) of each run of True in bool[T]."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
