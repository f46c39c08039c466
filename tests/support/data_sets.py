"""Small data sets of the formats that are read, written to a path and changed there."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from serl_chunk.data.formats.hdf5_io import close_files
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import Episode

Content = dict[str, Any]
Row = dict[str, Any]
KEYS = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10}
ENV = {"env_name": "NutAssemblySquare", "type": 1, "env_kwargs": {"control_freq": 20, "reward_shaping": False}}


def amended(path: Path, changes: Content) -> Path:
    """Change what lies at `path`; None removes an item, and a function is given what is there.

    Items are named as HDF5 names them, `group@name` for attributes; in a pickle by their keys and positions.
    """
    if path.suffix == ".hdf5":
        close_files(path)  # of readers of its frames
        with h5py.File(path, "a") as file:
            for name, value in changes.items():
                group, at, attribute = name.partition("@")
                here, key = (file.require_group(group or "/").attrs, attribute) if at else (file, name)
                value = value(here[key] if at else here[key][()]) if callable(value) else value
                if key in here:
                    del here[key]
                if value is not None:
                    here[key] = value
    elif path.suffix == ".npz":
        with np.load(path) as file:
            content = {name: file[name] for name in file.files}
        for name, value in changes.items():
            content[name] = value(content[name]) if callable(value) else value
        npz_file(path, {name: value for name, value in content.items() if value is not None})
    else:
        rows = pickle.loads(path.read_bytes())
        for name, value in changes.items():
            if not name:  # all of it
                return pickled(path, value(rows) if callable(value) else value)
            here = rows
            *outer, key = [int(part) if part.isdigit() else part for part in name.split("/")]
            for part in outer:
                here = here[part]
            if value is None:
                del here[key]
            else:
                here[key] = value(here[key]) if callable(value) else value
        pickled(path, rows)
    return path


def read_all(path: Path, format: str | None = None, **options: Any) -> list[Episode]:
    source = open_episodes(path, ReadOptions(**options), format)
    return list(map(source.read, source.keys()))


def notes_of(path: Path, format: str | None = None, **options: Any) -> str:
    return "\n".join(open_episodes(path, ReadOptions(**options), format).notes())


def states_of(episodes: list[Episode]) -> list[list[float]]:
    """The first value of every state."""
    return [e.steps.observation["state"][:, 0].tolist() for e in episodes]


def hdf5_file(path: Path, content: Content) -> Path:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return amended(path, content)


def npz_file(path: Path, content: Content, compress: bool = True) -> Path:
    (np.savez_compressed if compress else np.savez)(path, **content)
    return path


def pickled(path: Path, value: Any, protocol: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def transitions(ends: str, *, timeouts: bool = True, successors: bool = False) -> Content:
    """D4RL's arrays, a row a letter: `.`, `T` terminal, `G` that with reward 1, `O` time-out, `r` an unsaid reset."""
    n = len(ends)
    state = np.arange(n, dtype=np.float32)
    restart = np.array([c in "TGOr" for c in ends])
    out = {
        "observations": np.repeat(state[:, None], 3, axis=1),
        "actions": np.random.default_rng(0).uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": np.array([c == "G" for c in ends], np.float32),
        "terminals": np.array([c in "TG" for c in ends]),
        "infos/qpos": np.zeros((n, 2)),
        "metadata/algorithm": "sac",
    }
    if timeouts:
        out["timeouts"] = np.array([c == "O" for c in ends])
    if successors:
        out["next_observations"] = np.repeat(np.where(restart, state + 0.5, state + 1)[:, None], 3, axis=1)
    return out


def robomimic(
    path: Path,
    rewards: tuple[tuple[float, ...], ...] = ((0, 0, 0, 1), (0, 0, 0)),
    *,
    images: bool = False,
    keys: dict[str, int] = KEYS,
) -> Path:
    rng = np.random.default_rng(0)
    content = {"data@env_args": json.dumps(ENV), "mask/train": np.array([b"demo_0"])}
    for i, reward in enumerate(rewards):
        n, demo = len(reward), f"data/demo_{i}"
        content |= {f"{demo}/actions": rng.uniform(-1, 1, (n, 7)), f"{demo}/rewards": np.array(reward, np.float64)}
        content |= {f"{demo}/dones": np.array([0] * (n - 1) + [1]), f"{demo}@num_samples": n}
        values = {
            k: rng.normal(size=(n + 1, d)) for k, d in ((KEYS if keys is None else keys) | {"robot0_q": 7}).items()
        }
        for camera in ("agentview", "eye_in_hand") if images else ():
            values[f"{camera}_image"] = rng.integers(0, 256, (n + 1, 6, 8, 3), dtype=np.uint8)
        content |= {f"{demo}/obs/{name}": value[:-1] for name, value in values.items()}
        content |= {f"{demo}/next_obs/{name}": value[1:] for name, value in values.items()}
    return hdf5_file(path, content)


