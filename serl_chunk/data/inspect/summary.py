"""The summary of an inspection as short texts, for a screen and for a page."""

from __future__ import annotations

from serl_chunk.data.inspect.results import Dimension, InspectionReport
from serl_chunk.io import format_duration, plural
from serl_chunk.types import Outcome


def summary_lines(findings: InspectionReport) -> list[tuple[str, str]]:
    """Return name and text of each fact, in reading order."""
    if not findings.episodes:
        return [("episodes", f"none could be read, of {findings.looked_at}")]
    out = [("episodes", _episodes(findings))]
    out.append(("steps", f"{findings.steps:,}; an episode {_spread([e.length for e in findings.episodes])}"))
    out.append(("rate", _rate(findings)))
    for name, dims in (("state", findings.state), ("action", findings.action)):
        out.append((name, _dims(dims)))
    for name, cameras in findings.cameras().items():
        sizes = ", ".join(f"{w}x{h}" for h, w in sorted({(c.height, c.width) for c in cameras}))
        per_step = sum(c.frames for c in cameras) / max(
            1, sum(e.length for e in findings.episodes if name in e.cameras)
        )
        pairs, same = sum(c.pairs for c in cameras), sum(c.identical for c in cameras)
        text = f"{sizes} pixels, " + ("a frame every step" if per_step == 1 else f"{per_step:.3g} frames a step")
        out.append((f"camera {name}", text + (f"; {same} of {pairs} pairs of frames identical" if pairs else "")))
    if not findings.cameras():
        out.append(("cameras", "none"))
    out.append(("tasks", _tasks(findings)))
    outcomes = ", ".join(f"{findings.count(o)} {o}" for o in Outcome if findings.count(o))
    terminated = sum(e.terminated for e in findings.episodes)
    out.append(("outcomes", f"{outcomes}; {terminated} terminated, {len(findings.episodes) - terminated} truncated"))
    rewards, rewarded = [e.reward for e in findings.episodes], sum(bool(e.rewarded) for e in findings.episodes)
    out.append(("rewards", f"sum of an episode {_spread(rewards)}; {rewarded:,} with a reward"))
    shares = ", ".join(f"{name.lower()} {share:.1%}" for name, share in findings.shares.items())
    segments = sum(e.segments for e in findings.episodes)
    out.append(("who acted", shares + (f"; {plural(segments, 'intervention')}" if segments else "")))
    return out


def _episodes(findings: InspectionReport) -> str:
    unread = findings.looked_at - len(findings.episodes)
    out = f"{len(findings.episodes):,}" + (f", and {unread:,} that cannot be read" if unread else "")
    if findings.looked_at < findings.available:
        out += f" (the first of {findings.available:,})"
    seconds = sum(e.seconds or 0 for e in findings.episodes)
    return out + (f", {format_duration(seconds)} in all" if seconds else "")


def _rate(findings: InspectionReport) -> str:
    measured, declared = findings.measured_hz, findings.declared_hz
    by_stamps = f"{measured:.4g} Hz by the time stamps" if measured else "no time stamps"
    return f"{by_stamps}, " + (f"{declared:.4g} Hz declared" if declared else "none declared")


def _dims(dims: tuple[Dimension, ...]) -> str:
    if not dims:
        return "none"
    low, high = min(d.low for d in dims), max(d.high for d in dims)
    switches = [j for j, d in enumerate(dims) if d.distinct is not None and not d.constant]
    few = f"; few different values in {', '.join(map(str, switches))}" if switches else ""
    return f"{plural(len(dims), 'value')} from {low:.4g} to {high:.4g}{few}"


def _tasks(findings: InspectionReport) -> str:
    tasks = findings.tasks()
    shown = [f"{text!r} ({n})" if text else f"no text ({n})" for text, n in list(tasks.items())[:4]]
    return ", ".join(shown) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")


def _spread(values: Sequence[float]) -> str:
    low, median, high = (f"{v:,.0f}" if v == int(v) else f"{v:.4g}" for v in (spread(values) or {}).values())
    return f"{low} to {high}, median {median}" if low != high else low
