"""LeRobot's names of columns, features and files. Sources: LeRobotDataset v3.0 and v2.1 as lerobot writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

V30, V21 = "v3.0", "v2.1"
STATE, ACTION = "observation.state", "action"
CAMERA = "observation.images."
REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
REWARDS = (REWARD, "reward")  # columns of rewards that are read
EXTRA = "complementary_info."
INTERVENTION = EXTRA + "is_intervention"
TIMESTAMP, FRAME_INDEX = "timestamp", "frame_index"
EPISODE_INDEX, INDEX, TASK_INDEX = "episode_index", "index", "task_index"
AUTOMATIC = (TIMESTAMP, FRAME_INDEX, EPISODE_INDEX, INDEX, TASK_INDEX)  # columns that lerobot adds to every data set
CHUNK = 1000  # files of a folder
SIDE = Path("meta/serl_chunk.parquet")
INFO = Path("meta/info.json")
TASKS = Path("meta/tasks.parquet")
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

# StepBlock's columns that LeRobot has no name for: dtype in the data set. Wide integers, since torch has no others.
EXTRA_COLUMNS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("source", "decision_tick", "policy_version"), np.dtype(np.int64)),
    "policy_age": np.dtype(np.float32),
    "stamp": np.dtype(np.float64),
}
SCALARS: dict[str, np.dtype[Any]] = {
    REWARD: np.dtype(np.float32),
    **dict.fromkeys((DONE, SUCCESS, INTERVENTION), np.dtype(np.bool_)),
    **{EXTRA + name: dtype for name, dtype in EXTRA_COLUMNS.items()},
    TIMESTAMP: np.dtype(np.float32),
    **dict.fromkeys((FRAME_INDEX, EPISODE_INDEX, INDEX, TASK_INDEX), np.dtype(np.int64)),
}
"""Columns of one value a row, in their order: those of LeRobot last."""
READ = (STATE, ACTION, *REWARDS, SUCCESS, INTERVENTION, *(EXTRA + n for n in EXTRA_COLUMNS), *AUTOMATIC)
"""Columns that are read."""


class Patterns(NamedTuple):
    """Patterns of a version's file names, as in `info.json`."""

    data: str
    video: str


PATTERNS = {
    V30: Patterns(
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
    V21: Patterns(
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
}


def file_of(pattern: str, number: int, video_key: str = "") -> str:
    """Return the path, below the data set, of the `number`-th file (v3.0) or episode (v2.1)."""
    chunk, index = divmod(number, CHUNK)
    return pattern.format(
        chunk_index=chunk, file_index=index, episode_chunk=chunk, episode_index=number, video_key=video_key
    )


def features(layout: dict[str, Any]) -> dict[str, Any]:
    """Return `info.json`'s features of a data set with this layout (see `writer.LeRobotSink.layout`)."""
    state, action = layout.get("names", (None, None))
    out: dict[str, Any] = {
        STATE: {"dtype": "float32", "shape": [layout["state_dim"]], "names": state},
        ACTION: {"dtype": "float32", "shape": [layout["action_dim"]], "names": action},
    }
    for camera, (height, width) in layout["cameras"].items():
        feature: dict[str, Any] = {"shape": [height, width, 3], "names": ["height", "width", "channels"]}
        video = layout["videos"].get(camera)
        if video is None:
            out[CAMERA + camera] = {"dtype": "image", **feature}
        else:
            about = {
                "video.height": height,
                "video.width": width,
                "video.codec": video["codec"],
                "video.pix_fmt": video["pix_fmt"],
                "video.is_depth_map": False,
                "video.fps": fps(layout["hz"]),
                "video.channels": 3,
                "has_audio": False,
            }
            out[CAMERA + camera] = {"dtype": "video", **feature, "info": about}
    for name, dtype in SCALARS.items():
        out[name] = {"dtype": dtype.name, "shape": [1], "names": None}
    return out


def fps(hz: float) -> int | float:
    """Return a rate as LeRobot writes it: whole where it is whole."""
    return int(hz) if float(hz).is_integer() else hz
