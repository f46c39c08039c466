"""Pictures of episodes of aloha_sim next to each other: a row an episode, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim.env import AlohaSimEnv
from serl_chunk.types import IMAGE_PREFIX

SIZE, TEXT = 160, 14  # pixels of a picture, and of the line above a row
JOINTS = 14


def sheet(rows: Sequence[tuple[str, np.ndarray]], path: Path, *, camera: str = "angle", columns: int = 8) -> None:
    """Draw episodes from their states.

    Args:
        rows: a title and the states, float32[T, 21], of each episode.
        path: PNG.
    """
    from PIL import Image, ImageDraw

    env = AlohaSimEnv(AlohaSimConfig(cameras=(camera,), image_size=SIZE))
    picture = Image.new("RGB", (columns * SIZE, len(rows) * (SIZE + TEXT)), "white")
    draw = ImageDraw.Draw(picture)
    for y, (title, states) in enumerate(rows):
        draw.text((2, y * (SIZE + TEXT) + 1), title, (0, 0, 0))
        for x, tick in enumerate(np.linspace(0, len(states) - 1, columns).astype(int)):
            state = states[tick].astype(np.float64)
            env.place(state[:JOINTS], state[JOINTS:])
            frame = env.read_images([camera])[IMAGE_PREFIX + camera]
            picture.paste(Image.fromarray(frame), (x * SIZE, y * (SIZE + TEXT) + TEXT))
    env.close()
    picture.save(path)
