"""The page of a rehearsal (`lab.py`): its stages, what the camera saw, and the links to the run's own report."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.io import atomic_write
from serl_chunk.runs.report.report import build_report
from serl_chunk.types import IMAGE_PREFIX, Episode
from serl_chunk.viz.page import Html, element, facts, figure, film, note, page, section, table
from support.lab_experiment import CAMERA

FRAMES = 6  # of an episode
PAGES = {"demos": "the demonstrations in the viewer", "run": "the run's episodes in the viewer"}
SCALE = 3  # pixels of a picture for one of the camera's


class Stage(NamedTuple):
    name: str
    shown: str
    seconds: float


def write_report(out: Path, driver: str, stages: Sequence[Stage], seconds: float) -> Path:
    """Write `report.html` into the folder of a rehearsal; returns its path."""
    rows = [(stage.name, stage.shown, f"{stage.seconds:.0f} s") for stage in stages]
    head = [("Driver", driver), ("Time", f"{seconds / 60:.1f} minutes"), ("Stages", str(len(stages)))]
    content = [
        facts(head),
        section("Stages", table(("stage", "what it showed", "time"), rows)),
        section("Pictures", *_pictures(out)),
        section("Run", *_run(out)),
    ]
    report = out / "report.html"
    atomic_write(report, page("Rehearsal of a lab", *content))
    return report


def _pictures(out: Path) -> list[Html]:
    shown = []
    for folder, text in (("demos", "a demonstration"), ("misses", "a near miss")):
        for file in sorted((out / folder).glob("*.hdf5"))[:1]:
            shown.append(_strip(read_episode(file), f"{text} ({folder}/{file.name})"))
    curve = out / "classifier" / "validation.png"
    if curve.exists():
        image = Image.open(curve).convert("RGB")
        wide = Image.new("RGB", (2 * image.width, image.height), "white")  # a page stretches pictures to its width
        wide.paste(image)
        shown.append(figure(_png(wide), "ROC curves", "the classifier on held-out episodes"))
    return shown or [note("nothing was recorded")]


def _run(out: Path) -> list[Html]:
    run = out / "run"
    if not (run / "metrics.jsonl").exists():
        return [note("nothing was trained")]
    report = build_report(run)
    links = [
        (f"{run.name}/{report.name}", "the run's report"),
        *((f"{name}.html", text) for name, text in PAGES.items()),
    ]
    shown = [element("p", element("a", text, href=name)) for name, text in links if (out / name).exists()]
    text = (
        f"serl-chunk view {run} plays and labels the run's episodes, serl-chunk view {out / 'demos'} the demonstrations"
    )
    shown.append(note(text))
    films = sorted(run.rglob("*.mp4"))
    for path in (films[0], films[-1]) if films else ():
        name = str(path.relative_to(out))
        shown.append(film(name, f"an episode of the evaluation ({name})"))
    shown.append(figure((run / "report.png").read_bytes(), "curves of the run", "the run"))
    return shown


def _strip(episode: Episode, text: str) -> Html:
    """Show frames of an episode from its first to its last one in a row."""
    frames = episode.steps.sparse[IMAGE_PREFIX + CAMERA]
    at = np.linspace(0, episode.steps.n - 1, FRAMES).astype(int)
    newest = np.maximum(np.searchsorted(frames.index, at, "right") - 1, 0)
    row = np.concatenate([np.pad(np.asarray(frames.values[k]), ((1, 1), (1, 1), (0, 0))) for k in newest], axis=1)
    image = Image.fromarray(row).resize((row.shape[1] * SCALE, row.shape[0] * SCALE), Image.Resampling.NEAREST)
    return figure(_png(image), text, f"{text}, ticks {', '.join(str(k) for k in at)}")


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()