def minari(path: Path, steps: tuple[int, ...] = (3, 4), **more: Any) -> Path:
    """Minari's file, of a Dict space with two images; each episode ends in a reward of 1. `more` is in each episode."""
    content: Content = {}
    for i, n in enumerate(steps):
        rng = np.random.default_rng(i)
        frames = rng.integers(0, 256, (n + 1, 6, 8, 3), dtype=np.uint8)
        each = {
            "observations/goal": np.full((n + 1, 2), i, np.float32),
            "observations/arm/joints": np.repeat(np.arange(n + 1)[:, None], 3, axis=1),
            "observations/top": frames, "observations/wrist": jpeg_rows(frames),
            "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32), "rewards": np.eye(n)[-1],
            "terminations": np.eye(n, dtype=bool)[-1], "truncations": np.zeros(n, bool),
        }  # fmt: skip
        content |= {f"episode_{i}/{name}": value for name, value in (each | more).items()}
    return hdf5_file(path, content)


def trajectories(lengths: tuple[int, ...] = (5, 3), seed: int = 0) -> Content:
    """OGBench's arrays, of trajectories of so many rows; observations are the number of their row."""
    n = sum(lengths)
    rng = np.random.default_rng(seed)
    terminals = np.zeros(n, bool)
    terminals[np.cumsum(lengths) - 1] = True
    return {
        "observations": np.repeat(np.arange(n, dtype=np.float32)[:, None], 4, axis=1) + 100 * seed,
        "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32),
        "terminals": terminals,
        "qpos": rng.normal(size=(n, 21)).astype(np.float32),
    }


def hil_serl(n: int, seed: int = 0, *, success: bool = True, infos: bool = True, ended: bool = True) -> list[Row]:
    """n transitions of one episode, as record_demos.py or (without infos) train_rlpd.py store them."""

    def observe(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(100 * seed + i)
        frames = rng.integers(0, 256, (2, 1, 6, 8, 3), dtype=np.uint8)
        return {"state": rng.normal(size=(1, 5)).astype(np.float32), "wrist_1": frames[0], "side": frames[1]}

    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        done = ended and i == n - 1
        row = {
            "observations": observe(i),
            "actions": rng.normal(size=4),  # float64, as from a SpaceMouse
            "next_observations": observe(i + 1),
            "rewards": int(done and success),
            "masks": 1.0 - done,
            "dones": np.bool_(done),
        }
        if infos:
            row["infos"] = {"succeed": bool(done and success), "left": False, "intervene_action": row["actions"]}
        rows.append(row)
    return rows


def image_file(frame: np.ndarray, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).convert(mode).save(out, kind, **options)
    return out.getvalue()


def jpeg_rows(frames: np.ndarray | list[np.ndarray], padding: int = 0, quality: int = 50) -> np.ndarray:
    files = [np.frombuffer(image_file(frame, quality=quality), np.uint8) for frame in frames]
    longest = max(map(len, files)) + padding
    return np.stack([np.pad(file, (0, longest - len(file))) for file in files])


def aloha(
    path: Path, n: int = 6, *, seed: int = 0, joints: int = 2, dtype: Any = np.float32,
    frames: Callable[[np.ndarray], np.ndarray] | None = lambda frames: frames, more: Content | None = None,
) -> Content:  # fmt: skip
    """Write a file as the recorders in use do, `frames` as they store them (None: without); return what it shows."""
    rng = np.random.default_rng(seed)
    content: Content = {name: rng.normal(size=(n, joints)).astype(dtype) for name in ("observations/qpos", "action")}
    smooth = rng.integers(0, 256, (2, n, 2, 2, 3), dtype=np.uint8)
    smooth = smooth.repeat(8, axis=2).repeat(12, axis=3)  # 16 x 24: of 2 x 2 colours, kind to JPEG
    shown = {f"observations/images/{name}": smooth[i] for i, name in enumerate(("top", "wrist")) if frames is not None}
    stored = {name: frames(values) for name, values in shown.items()} if frames is not None else {}
    hdf5_file(path, content | stored | (more or {}))
    return content | shown


SAMPLES: dict[str, Callable[[Path], Any]] = {
    "d4rl": lambda folder: hdf5_file(folder / "x.hdf5", transitions("..O..O")),
    "fields": lambda folder: robomimic(folder / "x.hdf5", images=True),
    "episodes": lambda folder: aloha(folder / "x.hdf5") and folder / "x.hdf5",
    "hil_serl": lambda folder: pickled(folder / "x.pkl", hil_serl(3) + hil_serl(3, 1)),
    "ogbench": lambda folder: npz_file(folder / "x.npz", trajectories()),
}
"""Format -> writes a file of two episodes, of one for `episodes`, into a folder, and returns its path."""
