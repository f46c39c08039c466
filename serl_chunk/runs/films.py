"""Films of training episodes, from the frames in a run's journal."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.io import atomic_write
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.runs.report.tables import TRAINING_FILMS
from serl_chunk.types import IMAGE_PREFIX, DataError, Episode, Source
from serl_chunk.viz.video import EpisodeVideo, ffmpeg_program

logger = logging.getLogger(__name__)


def film_training_episodes(run: Path, n: int) -> int:
    """Film the newest `n` training episodes that have frames to `videos/training/`, and return their number.

    An episode belongs to the row of `metrics.jsonl` in the same place, counted from the end, if their lengths agree;
    others are not filmed. Raises ConfigError (no journal, or no ffmpeg), DataError (no `metrics.jsonl`) and VideoError.
    """
    ffmpeg_program()
    source, rows = RunSource(run), read_metrics(run)["episode"]
    folder = (run / TRAINING_FILMS).parent
    entries: list[dict[str, Any]] = []
    keys = [key for key in source.keys() if not source.about(key).demonstration]  # those have no row
    for back, key in enumerate(reversed(keys), 1):
        if len(entries) == n or back > len(rows):
            break
        row, number = rows[-back], rows[-back]["number"]
        if row.get("episode/l") != source.about(key).length:
            continue
        name = f"{number:06d}.mp4"
        if not (folder / name).exists():
            try:
                if not _film(source.read(key), folder / name, source.spec.control_hz):
                    logger.info("no films of training episodes: the journal of %s has no frames", run)
                    break
            except DataError as error:  # dropped by the learner meanwhile, or damaged
                logger.warning("training episode %s is not filmed: %s", number, error)
                continue
        entries.append({"number": number, "file": name})
    if entries:
        atomic_write(run / TRAINING_FILMS, json.dumps(entries))
    return len(entries)


def _film(episode: Episode, path: Path, control_hz: float) -> bool:
    """Write an episode's film, each camera's frame held until its next one; False without frames."""
    cameras = {k: rows for k, rows in episode.steps.sparse.items() if k.startswith(IMAGE_PREFIX) and len(rows.index)}
    if not cameras:
        return False
    video = EpisodeVideo(path, control_hz)
    try:
        for tick, source in enumerate(episode.steps.source):
            at = {k: max(0, int(np.searchsorted(rows.index, tick, "right")) - 1) for k, rows in cameras.items()}
            images = {k: np.asarray(rows.values[at[k]]) for k, rows in cameras.items()}
            video.add(images, human=source == Source.HUMAN)
        video.finish(path.name)
    except BaseException:
        video.discard()
        raise
    return True
