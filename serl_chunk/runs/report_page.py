"""The report as one HTML page that needs nothing but itself: no script, no link, no file beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import NamedTuple

from serl_chunk.runs import report_panels as panels
from serl_chunk.runs.metric_rows import RunMetrics
from serl_chunk.runs.report_plots import draw_figure
from serl_chunk.runs.report_style import WINDOW

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # column names, rows
_OF_HUMANS = (
    " A success without intervention is the policy's own; its share is of all episodes, also of those that a human "
    "saved: what counts are evaluations, without interventions."
)


class Figure(NamedTuple):
    """One figure of the page. `svg` is None where the run has nothing to show yet; `missing` then says so."""

    key: str  # its HTML id
    title: str
    alt: str
    caption: str
    svg: str | None
    missing: str


class Page(NamedTuple):
    """What a report says, as text."""

    title: str
    facts: Sequence[tuple[str, str]]  # the headline: name and value
    notes: Sequence[str]  # what a reader should know about the record itself
    figures: Sequence[Figure]
    evaluations: Table
    configuration: Table
    events: Table


def figures(metrics: RunMetrics, limits: tuple[float, float] | None = None) -> list[Figure]:
    """Every figure of the page, in reading order; `limits`: the range of a bounded critic."""
    last = metrics.last() or {"env_steps": 0, "human_ticks": 0}
    axes = panels.axes_of(metrics)
    names = ["wall time" if key == "wall" else f"{last[key]:,} {name}" for key, name in axes]
    span = f"over {' and '.join([', '.join(names[:-1]), names[-1]] if names[:-1] else names)}"
    episodes, rolling = f"{len(metrics['episode'])} episodes", f"mean of the last {WINDOW} episodes"
    no_episode = "No episode has finished in this run yet."
    no_training = "No training step has been logged in this run yet."
    losses = panels.loss_keys(metrics)
    intervened = panels.has_changed(metrics, "human_ticks")
    return [
        Figure(
            key="success",
            title="Success rate",
            alt=f"Line charts of the success rate of {episodes}, over critic updates and {span}: with or "
            "without intervention, without intervention, and evaluations with their 95 % intervals.",
            caption=f"Lines: {rolling}. Grey: before training on online steps.{_OF_HUMANS if intervened else ''}",
            svg=draw_figure(
                metrics, [panels.panel_over(panels.draw_success, axis) for axis in (panels.UPDATES, *axes)]
            ),
            missing=no_episode,
        ),
        Figure(
            key="return",
            title="Return",
            alt=f"Charts of the undiscounted return of {episodes}, {span}: a dot an episode and the {rolling}.",
            caption=f"Sum of an episode's rewards, and the {rolling}.",
            svg=draw_figure(metrics, [panels.panel_over(panels.draw_return, axis) for axis in axes]),
            missing=no_episode,
        ),
        Figure(
            key="intervention",
            title="Intervention share",
            alt=f"Line charts of the share of human steps and of episodes with an intervention, {span}.",
            caption=f"Steps on which a human had the robot, idle ones included, and episodes with an intervention; "
            f"{rolling}. Both should fall as the policy learns.",
            svg=draw_figure(
                metrics, [panels.panel_over(panels.draw_intervention, axis) for axis in axes] if intervened else []
            ),
            missing="No human has acted in this run." if metrics["episode"] else no_episode,
        ),
        Figure(
            key="q-return",
            title="Q against realised return",
            alt="Scatter of the critic's value at decisions against the discounted return realised from there, with "
            "the mean return per value bin with its 95 % interval, the line of equality and the range of a bounded "
            "critic; beside it both means over environment steps, and the values and targets in training batches over "
            "wall time.",
            caption=f"Left: decisions of the last {panels.CALIBRATION_EPISODES} episodes. The critic is calibrated "
            "where the squares' intervals, of a tenth of the decisions each, reach the dashed line; below it are "
            "states it thought better than they proved. Intervals count episodes, not decisions. Where a human "
            "intervened, the return is not the policy's own, and the squares leave it out as long as there are others.",
            svg=draw_figure(metrics, [panels.calibration_panel(limits), panels.draw_q_trend, panels.draw_q_train]),
            missing="No value of the critic has been recorded in this run yet.",
        ),
        Figure(
            key="losses",
            title="Losses",
            alt=f"Line charts of {', '.join(losses) or 'the losses'} over wall time.",
            caption="On a logarithmic scale where every value is positive and the largest ten times the smallest.",
            svg=draw_figure(metrics, [panels.loss_panel(key) for key in losses]),
            missing=no_training,
        ),
        Figure(
            key="rates",
            title="Rates and waits",
            alt="Four line charts over wall time: updates and environment steps per second, the share of time the "
            "learner and the actors waited, the mean time of timed parts, and the windows in the replay stores.",
            caption="A learner that waits for actors needs more of them or a higher utd_ratio; actors that wait need a "
            "faster learner or a lower one.",
            svg=draw_figure(metrics, [panels.draw_rates, panels.draw_waits, panels.draw_timers, panels.draw_replay]),
            missing=no_training,
        ),
    ]


def render(page: Page) -> str:
    """The page as a whole HTML document; every text is escaped."""
    facts = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in page.facts)
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in page.notes)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(page.title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>",
            f"<h1>{_text(page.title)}</h1>",
            f'<dl id="headline">{facts}</dl>{notes}',
            *(_figure(figure) for figure in page.figures),
            _table("evaluations", "Evaluations", page.evaluations, "No evaluation has been made of this run yet."),
            _table("configuration", "Configuration", page.configuration, "This run folder holds no config.json."),
            _table("events", "Events", page.events, "Nothing out of the ordinary was recorded."),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _figure(figure: Figure) -> str:
    head = f'<section id="{_text(figure.key)}">\n<h2>{_text(figure.title)}</h2>'
    if figure.svg is None:
        return f'{head}\n<p class="missing">{_text(figure.missing)}</p>\n</section>'
    source = "data:image/svg+xml;base64," + base64.b64encode(figure.svg.encode()).decode()
    return (
        f'{head}\n<figure><div class="wide"><img src="{source}" alt="{_text(figure.alt)}"></div>'
        f"<figcaption>{_text(figure.caption)}</figcaption></figure>\n</section>"
    )


def _table(key: str, title: str, table: Table, missing: str) -> str:
    columns, rows = table
    head = f'<section id="{key}">\n<h2>{title}</h2>'
    if not rows:
        return f'{head}\n<p class="missing">{missing}</p>\n</section>'
    names = "".join(f'<th scope="col">{_text(name)}</th>' for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    whole = f"<table><thead><tr>{names}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'{head}\n<div class="wide">{whole}</div>\n</section>'


def _text(value: str) -> str:
    return html.escape(value, quote=True)


_CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --line: #d0d7de; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a2abb6; --paper: #14171c; --line: #363c45; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: .8rem 1.5rem; margin: 0; }
dt, figcaption, .note, .missing { color: var(--soft); font-size: .87rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
dl > div:first-child { grid-column: 1 / -1; }
dl > div:first-child dd { font-size: 1.3rem; font-weight: 600; }
figure { margin: 0; }
.wide { overflow-x: auto; }
img { width: 100%; min-width: 760px; height: auto; display: block; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
"""
