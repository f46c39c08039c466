"""The viewer's page as one file that needs no viewer: rows of all episodes, and as much of each as fits."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.source import Source
from serl_chunk.data.validate import cameras_of
from serl_chunk.io import atomic_write, format_bytes, os_faults, plural
from serl_chunk.types import ConfigError, DataError, SerlChunkError, SparseRows
from serl_chunk.viewer.catalogue import Catalogue
from serl_chunk.viewer.content import episode_json, to_jpeg
from serl_chunk.viewer.server import ASSETS

PAGE_BYTES = 50_000_000  # of a page, by default
CURVES = 0.5  # share of the page's size that curves may take; frames have the rest
WIDTH = 320  # pixels of a frame, at most
QUALITY = 80  # of its JPEG file
_PREFIX = "data:image/jpeg;base64,"


def write_page(
    path: Path,
    source: Source,
    numbers: Sequence[int],
    max_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write the page of the episodes `numbers` of `source`, and return a line about it.

    Frames are thinned evenly, and smaller than recorded, so that the page stays below `max_bytes`. Where not even the
    curves fit, the last episodes have their row in the list alone.

    Raises:
        ConfigError: `path` exists, or `max_bytes` is too little for the list.
        DataError: the page cannot be written.
    """
    check_absent(path, "out")
    catalogue = Catalogue(source)
    rows = [row.json() for row in catalogue.gather()]
    info = {"path": str(source.path), "format": source.format, "hz": source.hz or 0.0, "total": len(rows),
            "notes": source.notes(), "refusal": "", "final_discard": False, "left_out": ""}  # fmt: skip
    page: dict[str, Any] = {"info": info, "list": {"total": len(rows), "gathered": len(rows), "rows": rows}}
    page |= {"episodes": {}, "rows_only": "this page has the row of this episode alone"}
    left = max_bytes - len(_document(page).encode()) - 4096
    if left < 0:
        least = math.ceil((max_bytes - left) / 1e5) / 10
        text = f"{max_bytes / 1e6:g} is too little for the list of {plural(len(rows), 'episode')} alone"
        raise ConfigError(f"{text}. Give at least {least:.1f}", parameter="size_mb")
    curves = _with_curves(catalogue, source, numbers, int(CURVES * left), progress)
    left -= sum(len(json.dumps(content)) for content in curves.values())
    kept, recorded = _add_frames(catalogue, curves, left, progress)
    page["episodes"] = curves
    parts = [f"{recorded - kept:,} of {recorded:,} frames are left out"] if kept < recorded else []
    if rows_only := len(numbers) - len(curves):
        parts.append(f"{plural(rows_only, 'episode')} of those chosen have their row alone")
    info["left_out"] = "; ".join(parts)
    document = _document(page)
    with os_faults(DataError, f"{path}: cannot write the page", "Choose another file"):
        atomic_write(path, document)
    size = format_bytes(len(document.encode()))
    about = f"wrote {path}: {size}, {plural(len(rows), 'row')}, {plural(len(curves), 'episode')}"
    return f"{about}. {info['left_out']}" if info["left_out"] else about


def check_absent(path: Path, parameter: str) -> None:
    """Raise ConfigError where a file to be written exists, or its folder does not."""
    if path.exists():
        raise ConfigError(f"{path} exists. Remove it, or choose another name", parameter=parameter)
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder. Create it, or choose another", parameter=parameter)


def _with_curves(
    catalogue: Catalogue, source: Source, numbers: Sequence[int], budget: int, progress: Callable[[int, int], None]
) -> dict[int, dict[str, Any]]:
    """Return number -> content of the first episodes that fit into `budget` bytes; unreadable ones are left out."""
    found: dict[int, dict[str, Any]] = {}
    for done, number in enumerate(numbers, 1):
        try:
            content = episode_json(catalogue.read(number), source)
        except SerlChunkError:  # its row has the reason
            continue
        budget -= len(json.dumps(content))
        if budget < 0:
            break
        found[number] = content
        progress(done, 2 * len(numbers))
    return found


def _add_frames(
    catalogue: Catalogue, contents: dict[int, dict[str, Any]], budget: int, progress: Callable[[int, int], None]
) -> tuple[int, int]:
    """Give the cameras of `contents` their `files`; returns how many frames these are, and how many there were."""
    cameras = sum(len(content["cameras"]) for content in contents.values())
    kept = recorded = 0
    for done, (number, content) in enumerate(contents.items(), 1):
        episode_cameras = cameras_of(catalogue.read(number)) if content["cameras"] else {}
        all_of_it, kept_of_it = 0, 0
        for camera in content["cameras"]:
            rows = episode_cameras[camera["name"]]
            try:
                ticks, files = _thinned(rows, budget // cameras)
            except DataError as error:
                content["left_out"], ticks, files = str(error), [], []
            budget -= sum(map(len, files))
            cameras -= 1
            camera |= {"ticks": ticks, "files": files}
            kept_of_it, all_of_it = kept_of_it + len(files), all_of_it + len(rows.index)
        if kept_of_it < all_of_it:
            content.setdefault("left_out", f"{all_of_it - kept_of_it} of {all_of_it} frames")
        kept, recorded = kept + kept_of_it, recorded + all_of_it
        progress(len(contents) + done, 2 * len(contents))
    return kept, recorded


def _thinned(rows: SparseRows, budget: int) -> tuple[list[int], list[str]]:
    """Return ticks and data addresses of as many frames as fit into `budget` bytes, evenly spaced."""
    largest = len(_address(rows, 0))
    count = min(len(rows.index), int(budget // (1.1 * largest)))  # frames of one camera differ in size
    chosen: list[int] = []
    if count:
        chosen = np.unique(np.linspace(0, len(rows.index) - 1, count).round().astype(int)).tolist()
    ticks: list[int] = []
    files: list[str] = []
    for i in chosen:
        address = _address(rows, i)
        budget -= len(address) + 16
        if budget < 0:
            break
        ticks.append(int(rows.index[i]))
        files.append(address)
    return ticks, files


def _address(rows: SparseRows, i: int) -> str:
    return _PREFIX + base64.b64encode(to_jpeg(np.asarray(rows.values[i]), WIDTH, QUALITY)).decode()


def _document(page: dict[str, Any]) -> str:
    content = json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = (ASSETS / "page.js").read_text()
    document = (ASSETS / "page.html").read_text()
    style = f"<style>\n{(ASSETS / 'page.css').read_text()}</style>"
    document = document.replace('<link rel="stylesheet" href="page.css">', style)
    embedded = f'<script type="application/json" id="embedded">{content}</script>\n<script>\n{script}</script>'
    return document.replace('<script src="page.js"></script>', embedded)
